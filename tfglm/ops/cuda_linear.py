"""Launches of kernels/linear.cu and linear_prompt.cu: dense weights in every format, for decode windows and prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tfglm.formats import groups
from tfglm.ops import driver
from tfglm.ops.cuda_launch import chained

DECODE_ROWS = 64
"""Windows of up to this many rows take the decode kernels, 16 rows a block; both kinds give a row the same bits."""

_FORMATS = {"bf16": 0, "fp8": 1, "q4": 2, "q6": 3, "q8": 4}
_PIECE_BYTES = (2048, 1024, 512, 768, 1024)
_MAX_SLICES = 8
_RING = (5, 8, 12, 8, 8)
"""Pieces in the ring of a decode kernel's warp, as in the kernel file."""
_SLAB = 1 << 24
"""Weights that are converted at once: what that takes beside them, 30 bytes a weight, is no part of any plan."""
_STAGES, _TILE_R = 3, 64


@dataclass(frozen=True)
class Tile:
    """A prompt kernel: weight rows of a block and its threads."""

    name: str
    outputs: int
    threads: int


WIDE, SMALL, FEW = Tile("wide", 128, 128), Tile("small", 64, 128), Tile("few", 64, 256)


@dataclass(frozen=True)
class Dense:
    """A weight [rows, columns] on the device. kind: a key of the formats above; data: bf16 rows or pieces."""

    kind: str
    rows: int
    columns: int
    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def pack(weight: torch.Tensor, kind: str) -> Dense:
    """weight [N, K] in any float dtype, on the device it shall stay on, in format `kind`."""
    rows, columns = weight.shape
    if kind == "bf16":
        return Dense(kind, rows, columns, weight.to(torch.bfloat16).contiguous())
    slab = max(groups.ROWS, _SLAB // columns // groups.ROWS * groups.ROWS)
    first = _packed(weight[:slab], kind)
    if rows <= slab:
        return Dense(kind, rows, columns, *first)
    # Into its place at once: joined at the end the packed weight would be there twice for a moment.
    blocks, in_slab = -(-rows // groups.ROWS), slab // groups.ROWS
    whole = [part.new_empty(blocks * (len(part) // in_slab), *part.shape[1:]) for part in first]
    for start in range(0, rows, slab):
        for place, part in zip(whole, _packed(weight[start : start + slab], kind) if start else first, strict=True):
            at = start // groups.ROWS * (len(place) // blocks)
            place[at : at + len(part)] = part
    return Dense(kind, rows, columns, *whole)


def _packed(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces and scales."""
    if kind == "fp8":
        fp8 = groups.pack_fp8(weight)
        return fp8.pieces, fp8.scale
    packed = groups.pack(groups.quantise(weight, int(kind[1:])))
    return packed.pieces, packed.scales


def slices(columns: int) -> int:
    """Into how many ordered parts the sum over the columns is cut: a function of the columns alone."""
    return min(_MAX_SLICES, -(-columns // groups.GROUP))


def linear(x: torch.Tensor, weight: Dense, out: torch.Tensor) -> torch.Tensor:
    """out [R, N] (bfloat16 or float32, rows may be strided) = x [R, K] bfloat16 times the weight transposed."""
    _launch(x, weight, out, x.shape[0], weight.rows, weight.columns, 1, (0, 0, 0))
    return out


def per_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [R, H, N] = x [R, H, K] times weight [H, N, K] transposed, head by head; all bfloat16, x and out strided."""
    heads, rows, columns = weight.shape
    dense = Dense("bf16", rows, columns, weight)
    _launch(x, dense, out, x.shape[0], rows, columns, heads, (x.stride(1), weight.stride(0), out.stride(1)))
    return out


def experts(
    x: torch.Tensor, divide: int, weights: torch.Tensor, out: torch.Tensor, pairs: torch.Tensor,
    group_start: torch.Tensor, group_expert: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """out [pairs, N]: row pair / divide of x [., K] times weights[expert] [N, K] transposed, for each group's pairs.

    pairs int32 [P] sorted by group; group_start int32 [G + 1]; group_expert int32 [G]. A group may be empty.
    """
    _, rows, columns = weights.shape
    groups_of_pairs, parts = (pairs, group_start, group_expert), slices(columns)
    kernel = chained(driver.load("linear", {"WEIGHT": "0"}).kernel("experts_bf16"))
    kernel(
        (-(-rows // 16), 1, group_expert.shape[0]),
        32 * parts,
        (x, x.stride(0), divide, weights, out, out.stride(0), _as_float(out), rows, columns, *groups_of_pairs),
        shared=parts * _ring_bytes(0),
    )
    return out


def _as_float(out: torch.Tensor) -> int:
    return int(out.dtype == torch.float32)


def _launch(
    x: torch.Tensor, weight: Dense, out: torch.Tensor, r: int, n: int, k: int, batch: int, strides: tuple[int, int, int]
) -> None:
    kind = _FORMATS[weight.kind]
    weight_format = {"WEIGHT": str(kind)}
    common = (x, x.stride(0), weight.data, weight.scales, out, out.stride(0), _as_float(out), r, n, k)
    parts = slices(k)
    if r <= DECODE_ROWS:
        kernel = chained(driver.load("linear", weight_format).kernel(f"linear_decode_{8 if r <= 8 else 16}"))
        grid = (-(-n // 16), -(-r // 16), batch)
        kernel(grid, 32 * parts, (*common, *strides), shared=parts * _ring_bytes(kind))
        return
    tile = prompt_tile(r, n, batch, _multiprocessors(x.device))
    stage = tile.outputs // 16 * _PIECE_BYTES[kind] + (4 * tile.outputs if kind >= 2 else 0) + _TILE_R * 128
    grid = (-(-r // _TILE_R), -(-n // tile.outputs), batch)
    kernel = chained(driver.load("linear_prompt", weight_format).kernel(f"linear_prompt_{tile.name}"))
    kernel(grid, tile.threads, (*common, parts, *strides), shared=_STAGES * stage)


def prompt_tile(rows: int, outputs: int, batch: int, multiprocessors: int) -> Tile:
    """The kernel whose busiest multiprocessor has least to do; it decides no bits. On an H200 a wide tile takes 0.915
    times as long as two small ones."""

    def most(tile: Tile) -> int:
        return -(-(-(-rows // _TILE_R) * -(-outputs // tile.outputs) * batch) // multiprocessors)

    if most(FEW) == 1:
        return FEW
    return SMALL if most(SMALL) < 2 * 0.915 * most(WIDE) else WIDE


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _ring_bytes(kind: int) -> int:
    """Shared memory of a decode kernel's warp."""
    return _RING[kind] * (_PIECE_BYTES[kind] + (64 if kind >= 2 else 0))
