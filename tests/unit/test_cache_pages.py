"""Pages: who holds them, who gets them back, and what happens when there are none."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from tfglm.cache.latent import LatentCache
from tfglm.cache.pages import PAGE, PagePool, Stream, pages_for
from tfglm.cache.sizes import trunk_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError, MemoryShortError

FIELDS: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "eos_token_id": 1,
}


def extend(stream: Stream, tokens: int) -> None:
    """What a forward pass does to a stream."""
    stream.pages += stream.pool.take(stream.missing_pages(stream.length + tokens))
    stream.length += tokens


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_take_all_or_nothing() -> None:
    pool = PagePool(3)
    taken = pool.take(2)
    with pytest.raises(MemoryShortError, match=f"{2 * PAGE} more tokens are needed, {PAGE} of {3 * PAGE} are free"):
        pool.take(2)
    assert pool.free == 1
    pool.give(taken)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_truncate_frees_whole_pages_only() -> None:
    pool = PagePool(4)
    stream = Stream(pool)
    extend(stream, 2 * PAGE + 5)
    held = list(stream.pages)
    stream.truncate(2 * PAGE + 1)
    assert (stream.length, stream.pages, pool.free) == (2 * PAGE + 1, held, 1)
    stream.truncate(2 * PAGE)
    assert (stream.length, stream.pages, pool.free) == (2 * PAGE, held[:2], 2)
    stream.truncate(0)
    assert (stream.length, stream.pages, pool.free) == (0, [], 4)


@pytest.mark.parametrize("length", [-1, 11])
def test_truncate_cannot_lengthen(length: int) -> None:
    stream = Stream(PagePool(1))
    extend(stream, 10)
    with pytest.raises(ValueError, match="10 tokens long"):
        stream.truncate(length)
    assert stream.length == 10


def test_close_frees_and_is_final() -> None:
    pool = PagePool(2)
    stream = Stream(pool)
    extend(stream, PAGE + 1)
    stream.close()
    stream.close()
    assert (pool.free, stream.length, stream.pages) == (2, 0, [])
    with pytest.raises(ValueError, match="closed"):
        stream.truncate(0)


def test_no_page_is_ever_held_twice_or_lost() -> None:
    pool, chance = PagePool(20), random.Random(0)
    streams: list[Stream] = []
    for _ in range(2000):
        action = chance.choice(["open", "extend", "extend", "truncate", "close"])
        if action == "open" and len(streams) < 6:
            streams.append(Stream(pool))
        elif streams:
            stream = chance.choice(streams)
            if action == "extend":
                with contextlib.suppress(MemoryShortError):
                    extend(stream, chance.randrange(1, 3 * PAGE))
            elif action == "truncate":
                stream.truncate(chance.randint(0, stream.length))
            elif action == "close":
                stream.close()
                streams.remove(stream)
        held = [page for stream in streams for page in stream.pages]
        assert len(held) == len(set(held)) and len(held) + pool.free == 20
        assert all(len(stream.pages) == pages_for(stream.length) for stream in streams)


def test_bytes_per_token_of_glm53() -> None:
    """The published figure for 78 layers without the MTP layer: 95,232 bytes in bf16."""
    config = ModelConfig.from_dict({**FIELDS, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert trunk_bytes_per_token(config, "bf16") == 95232
    assert trunk_bytes_per_token(config, "fp32") == 2 * 95232


@pytest.mark.parametrize(("kv", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_planes_are_what_bytes_per_token_says(kv: str, dtype: torch.dtype) -> None:
    config = ModelConfig.from_dict({**FIELDS, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]})
    cache = LatentCache(config, PAGE + 1, kv)
    planes = [p for layer in cache.layers for p in (layer.latent, layer.rope, layer.index) if p is not None]
    assert [layer.index is None for layer in cache.layers] == [False, True, False]
    assert all(p.dtype == dtype and p.shape[:2] == (2, PAGE) for p in planes)
    assert sum(p.nbytes for p in planes) == cache.pool.pages * PAGE * cache.bytes_per_token


def test_refusals() -> None:
    config = ModelConfig.from_dict({**FIELDS, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="'fp7'; a CPU has bf16, fp8, fp4, fp4x, fp32"):
        LatentCache(config, 10, "fp7")
    with pytest.raises(ConfigError, match="at least 1"):
        LatentCache(config, 0, "bf16")
    with pytest.raises(MemoryShortError, match=r"needs \d+\.\d GiB"):
        LatentCache(config, 1 << 50, "bf16")
