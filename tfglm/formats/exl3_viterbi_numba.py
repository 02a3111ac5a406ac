"""The search of exl3_viterbi.py compiled with numba: same states, whole-vector inner loops, the GIL released.

The inner loop runs over neighbouring out nodes for one value of the top bits, so that table, entering costs and best
costs are all read in order; entering costs are spread out once a position (node -> its 2^D edges) for that.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

# Out nodes that stay in the first-level cache (costs, choices) while their edges stream by.
BLOCK = 1024
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_inline = numba.njit(inline="always", error_model="numpy")
_compile = numba.njit(nogil=True, error_model="numpy")


@_inline
def _to_half(v: np.float64) -> np.float64:
    """v rounded to the nearest fp16 (ties to even); values past fp16's range keep their exponent."""
    bits = np.float64(v).view(np.int64)
    tie = (bits >> np.int64(42)) & np.int64(1)
    normal = np.int64((bits + np.int64((1 << 41) - 1) + tie) & np.int64(~((1 << 42) - 1))).view(np.float64)
    subnormal = (v + 402653184.0) - 402653184.0  # 1.5 * 2^28 has a spacing of 2^-24, fp16's smallest step
    return subnormal if abs(v) < 2.0**-14 else normal


@_compile
def _relax_single(entering: F32, values: F32, x: np.float32, top: np.uint8, best: F32, choice: U8) -> None:
    for i in range(best.shape[0]):
        away = values[i] - x
        cost = entering[i] + away * away
        better = cost < best[i]
        best[i] = cost if better else best[i]
        choice[i] = top if better else choice[i]


@_compile
def _relax_half(entering: F32, values: F32, x: np.float32, top: np.uint8, best: F32, choice: U8) -> None:
    for i in range(best.shape[0]):
        away = _to_half(np.float64(values[i]) - x)
        cost = np.float32(_to_half(entering[i] + away * away))
        better = cost < best[i]
        best[i] = cost if better else best[i]
        choice[i] = top if better else choice[i]


@_compile
def _spread(costs: F32, added: int, buffers: F32) -> F32:
    """costs [n] -> [n << added], each repeated, in one of the two buffers: interleaved stores of 4 or 2 vectorise."""
    source, which = costs, 0
    while added > 0:
        target = buffers[which]
        if added == 1:
            for i in range(source.shape[0]):
                target[2 * i] = source[i]
                target[2 * i + 1] = source[i]
            source = target[: 2 * source.shape[0]]
        else:
            for i in range(source.shape[0]):
                target[4 * i] = source[i]
                target[4 * i + 1] = source[i]
                target[4 * i + 2] = source[i]
                target[4 * i + 3] = source[i]
            source = target[: 4 * source.shape[0]]
        added, which = added - 2, 1 - which
    return source


@_compile
def _walk(tile: F32, table: F32, added: I64, first: int, costs: F32, scratch: F32, choices: U8, half: bool) -> None:
    """Once round the ring from position `first`: costs [65536] holds those of the nodes entering it, then those of the
    nodes left behind; choices [256, nodes] gets each position's best top bits (the lowest on a tie)."""
    for step in range(256):
        position = (first + step) & 255
        leaving = added[(position + 1) & 255]
        nodes = 65536 >> leaving
        entering = _spread(costs[: 65536 >> added[position]], added[position], scratch)
        for start in range(0, nodes, BLOCK):
            stop = min(start + BLOCK, nodes)
            best, choice = costs[start:stop], choices[position][start:stop]  # contiguous views
            best[:] = np.inf
            choice[:] = 0
            for top in range(1 << leaving):
                low, high = top * nodes + start, top * nodes + stop
                if half:
                    _relax_half(entering[low:high], table[low:high], tile[position], np.uint8(top), best, choice)
                else:
                    _relax_single(entering[low:high], table[low:high], tile[position], np.uint8(top), best, choice)


@_compile
def _trace(choices: U8, added: I64, last: int, node: int, states: npt.NDArray[np.uint16]) -> int:
    """Fill states[0 .. last] backwards from the node after `last`; the node that enters position 0."""
    for position in range(last, -1, -1):
        state = (np.int64(choices[position, node]) << (16 - added[(position + 1) & 255])) | node
        states[position] = state
        node = state >> added[position]
    return node


@_compile
def search(tiles: F32, table: F32, added: I64, order: I64, half: bool) -> npt.NDArray[np.uint16]:
    """The search for a batch of tiles, one after the other (see exl3_viterbi.Search)."""
    states = np.empty(tiles.shape, dtype=np.uint16)
    costs = np.empty(65536, dtype=np.float32)
    scratch = np.empty((2, 65536), dtype=np.float32)
    choices = np.empty((256, 65536 >> added.min()), dtype=np.uint8)
    for t in range(tiles.shape[0]):
        costs[:] = 0
        _walk(tiles[t], table, added, 128, costs, scratch, choices, half)
        end = order[0]
        for node in order:
            if costs[node] < costs[end]:
                end = node
        closing = _trace(choices, added, 127, end, states[t])
        costs[:] = np.inf
        costs[closing] = 0
        _walk(tiles[t], table, added, 0, costs, scratch, choices, half)
        _trace(choices, added, 255, closing, states[t])
    return states
