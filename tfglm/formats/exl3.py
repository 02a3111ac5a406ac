"""EXL3 weights: stored bits -> states -> fp16 tiles -> a matrix, and back; and the product of a row with such a matrix.

A linear of k inputs and n outputs is W = diag(suh) . Hk . Wq . Hn . diag(svh), y = x . W (W is [k, n], the transpose of
torch's Linear.weight). Hk and Hn are block-diagonal Hadamard rotations, Wq the decoded tiles ("rotated basis"). Bits a
weight are read off the trellis' shape alone.

Every function takes numpy arrays or CPU torch tensors and returns the kind it was given; nothing is modified.
Source: the EXL3 format of exllamav3.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tfglm.errors import CheckpointError
from tfglm.formats.exl3_code import BLOCK, POSITIONS, TILE, codebook_table, half_bits, new_bits, window_ends
from tfglm.formats.exl3_viterbi import encode_tiles
from tfglm.formats.hadamard import rotate, signs_matrix

__all__ = [
    "decode_tiles",
    "encode_tiles",
    "forward",
    "from_stream_order",
    "pack_tiles",
    "reconstruct",
    "signs",
    "stream_positions",
    "to_stream_order",
    "trellis_bits",
    "unpack_tiles",
]

Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)


def _numpy(x: npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[Any]:
    return x.numpy() if isinstance(x, torch.Tensor) else x


def _like(given: Array, result: npt.NDArray[Any]) -> Array:
    return torch.from_numpy(result) if isinstance(given, torch.Tensor) else result


def trellis_bits(trellis: npt.NDArray[Any] | torch.Tensor, codebook: str) -> float:
    """Bits a weight of int16 [k/16, n/16, 16 * bits]. Raises CheckpointError for a shape or width that is not EXL3."""
    shape = tuple(trellis.shape)
    if len(shape) != 3:
        raise CheckpointError(f"trellis has shape {shape}; it must be [k/16, n/16, 16 * bits]")
    bits = shape[2] / TILE
    half_bits(bits, codebook)
    return bits


# ---- order of a tile ------------------------------------------------------------------------------------------------
@cache
def stream_positions() -> npt.NDArray[np.int64]:
    """[256]: the stream position of each weight of a tile in row-major order.

    Lane l = p // 8 of a warp holds positions 8l .. 8l + 7, which are its operands of two m16n8k16 products.
    """
    row, column = np.divmod(np.arange(POSITIONS), TILE)
    lane = 4 * (column & 7) + ((row & 7) >> 1)
    slot = (row & 1) + 2 * (row >> 3) + 4 * (column >> 3)
    return 8 * lane + slot


def to_stream_order(matrix: Array) -> Array:
    """[k, n] -> [k/16, n/16, 256]: cut into 16 x 16 tiles, each in the order its weights are coded."""
    m = _numpy(matrix)
    k, n = m.shape
    tiles = m.reshape(k // TILE, TILE, n // TILE, TILE).transpose(0, 2, 1, 3).reshape(k // TILE, n // TILE, POSITIONS)
    return _like(matrix, tiles[..., np.argsort(stream_positions())])


def from_stream_order(tiles: Array) -> Array:
    """The inverse of `to_stream_order`."""
    t = _numpy(tiles)
    rows, columns, _ = t.shape
    square = t[..., stream_positions()].reshape(rows, columns, TILE, TILE)
    return _like(tiles, square.transpose(0, 2, 1, 3).reshape(rows * TILE, columns * TILE))


# ---- bits <-> states <-> weights ------------------------------------------------------------------------------------
def _windows(trellis: npt.NDArray[np.int16], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The states of the given stream positions: int16 [..., words] -> uint32 [..., len(positions)].

    The stream is the tile's little-endian 32-bit words, most significant bit first, so each pair of int16 is swapped.
    """
    ends = window_ends(trellis.shape[-1] // 8)[positions]
    swapped = trellis.view(np.uint16).reshape(*trellis.shape[:-1], -1, 2)[..., ::-1]
    chunks = swapped.reshape(trellis.shape).astype(np.uint32)
    pairs = (np.roll(chunks, 1, axis=-1) << np.uint32(16)) | chunks  # chunk 0 reaches back to the ring's end
    last = (ends - 1) // 16
    shift = (16 * (last + 1) - ends).astype(np.uint32)
    windows = np.take(pairs, last, axis=-1)
    windows >>= shift
    windows &= np.uint32(0xFFFF)
    return windows


def unpack_tiles(trellis: Array) -> Array:
    """int16 [k/16, n/16, 16 * bits] -> uint16 [k/16, n/16, 256]: every position's state, in stream order."""
    return _like(trellis, _windows(_numpy(trellis), np.arange(POSITIONS)).astype(np.uint16))


def pack_tiles(states: Array, bits: float) -> Array:
    """uint16 [k/16, n/16, 256] -> int16 [k/16, n/16, 16 * bits]: the low new bits of each state, in stream order.

    Raises ValueError when the states do not form closed rings of this width (neighbours must agree on shared bits).
    """
    given: npt.NDArray[np.uint16] = _numpy(states)
    ends, added = window_ends(half_bits(bits, "mul1")), new_bits(half_bits(bits, "mul1"))
    # The 16 stream bits that end at 16, 32, .. lie in the first state that reaches so far and the one before it.
    stops = np.arange(16, int(ends[-1]) + 1, 16)
    position = np.searchsorted(ends, stops)
    beyond = (ends[position] - stops).astype(np.uint16)
    chunks = np.take(given, position, axis=-1) >> beyond
    chunks |= np.take(given, position - 1, axis=-1) << (added[position].astype(np.uint16) - beyond)
    pairs = chunks.reshape(*given.shape[:-1], -1, 2)[..., ::-1]
    trellis = np.ascontiguousarray(pairs).reshape(chunks.shape).view(np.int16)
    if not np.array_equal(_windows(trellis, np.arange(POSITIONS)), given):
        raise ValueError(f"the states are not tail-biting rings of {bits:g} bits a weight")
    return _like(states, trellis)


def decode_tiles(trellis: Array, codebook: str) -> Array:
    """int16 [k/16, n/16, 16 * bits] -> float16 [k, n]: the weights in the rotated basis, bit exact.

    Raises CheckpointError for a width the codebook does not have.
    """
    trellis_bits(trellis, codebook)
    packed, table, order = _numpy(trellis), codebook_table(codebook), stream_positions()
    rows, columns, _ = packed.shape
    out = np.empty((rows, TILE, columns, TILE), dtype=np.float16)
    for row in range(rows):  # a row of tiles at a time stays in cache
        square = table[_windows(packed[row], order)].reshape(columns, TILE, TILE)
        out[row] = square.transpose(1, 0, 2)
    return _like(trellis, out.reshape(rows * TILE, columns * TILE))


# ---- the whole linear -----------------------------------------------------------------------------------------------
def signs(words: Array) -> Array:
    """int16 [k/16] -> float16 [k]: the signs of old packs (su, sv); bit i of word w makes element 16w + i negative."""
    packed = _numpy(words).view(np.uint16)
    negative = (packed[:, None] >> np.arange(TILE, dtype=np.uint16)) & np.uint16(1)
    return _like(words, np.where(negative, -1.0, 1.0).astype(np.float16).reshape(-1))


def reconstruct(trellis: Array, suh: Array, svh: Array, codebook: str) -> Array:
    """float32 [k, n]: the weights in the model's own basis, as y = x . W. suh is float16 [k], svh float16 [n].

    The rotations are summed in float64, where they are exact; the result is rounded once.
    """
    rotated: npt.NDArray[np.float16] = _numpy(decode_tiles(trellis, codebook))
    k, n = rotated.shape
    _check_scales(suh, k, "suh", "k")
    _check_scales(svh, n, "svh", "n")
    row_scale, column_scale = _numpy(suh).astype(np.float64)[:, None], _numpy(svh).astype(np.float64)
    block, w = signs_matrix(), np.empty((k, n), dtype=np.float32)
    for start in range(0, n, BLOCK):
        columns = slice(start, start + BLOCK)
        half = rotated[:, columns].astype(np.float64) @ block
        unscaled = (block @ half.reshape(k // BLOCK, BLOCK, BLOCK)).reshape(k, BLOCK) / BLOCK
        w[:, columns] = unscaled * row_scale * column_scale[columns]
    return _like(trellis, w)


def _check_scales(scales: npt.NDArray[Any] | torch.Tensor, size: int, name: str, side: str) -> None:
    if tuple(scales.shape) != (size,):
        raise CheckpointError(f"{name} has shape {tuple(scales.shape)}; the trellis has {side} = {size}")


def forward(x: torch.Tensor, rotated: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
    """float32 [rows, n]: x . W for x [rows, k] of any float type and decoded tiles `rotated` float16 [k, n].

    Rounding: x . suh and the input rotation in float32, one rounding to fp16, products and sums in float32, output
    rotation and svh in float32. The caller rounds the result. Each row is a product of its own (a matrix product of
    several rows may pick another order of sums), so its bits do not depend on the rows beside it.
    """
    xh = rotate(x.float() * suh.float()).half().float()
    weight = rotated.float().T.contiguous()
    sums = torch.stack([torch.mv(weight, row) for row in xh]) if len(xh) else xh.new_zeros(0, rotated.shape[1])
    return rotate(sums) * svh.float()
