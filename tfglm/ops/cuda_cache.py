"""Launches of kernels/cache_write.cu: what a token leaves in the cache, packed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfglm.checkpoint.config import INDEXER_LAYER_NORM_EPS
from tfglm.formats.latent import KvFormat
from tfglm.ops import driver
from tfglm.ops.base import Rope
from tfglm.ops.cuda_launch import chained

_THREADS = 128
_MOST_QUERIES = 2048
CODE = {KvFormat.BF16: 0, KvFormat.FP8: 1, KvFormat.FP4: 2, KvFormat.FP4X: 3}
"""KV in the kernels."""


def split_latents(
    a: torch.Tensor, q_norm: torch.Tensor, latent_norm: torch.Tensor, eps: float, rope: Rope, slots: torch.Tensor,
    kv: KvFormat, latent_plane: torch.Tensor, rotary_plane: torch.Tensor, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Of a [R, Q + C + D] bfloat16 (rows may be strided): Q values normalised to out [R, Q].

    The rest is packed into the planes [pages, PAGE, bytes] at slots int64 [R].
    """
    assert q_norm.shape[0] <= _MOST_QUERIES, f"{q_norm.shape[0]} query values; the kernel keeps {_MOST_QUERIES}"
    planes = (latent_plane, row_bytes(latent_plane), rotary_plane, row_bytes(rotary_plane))
    sizes = (q_norm.shape[0], latent_norm.shape[0], rope.cos.shape[1])
    _kernel(kv, "split_latents")(
        (a.shape[0], 2),
        _THREADS,
        (a, a.stride(0), q_norm, latent_norm, eps, rope.cos, rope.sin, slots, *planes, out, *sizes),
    )
    return out


def write_index_key(
    key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, slots: torch.Tensor, kv: KvFormat,
    plane: torch.Tensor,
) -> None:  # fmt: skip
    """key [R, index_head_dim] bfloat16 (may be strided) to the index plane at slots int64 [R]."""
    rows, width = key.shape
    _kernel(kv, "write_index_key")(
        (rows,),
        _THREADS,
        (key, key.stride(0), norm, bias, INDEXER_LAYER_NORM_EPS, rope.cos, rope.sin, slots, plane, row_bytes(plane),
         width, rope.cos.shape[1]),
    )  # fmt: skip


def row_bytes(plane: torch.Tensor) -> int:
    """Bytes of a token's row in a plane [pages, PAGE, width]."""
    return plane.shape[2] * plane.element_size()


def _kernel(kv: KvFormat, name: str) -> Callable[..., None]:
    return chained(driver.load("cache_write", {"KV": str(CODE[kv])}).kernel(name))
