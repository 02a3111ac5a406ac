"""Launches of kernels/attention.cu: attention over the listed tokens of each row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from tfglm.formats.latent import KvFormat
from tfglm.ops import driver
from tfglm.ops.base import Rope, Selection
from tfglm.ops.cuda_cache import CODE
from tfglm.ops.cuda_launch import chained

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Uninitialised memory on the device."""

DECODE_ROWS = 16
"""Windows of up to this many rows spread a row's list over blocks; both kinds give a row the same bits."""

CHUNK = 64
_TILE = 32
_THREADS = 512
_HEAD_TILES = 3


def attend(
    latent_queries: torch.Tensor, rotary_queries: torch.Tensor, rope: Rope, selection: Selection, scale: float,
    kv: KvFormat, latent_plane: torch.Tensor, rotary_plane: torch.Tensor, longest: int, out: torch.Tensor,
    empty: Empty, log_sums: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [R, H, C] bfloat16 or float32: softmax attention over each row's list.

    latent_queries [R, H, C], rotary_queries [R, H, D] before rotation: bfloat16, strided rows and heads. longest: at
    least the length of every list. log_sums: float32 [R, H], gets the natural logarithm of each head's sum of
    exponentials (-inf for an empty list), with which parts of a context held elsewhere can be merged.
    """
    rows, heads, latent = latent_queries.shape
    rotary = rotary_queries.shape[2]
    tiles = min(_HEAD_TILES, -(-heads // 8))
    macros = {"KV": CODE[kv], "LATENT": latent, "ROTARY": rotary, "HEAD_TILES": tiles}
    module = driver.load("attention", {name: str(value) for name, value in macros.items()})
    groups = -(-heads // (8 * tiles))
    problem = (
        latent_queries, latent_queries.stride(0), latent_queries.stride(1),
        rotary_queries, rotary_queries.stride(0), rotary_queries.stride(1),
        rope.cos, rope.sin, latent_plane, rotary_plane, selection.slots, selection.slots.stride(0), selection.counts,
        scale * math.log2(math.e), heads,
    )  # fmt: skip
    shared = _shared_bytes(latent, rotary, tiles)
    as_float = int(out.dtype == torch.float32)
    if rows > DECODE_ROWS:
        kernel = chained(module.kernel("attend_rows"))
        totals = _totals_bytes(latent, tiles) if _has_room(out.device) else 0
        kernel((rows, groups), _THREADS, (*problem, out, as_float, log_sums), shared=shared + totals)
        return out
    chunks = -(-longest // CHUNK)
    partial = empty((rows, chunks, heads, latent), torch.float32)
    state = empty((rows, chunks, heads, 2), torch.float32)
    grid = (chunks, rows, groups)
    chained(module.kernel("attend_chunks"))(grid, _THREADS, (*problem, partial, state), shared=shared)
    merge = (partial, state, selection.counts, chunks, heads, out, as_float, log_sums)
    chained(module.kernel("merge_chunks"))((heads, rows, -(-latent // 128)), 32, merge)
    return out


def _shared_bytes(latent: int, rotary: int, tiles: int) -> int:
    """Size of the kernel's `Shared`, with room for the scales of any format."""
    heads = 8 * tiles
    values = 2 * _TILE * (latent * 2 + 16)
    scores = max(-(-latent // 64), rotary // 16) * heads * _TILE * 4
    weights = heads * (_TILE * 2 + 16) + 3 * heads * 4
    return values + scores + weights + 2 * _TILE * 4


def _totals_bytes(latent: int, tiles: int) -> int:
    """What attend_rows keeps of all chunks before, a float32 of each thread's results."""
    return -(-latent // 256) * tiles * _THREADS * 16


@functools.cache
def _has_room(device: torch.device) -> bool:
    """Whether the kernel file keeps them in shared memory: a block of these GPUs may have 227 KiB of it, not 99."""
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
