"""EXL3 weights as a device holds them: single linears, and the routed experts of a layer in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from tfglm.formats.exl3 import decode_tiles, reconstruct
from tfglm.formats.exl3_code import BLOCK, TILE

GATE, UP, DOWN = 0, 1, 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Exl3Weight:
    """A linear of `inputs` and `outputs`; k and n are these padded to multiples of 128.

    trellis int16 [k/16, n/16, 16 * bits], suh float16 [k], svh float16 [n].
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str
    inputs: int
    outputs: int

    @cached_property
    def rotated(self) -> torch.Tensor:
        """float16 [n, k]: the decoded weights between the rotations, kept once asked for."""
        return decode_tiles(self.trellis, self.codebook).T.contiguous()


@dataclass(frozen=True)
class StackedWeight:
    """Matrices that read the same input and cannot be one because they are stored differently; outputs in order."""

    parts: tuple[Weight, ...]


Weight = torch.Tensor | Exl3Weight | StackedWeight
"""A linear: a matrix [outputs, inputs] of any float dtype, or one in another format. `Ops.linear` takes each."""


def plain(weight: Weight) -> torch.Tensor:
    """The matrix [outputs, inputs] that a weight stands for; float32 where it is quantised."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, StackedWeight):
        return torch.cat([plain(part) for part in weight.parts])
    matrix = reconstruct(weight.trellis, weight.suh, weight.svh, weight.codebook)
    return matrix.T[: weight.outputs, : weight.inputs].contiguous()


@dataclass(frozen=True)
class Exl3Experts:
    """The routed experts of one layer (or one rank's columns of them), every matrix with a width of its own.

    buffer: uint8, the trellises expert by expert (gate, up, down), each at a multiple of 128 bytes. offsets int64 and
    half_bits int32 [3, experts], on the host: where each lies in the buffer, and twice its bits. inner int32 [experts],
    on the host: the inner columns of each, a multiple of 128 and possibly none.
    suh float16 [hidden] if gate and up of all experts share it, else [2, experts, hidden]; svh float16 [2, experts,
    most inner columns]; down_suh float16 [experts, most inner columns], both zero past an expert's own columns;
    down_svh float16 [experts, hidden].
    """

    codebook: str
    buffer: torch.Tensor
    offsets: torch.Tensor
    half_bits: torch.Tensor
    inner: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    down_suh: torch.Tensor
    down_svh: torch.Tensor
    _decoded: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shared_suh(self) -> bool:
        return self.suh.dim() == 1

    def trellis(self, projection: int, expert: int) -> torch.Tensor:
        """int16 [k/16, n/16, 16 * bits] of one matrix: a view of the buffer."""
        hidden, inner = self.down_svh.shape[1], int(self.inner[expert])
        k, n = (inner, hidden) if projection == DOWN else (hidden, inner)
        shape = (k // TILE, n // TILE, 8 * int(self.half_bits[projection, expert]))
        start = int(self.offsets[projection, expert])
        return self.buffer[start : start + 2 * shape[0] * shape[1] * shape[2]].view(torch.int16).view(shape)

    def weight(self, projection: int, expert: int) -> Exl3Weight:
        """One matrix by itself."""
        own = int(self.inner[expert])
        if projection == DOWN:
            suh, svh = self.down_suh[expert, :own], self.down_svh[expert]
        else:
            suh = self.suh if self.shared_suh else self.suh[projection, expert]
            svh = self.svh[projection, expert, :own]
        return Exl3Weight(self.trellis(projection, expert), suh, svh, self.codebook, len(suh), len(svh))

    def rotated(self, projection: int, expert: int) -> torch.Tensor:
        """float16 [n, k]: the decoded weights of one matrix between the rotations, kept once asked for."""
        key = projection, expert
        if key not in self._decoded:
            self._decoded[key] = decode_tiles(self.trellis(projection, expert), self.codebook).T.contiguous()
        return self._decoded[key]


def buffer_for(sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """A uint8 buffer that starts at a multiple of 128 bytes, and where in it parts of these sizes lie, each aligned
    likewise."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // BLOCK) * BLOCK
    memory = torch.empty(end + BLOCK, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + end], offsets
