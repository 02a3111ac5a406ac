"""A page of the cache as bytes and back, for caches of every format."""

import pytest
import torch

from tfglm.cache.latent import LatentCache
from tfglm.cache.pages import PAGE
from tfglm.cache.tier import Pages
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.formats.latent import KvFormat
from tfglm.models.glm53_cuda import PackedCache

CONFIG = ModelConfig.from_dict(preset_config("tiny", {}))


@pytest.mark.parametrize("kv", ["bf16", "fp32", *KvFormat], ids=str)
def test_a_page_comes_back_and_no_other_changes(kv: str | KvFormat) -> None:
    if isinstance(kv, KvFormat):
        cache: LatentCache | PackedCache = PackedCache(CONFIG, 4 * PAGE, kv, torch.device("cpu"))
    else:
        cache = LatentCache(CONFIG, 4 * PAGE, kv)
    planes = [p for layer in cache.layers for p in (layer.latent, layer.rope, layer.index) if p is not None]
    for plane in planes:
        plane.view(torch.uint8).random_(256)
    before = [plane.view(torch.uint8).clone() for plane in planes]
    pages = Pages(cache.layers)
    assert pages.nbytes == PAGE * cache.bytes_per_token
    pages.write(1, pages.read(2))
    for plane, old in zip(planes, before, strict=True):
        now = plane.view(torch.uint8)
        assert torch.equal(now[1], old[2]) and torch.equal(now[[0, 2, 3]], old[[0, 2, 3]])
