"""The EXL3 code: which 16 bits of a tile's ring a weight reads, and which value those bits stand for.

A tile is 16 x 16 weights in 256 stream positions. Its 256 * bits stored bits form a ring; position p reads the 16 bits
ending at `window_ends(...)[p]` (its state), so neighbouring states overlap and each position brings only `bits` new
ones. A codebook maps the 65,536 states to fp16 values. Widths are kept as half-bits (an integer: 2.5 bits = 5).
Source: the EXL3 format of exllamav3; the computed codes are those of QTIP (arXiv 2406.11235).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from tfglm.errors import CheckpointError

CODEBOOKS = ("3inst", "mcg", "mul1")
# The scalar tensor that names the codebook of a linear, and the only value it may hold. 3inst has none.
MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
# Standard deviation of the 3inst table; the quantiser scales weights to it for every codebook.
CODEBOOK_SCALE = 1.24371088
TILE = 16
BLOCK = 128  # rows or columns that a Hadamard rotation mixes: the least a linear is padded to and cut at
POSITIONS = TILE * TILE
STATES = 1 << 16


def half_bits(bits: float, codebook: str) -> int:
    """Twice the width of a weight as an integer. Raises CheckpointError for a width that EXL3 does not have."""
    if codebook not in CODEBOOKS:
        raise CheckpointError(f"codebook {codebook!r} is unknown; EXL3 has {', '.join(CODEBOOKS)}")
    doubled = round(2 * bits)
    legal = doubled == 2 * bits and (doubled in range(2, 17, 2) or (codebook == "mul1" and doubled in (3, 5, 7)))
    if not legal:
        raise CheckpointError(
            f"a width of {bits:g} bits does not exist in codebook {codebook}: "
            "it takes 1 to 8, and 1.5, 2.5 or 3.5 with mul1 only"
        )
    return doubled


@cache
def window_ends(doubled: int) -> npt.NDArray[np.int64]:
    """[256]: where each position's 16-bit window ends (exclusive), in bits from the start of the tile."""
    return (np.arange(1, POSITIONS + 1) * doubled) // 2


@cache
def new_bits(doubled: int) -> npt.NDArray[np.int64]:
    """[256]: how many bits each position adds to the ring."""
    return np.diff(window_ends(doubled), prepend=0)


@cache
def codebook_table(codebook: str) -> npt.NDArray[np.float16]:
    """float16 [65536]: the weight of every state, read-only. Raises KeyError for an unknown codebook."""
    states = np.arange(STATES, dtype=np.uint32)
    table = {"3inst": _three_instruction, "mcg": _three_instruction, "mul1": _byte_sum}[codebook](states, codebook)
    table.setflags(write=False)
    return table


def _three_instruction(states: npt.NDArray[np.uint32], codebook: str) -> npt.NDArray[np.float16]:
    """Scramble, keep sign, mantissa and two exponent bits of both halves, add the halves as fp16."""
    if codebook == "mcg":
        word = states * np.uint32(MARKERS["mcg"])
    else:
        word = states * np.uint32(89226354) + np.uint32(64248484)
    word = (word & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    low = (word & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
    high = (word >> np.uint32(16)).astype(np.uint16).view(np.float16)
    return low + high


def _byte_sum(states: npt.NDArray[np.uint32], codebook: str) -> npt.NDArray[np.float16]:
    """Scramble, sum the four bytes (nearly normal), one fused multiply-add to centre and scale."""
    word = states * np.uint32(MARKERS[codebook])
    total = word.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.uint16)
    biased = (total + np.uint16(0x6400)).view(np.float16).astype(np.float64)  # 1024 + total, exactly
    scale, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
    return (biased * scale + offset).astype(np.float16)  # exact in float64, so rounded once
