"""The planes that hold what attention remembers of a token: latent, rotated key, and on full layers an index key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.cache.pages import PAGE, PagePool, pages_for
from tfglm.cache.sizes import trunk_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError, MemoryShortError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class LayerPlanes:
    """One layer's cache: latent [pages, PAGE, kv_lora_rank], rope [pages, PAGE, qk_rope_head_dim] and, on layers with
    an indexer of their own, index [pages, PAGE, index_head_dim]."""

    latent: torch.Tensor
    rope: torch.Tensor
    index: torch.Tensor | None


class LatentCache:
    """The planes of every layer and the pool of their pages.

    kv: "bf16", or "fp32" for comparing with engines that cache float32. Memory is reserved, not touched: on a CPU a
    page costs RAM when it is first written. Raises ConfigError for another kv, MemoryShortError if `tokens` cannot be
    reserved. ranks: those that share the cache of every stream (models/context.py), of which this has tokens / ranks of
    each; its planes then have a page more, the last, which belongs to no stream.
    """

    def __init__(self, config: ModelConfig, tokens: int, kv: str, ranks: int = 1) -> None:
        if kv not in DTYPES:
            raise ConfigError(f"kv is {kv!r}; supported: {', '.join(DTYPES)}")
        if tokens < 1:
            raise ConfigError(f"the cache has room for {tokens} tokens; at least 1 is needed")
        pages = pages_for(tokens)
        self.bytes_per_token = trunk_bytes_per_token(config, kv)

        def plane(width: int) -> torch.Tensor:
            return torch.empty(pages + (ranks > 1), PAGE, width, dtype=DTYPES[kv])

        try:
            self.layers = [
                LayerPlanes(
                    latent=plane(config.kv_lora_rank),
                    rope=plane(config.qk_rope_head_dim),
                    index=plane(config.index_head_dim) if kind == "full" else None,
                )
                for kind in config.indexer_types
            ]
        except RuntimeError as exc:
            gib = pages * PAGE * self.bytes_per_token / 2**30
            raise MemoryShortError(
                f"a cache of {tokens} tokens needs {gib:.1f} GiB ({self.bytes_per_token} bytes a token), which the "
                "system refuses; ask for fewer tokens"
            ) from exc
        self.pool = PagePool(pages, ranks)
