"""The planes that hold what attention remembers of a token: latent, rotated key, and on full layers an index key."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

from tfglm.cache.pages import PAGE, PagePool, pages_for
from tfglm.cache.sizes import FLOAT32, layer_bytes, trunk_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.formats.latent import KvFormat

_DTYPES = {"bf16": torch.bfloat16, FLOAT32: torch.float32}
CPU_FORMATS = (*(kind.value for kind in KvFormat), FLOAT32)
"""Formats of the cache on a CPU; a GPU has the same but float32."""


@dataclass(frozen=True)
class LayerPlanes:
    """One layer's cache: latent [pages, PAGE, kv_lora_rank], rope [pages, PAGE, qk_rope_head_dim] and, on layers with
    an indexer of their own, index [pages, PAGE, index_head_dim]. Rows of formats.latent's narrow formats, and all rows
    on a GPU, are bytes: uint8 of layer_bytes' widths."""

    latent: torch.Tensor
    rope: torch.Tensor
    index: torch.Tensor | None


class Cache(Protocol):
    """The planes of every layer, the pool of their pages, and what a token takes of all of them together."""

    layers: list[LayerPlanes]
    pool: PagePool
    bytes_per_token: int


class LatentCache:
    """The planes of every layer and the pool of their pages.

    kv: one of CPU_FORMATS; "fp32" is for comparing with engines that cache float32. Memory is reserved, not touched: on
    a CPU a page costs RAM when it is first written. Rows that nobody has written are zeros: a drafter may lack some of
    a kept page, and must find numbers there. Raises ConfigError for another kv, MemoryShortError if `tokens`
    cannot be reserved. ranks: those that share the cache of every stream (models/context.py), of which this has tokens
    / ranks of each; its planes then have a page more, the last, which belongs to no stream.
    """

    def __init__(self, config: ModelConfig, tokens: int, kv: str, ranks: int = 1) -> None:
        if kv not in CPU_FORMATS:
            raise ConfigError(f"--kv is {kv!r}; a CPU has {', '.join(CPU_FORMATS)}")
        if tokens < 1:
            raise ConfigError(f"the cache has room for {tokens} tokens; at least 1 is needed")
        pages = pages_for(tokens)
        self.bytes_per_token = trunk_bytes_per_token(config, kv)

        row, dtype = layer_bytes(config, kv), _DTYPES.get(kv, torch.uint8)

        def plane(row_bytes: int) -> torch.Tensor:
            return _zeros((pages + (ranks > 1), PAGE, row_bytes // dtype.itemsize), dtype)

        try:
            self.layers = [
                LayerPlanes(
                    latent=plane(row.latent),
                    rope=plane(row.rotary),
                    index=plane(row.index) if kind == "full" else None,
                )
                for kind in config.indexer_types
            ]
        except (OSError, ValueError, OverflowError) as exc:
            gib = pages * PAGE * self.bytes_per_token / 2**30
            raise MemoryShortError(
                f"a cache of {tokens} tokens needs {gib:.1f} GiB ({self.bytes_per_token} bytes a token), which the "
                "system refuses; ask for fewer tokens"
            ) from exc
        self.pool = PagePool(pages, ranks)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of memory that the system clears when it is first touched; torch.zeros would touch all of it."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
