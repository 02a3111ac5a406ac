"""A wire put to the test: the right values from every rank, and what a gather takes, small and large."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from tfglm.errors import RanksError
from tfglm.ranks.wire import Wire

SIZES = ((12 * 1024, 100), (1 << 20, 20), (8 << 20, 5))
"""Bytes of one rank's part and how often it is gathered: a row of GLM-5.3's hidden state in bfloat16, a small and a
large piece of a prompt."""


@dataclass(frozen=True)
class Gathered:
    """bytes: of one rank's part. seconds: the median of a gather on this rank."""

    bytes: int
    seconds: float

    def gbit_s(self, ranks: int) -> float:
        """What this rank has received a second from all others."""
        return self.bytes * (ranks - 1) * 8 / self.seconds / 1e9


def try_wire(wire: Wire, device: str = "cpu") -> list[Gathered]:
    """Gather every size and check every value. All ranks call it.

    Raises RanksError naming a rank whose part is wrong.
    """
    found = []
    for size, times in SIZES:
        parts = [_pattern(rank, size, device) for rank in range(wire.ranks)]
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            got = wire.gather(parts[wire.rank])
            if device != "cpu":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        for rank, part in enumerate(parts):
            if not torch.equal(got[rank], part):
                wrong = int((got[rank] != part).sum())
                raise RanksError(
                    f"rank {wire.rank} got {wrong} of {size // 4} values of rank {rank} wrong over the wire"
                )
        found.append(Gathered(size, statistics.median(taken)))
    return found


def _pattern(rank: int, size: int, device: str) -> torch.Tensor:
    """float32 values that no other rank and no other place has."""
    return torch.arange(size // 4, dtype=torch.float32, device=device) + rank * (1 << 22)
