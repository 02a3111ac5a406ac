"""Steps that all ranks take together and that nothing depends on: where one fails, the ranks go on without it.

A rank that fails inside a step would leave the others waiting in a sum. What they still wait for is known from the
step's size, so it gives them zeros for the rest, and not-a-number in the last of it, after which nothing is chosen any
more by what was summed. Rank 0 sees that in the result, in the same step, and takes no further ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tfglm.errors import RanksError
from tfglm.ops.group import Group, Message

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchange:
    """One meeting of the ranks in a step: a sum of float32 [rows, width], or columns side by side, of every rank
    [rows, widths[rank]]. last: no choice of cache rows or experts follows it, so that it may be not a number."""

    rows: int
    width: int = 0
    widths: tuple[int, ...] = ()
    last: bool = False


Exchanges = Sequence[Exchange] | None
"""All meetings of a step, in order; None where they are not known beforehand, so that a failure ends all ranks."""


class Steps:
    """The ranks as such steps see them; implements tfglm.ops.group.Group. name: of what takes the steps. device: where
    its tensors are."""

    def __init__(self, group: Group, name: str, device: torch.device) -> None:
        self.rank = group.rank
        self.ranks = group.ranks
        self.capturable = group.capturable
        self._group = group
        self._name = name
        self._device = device
        self._met = 0
        self._failed: Exception | None = None

    @contextmanager
    def lead(self, message: Message, exchanges: Callable[[], Exchanges]) -> Iterator[None]:
        """Rank 0's side of a step, announced first. What fails inside is raised once the others need no more of this
        rank; as RanksError, on all ranks, where that cannot be."""
        self._group.announce(message)
        self._met = 0
        try:
            yield
        except RanksError:
            raise
        except BaseException as error:
            if self.ranks > 1 and not (isinstance(error, Exception) and self._gave_the_rest(exchanges)):
                reason = self._ends(message, error)
                self._group.abort(reason)
                raise RanksError(reason) from error
            raise

    def follow(
        self, action: Callable[[Message], None], exchanges: Callable[[Message], Exchanges]
    ) -> Callable[[Message], None]:
        """Another rank's side of a step. After its first failure it takes no part in any, but for what rank 0 waits
        for."""

        def step(message: Message) -> None:
            self._met = 0
            if self._failed is None:
                try:
                    return action(message)
                except RanksError:
                    raise
                except Exception as error:
                    self._failed = error
                    log.warning(
                        "W_DRAFTER: %s failed on rank %d at %r (%s: %s); rank 0 turns drafting off when it next asks "
                        "for drafts",
                        self._name,
                        self.rank,
                        message.kind,
                        type(error).__name__,
                        error,
                        exc_info=True,
                    )
            if not self._gave_the_rest(lambda: exchanges(message)):
                raise RanksError(self._ends(message, self._failed)) from self._failed
            return None

        return step

    def _gave_the_rest(self, exchanges: Callable[[], Exchanges]) -> bool:
        """Whether the others have got from this rank what they wait for in the step."""
        try:
            planned = exchanges()
            if planned is None:
                return False
            for exchange in planned[self._met :]:
                value = float("nan") if exchange.last else 0.0
                width = exchange.widths[self.rank] if exchange.widths else exchange.width
                part = torch.full((exchange.rows, width), value, device=self._device)
                if exchange.widths:
                    self._group.concat(part, exchange.widths)
                else:
                    self._group.sum(part)
        except RanksError:
            raise
        except Exception:
            log.exception("what the other ranks wait for cannot be given to them")
            return False
        return True

    def _ends(self, message: Message, error: BaseException | None) -> str:
        what = f"rank {self.rank} failed at {message.kind!r} of {self._name}: {type(error).__name__}: {error}"
        return f"{what}; what the others wait for in it is not known"

    # -- the group

    def announce(self, message: Message) -> None:
        self._group.announce(message)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        total = self._group.sum(partial)
        self._met += 1
        return total

    def concat(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        whole = self._group.concat(part, widths)
        self._met += 1
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._group.gather(part)
        self._met += 1
        return parts

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        self._group.replay(graph)

    def check(self) -> None:
        self._group.check()

    def abort(self, reason: str) -> None:
        self._group.abort(reason)
