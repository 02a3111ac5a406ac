"""What a forward pass asks of the ranks it is spread over, and what rank 0 tells the others to do.

Every rank runs the same program on the same rows with its own share of the weights; they meet in `sum`, `concat` and
`gather`, which give the same bits on all of them. Rank 0 alone decides what is run: it announces each piece of work,
and the others replay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tfglm.errors import RanksError

Fact = int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


@dataclass(frozen=True)
class Message:
    """One piece of work: its kind, which names the handler that replays it, small values, and tensors on the CPU."""

    kind: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def integers(self, name: str) -> list[int]:
        """A fact that is a list of integers, or one."""
        value = self.facts[name]
        return [int(number) for number in value] if isinstance(value, Sequence) else [int(value)]


class Group(Protocol):
    """The ranks one model is spread over, seen from one of them. Used from one thread, that of the forward pass.

    sum, concat and gather are called by all ranks, in the same order. They raise RanksError, on every rank, when one of
    them is lost or late; after that the group is of no more use.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def capturable(self) -> bool:
        """Whether sum, concat and gather may be part of a captured CUDA graph."""
        ...

    def announce(self, message: Message) -> None:
        """Rank 0: have every other rank do this too. What fails before it concerns rank 0 alone; what fails after it
        ends all ranks."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's partial [R, H] float32, added in rank order, rank 0 first: the same bits on all."""
        ...

    def concat(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's columns side by side: part [R, widths[rank]] -> [R, sum of widths]."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, alike in shape and dtype: [ranks, ...]."""
        ...

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a captured graph, which sum, concat and gather may be a part of, on the current stream."""
        ...

    def check(self) -> None:
        """Raise RanksError if the ranks have ended: what a wire of GPUs left on the device is void then, and only a
        host that has waited for it can tell."""
        ...

    def abort(self, reason: str) -> None:
        """End all ranks: what they wait for, and all later calls, raise RanksError with this reason."""
        ...


class Alone:
    """The group of a model on one rank."""

    rank = 0
    ranks = 1
    capturable = True

    def announce(self, message: Message) -> None:
        """There is nobody to tell."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def concat(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def check(self) -> None:
        """There is nobody to lose."""

    def abort(self, reason: str) -> None:
        """There is nobody to end."""


@contextmanager
def together(group: Group, message: Message) -> Iterator[None]:
    """Rank 0's side of a piece of work that all ranks do: announced first. What fails inside ends all ranks, because
    the others have begun and wait for this one; it is raised as RanksError. Alone, errors are as they are."""
    group.announce(message)
    try:
        yield
    except RanksError:
        raise
    except BaseException as error:
        if group.ranks == 1:
            raise
        reason = f"rank {group.rank} failed at {message.kind!r}: {type(error).__name__}: {error}"
        group.abort(reason)
        raise RanksError(reason) from error
