"""A wire between threads of one process: for tests, and the plainest statement of what a wire does."""

from __future__ import annotations

import threading
import time

import torch

from tfglm.errors import RanksError
from tfglm.ranks.control import controls_in_process
from tfglm.ranks.group import RankGroup


class _Table:
    """Where the threads lay their tensors down. Two places a rank, used in turn: who comes to gather n + 1 has left
    gather n, so that a place is free again once everybody has come to the gather after it."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition()
        self.came = [0] * ranks  # how many gathers each rank has come to
        self.places: list[list[torch.Tensor | None]] = [[None, None] for _ in range(ranks)]
        self.aborted: str | None = None


class InProcessWire:
    """One thread's end. Make them with `in_process_wires`."""

    capturable = False
    arrivals = None

    def __init__(self, table: _Table, rank: int, limit_s: float) -> None:
        self._table = table
        self._limit_s = limit_s
        self.rank = rank
        self.ranks = len(table.came)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        table = self._table
        until = time.monotonic() + self._limit_s
        with table.changed:
            number = table.came[self.rank]
            # A copy: the caller may write to its tensor as soon as it has its own result.
            table.places[self.rank][number % 2] = tensor.clone()
            table.came[self.rank] = number + 1
            table.changed.notify_all()
            while table.aborted is None and min(table.came) <= number:
                if not table.changed.wait(until - time.monotonic()):
                    late = [rank for rank, came in enumerate(table.came) if came <= number]
                    raise RanksError(f"rank {late[0]} did not come to gather {number} within {self._limit_s:g} s")
            if table.aborted is not None:
                raise RanksError(table.aborted)
            parts = [places[number % 2] for places in table.places]
        return torch.stack([part for part in parts if part is not None])

    def abort(self, reason: str) -> None:
        with self._table.changed:
            self._table.aborted = self._table.aborted or reason
            self._table.changed.notify_all()

    def close(self) -> None:
        """It holds nothing that outlives it."""


def in_process_wires(ranks: int, limit_s: float = 60.0) -> list[InProcessWire]:
    """The ends of a wire between `ranks` threads, rank 0's first."""
    table = _Table(ranks)
    return [InProcessWire(table, rank, limit_s) for rank in range(ranks)]


def in_process_groups(ranks: int, settings: str = "", limit_s: float = 60.0) -> list[RankGroup]:
    """Whole groups for ranks that are threads of this process, rank 0's first."""
    ends = zip(in_process_wires(ranks, limit_s), controls_in_process(ranks), strict=True)
    return [RankGroup(wire, control, settings) for wire, control in ends]
