"""The search behind an EXL3 tile: the ring of 256 states whose weights come closest to 256 given ones.

Between positions p and p + 1 the states share 16 - D(p+1) bits, a node; a state is an edge from the node it reads to
the node it leaves. Pass 1 walks the ring once from its middle with both ends free and keeps only the node it crosses
between the last position and the first; pass 2 walks it again from that node back to that node, which closes it.

Two implementations of the same arithmetic, hence of the same states: numpy here, and one compiled by numba (the
`quantize` extra) that is some 20 times as fast. Costs are either fp16, the format's reference arithmetic, or float32,
which finds slightly closer rings at 4 bits and above.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tfglm.formats.exl3_code import POSITIONS, STATES, codebook_table, half_bits, new_bits

try:
    from tfglm.formats import exl3_viterbi_numba as compiled
except ImportError:  # numba is an optional extra
    compiled = None  # type: ignore[assignment]

Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)
Costs = Literal["fp16", "fp32"]
# (tiles float32 [t, 256], table float32 [65536], new bits [256], order of end nodes, fp16 costs) -> uint16 [t, 256]
Search = Callable[
    [npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64], bool],
    npt.NDArray[np.uint16],
]
NUMPY_BATCH = 16  # tiles searched together: 4 MB of costs


def encode_tiles(tiles: Array, bits: float, codebook: str, *, costs: Costs = "fp16") -> Array:
    """float32 [t, 256] in stream order, scaled to the codebook -> uint16 [t, 256]: states of closed rings.

    The input is rounded to fp16 first. Raises CheckpointError for a width the codebook does not have.
    """
    given = tiles.numpy() if isinstance(tiles, torch.Tensor) else tiles
    doubled = half_bits(bits, codebook)
    rounded = given.astype(np.float16).astype(np.float32)
    table = codebook_table(codebook).astype(np.float32)
    order = end_order(STATES >> int(new_bits(doubled)[0]))
    threads = os.cpu_count() or 1
    search = compiled.search if compiled else search_numpy
    batch = max(1, -(-len(rounded) // threads)) if compiled else NUMPY_BATCH
    states = np.empty(rounded.shape, dtype=np.uint16)

    def run(start: int) -> None:
        chosen = slice(start, start + batch)
        states[chosen] = search(rounded[chosen], table, new_bits(doubled), order, costs == "fp16")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(0, len(rounded), batch)))
    return torch.from_numpy(states) if isinstance(tiles, torch.Tensor) else states


@cache
def end_order(nodes: int) -> npt.NDArray[np.int64]:
    """End nodes in the order in which an equal cost is preferred (that of the reference's reduction over threads)."""
    node = np.arange(nodes)
    reverse = np.array([int(f"{i:05b}"[::-1], 2) for i in range(32)])
    thread = node & 1023
    return np.lexsort((node >> 10, reverse[thread & 31], reverse[thread >> 5]))


def search_numpy(
    tiles: npt.NDArray[np.float32],
    table: npt.NDArray[np.float32],
    added: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    half: bool,
) -> npt.NDArray[np.uint16]:
    """The search for a batch of tiles at once (see `Search`)."""
    middle = POSITIONS // 2
    rolled = np.roll(np.arange(POSITIONS), middle)
    free = np.zeros((len(tiles), STATES >> int(added[middle])), dtype=np.float32)
    cost, choices = _walk(tiles, table, added, rolled, free, half)
    end = order[np.argmin(cost[:, order], axis=1)]
    states = _trace(choices[middle:], added, end)
    closing = states[:, 0].astype(np.int64) >> added[0]

    held = np.full((len(tiles), STATES >> int(added[0])), np.inf, dtype=np.float32)
    held[np.arange(len(tiles)), closing] = 0
    _, choices = _walk(tiles, table, added, np.arange(POSITIONS), held, half)
    return _trace(choices, added, closing)


def _walk(
    tiles: npt.NDArray[np.float32],
    table: npt.NDArray[np.float32],
    added: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    cost: npt.NDArray[np.float32],
    half: bool,
) -> tuple[npt.NDArray[np.float32], list[npt.NDArray[np.uint8]]]:
    """Costs [t, nodes] before the first position -> costs after the last, and each position's best top bits [t, nodes]
    (the lowest on a tie)."""
    choices = []
    for position in positions:
        entering, leaving = int(added[position]), int(added[(position + 1) % POSITIONS])
        away = table - tiles[:, position, None]
        if half:
            away = away.astype(np.float16).astype(np.float32)
            exact = away.astype(np.float64) ** 2 + np.repeat(cost, 1 << entering, axis=1)
            edges = exact.astype(np.float16).astype(np.float32)  # fused: rounded once
        else:
            edges = away * away + np.repeat(cost, 1 << entering, axis=1)
        edges = edges.reshape(len(tiles), 1 << leaving, -1)
        choices.append(np.argmin(edges, axis=1).astype(np.uint8))
        cost = edges.min(axis=1)
    return cost, choices


def _trace(
    choices: list[npt.NDArray[np.uint8]], added: npt.NDArray[np.int64], node: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    """Follow the choices back from the node after the last position: states [t, len(choices)]."""
    states = np.empty((len(node), len(choices)), dtype=np.uint16)
    tile = np.arange(len(node))
    for position in reversed(range(len(choices))):
        shared = 16 - int(added[(position + 1) % POSITIONS])
        state = (choices[position][tile, node].astype(np.int64) << shared) | node
        states[:, position] = state
        node = state >> added[position]
    return states
