"""Narrow cache formats on a CPU: the bytes of formats/latent.py, near the wide cache, exact among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tfglm.cache.pages import PAGE
from tfglm.cache.sizes import layer_bytes
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.formats.latent import KvFormat, pack_index, pack_rows
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows

NARROW = [KvFormat.FP8, KvFormat.FP4, KvFormat.FP4X]
TEXT = torch.randint(0, 300, (120,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("packed")
    write_checkpoint(path, "tiny", seed=2, num_hidden_layers=5, n_routed_experts=4, index_topk=24, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def logits(model: Glm53, cuts: list[int]) -> torch.Tensor:
    stream, found, start = model.open_stream(), [], 0
    for cut in cuts:
        found.append(model.forward([Rows(stream, TEXT[start : start + cut], cut)]))
        start += cut
    stream.close()
    return torch.cat(found)


@pytest.mark.parametrize(("kv", "error"), [(KvFormat.FP8, 0.1), (KvFormat.FP4, 0.3), (KvFormat.FP4X, 0.3)])
def test_near_the_wide_cache(kv: KvFormat, error: float, tiny: Checkpoint) -> None:
    wide = logits(load_model(tiny, tokens=PAGE, kv="fp32"), [120])
    narrow = logits(load_model(tiny, tokens=PAGE, kv=kv.value), [120])
    distance = ((narrow - wide).norm(dim=1) / wide.norm(dim=1)).median()
    assert 1e-4 < float(distance) < error


@pytest.mark.parametrize("kv", NARROW)
def test_rows_do_not_depend_on_windows(kv: KvFormat, tiny: Checkpoint) -> None:
    model = load_model(tiny, tokens=2 * PAGE, kv=kv.value)
    whole = logits(model, [120])
    for cuts in ([1] * 12 + [108], [64, 56], [7] * 17 + [1]):
        assert torch.equal(logits(model, cuts), whole)


@pytest.mark.parametrize("kv", NARROW)
def test_cached_bytes_are_the_formats(kv: KvFormat, tiny: Checkpoint) -> None:
    """Of the first layer, whose rows no cache has touched; the wide cache has the values before packing."""
    models = [load_model(tiny, tokens=PAGE, kv=name) for name in ("fp32", kv.value)]
    for model in models:
        model.forward([Rows(model.open_stream(), TEXT, 1)])
    (wide, narrow), count = (model.cache.layers[0] for model in models), len(TEXT)

    def values(plane: torch.Tensor) -> np.ndarray:
        return plane.flatten(0, 1)[:count].bfloat16().float().numpy()

    latent, rotary = pack_rows(kv, values(wide.latent), values(wide.rope))
    assert wide.index is not None and narrow.index is not None
    index = pack_index(kv, values(wide.index))
    for plane, expected in ((narrow.latent, latent), (narrow.rope, rotary), (narrow.index, index)):
        assert plane.dtype == torch.uint8
        assert np.array_equal(plane.flatten(0, 1)[:count].numpy(), expected)
    row = layer_bytes(tiny.config, kv.value)
    assert (narrow.latent.shape[2], narrow.rope.shape[2], narrow.index.shape[2]) == (row.latent, row.rotary, row.index)
