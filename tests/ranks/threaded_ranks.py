"""A model over ranks that are threads of this process: rank 0's model to use, the others following it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.errors import RanksError
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.ops.group import Message

LIMIT = 60.0
"""Seconds a rank waits for another; none is expected to."""


class Meeting:
    """Where the threads meet: one slot a rank, and a barrier before and after they are read."""

    def __init__(self, ranks: int) -> None:
        self.slots: list[torch.Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=LIMIT)
        self.messages: list[queue.Queue[Message | None]] = [queue.Queue() for _ in range(ranks)]
        self.reason = ""


class ThreadGroup:
    """One thread's side of a meeting."""

    capturable = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.ranks = len(meeting.slots)

    def announce(self, message: Message) -> None:
        assert self.rank == 0
        for other in self._meeting.messages[1:]:
            other.put(message)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self._meeting.slots[self.rank] = part
        try:
            self._meeting.barrier.wait()
            gathered = torch.stack(self._meeting.slots)
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RanksError(self._meeting.reason or f"rank {self.rank} waited {LIMIT} s") from None
        return gathered

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        assert partial.dtype == torch.float32
        first, *rest = self.gather(partial)
        for part in rest:
            first = first + part
        return first

    def concat(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        padded = torch.constant_pad_nd(part, (0, max(widths) - part.shape[1]))
        return torch.cat([piece[:, :width] for piece, width in zip(self.gather(padded), widths, strict=True)], dim=1)

    def check(self) -> None:
        if self._meeting.reason:
            raise RanksError(self._meeting.reason)

    def abort(self, reason: str) -> None:
        self._meeting.reason = reason
        self._meeting.barrier.abort()


Loader = Callable[[Checkpoint, ThreadGroup], Glm53]


Handlers = Callable[[Checkpoint, Glm53], Mapping[str, Callable[[Message], None]]]


@contextmanager
def spread(
    checkpoint: Checkpoint, ranks: int, load: Loader | None = None, handlers: Handlers | None = None, **options: Any
) -> Iterator[list[Glm53]]:
    """The models of all ranks, rank 0's first: a forward of that one is one of all. handlers: what the others follow
    besides forwards. options: of load_model."""
    meeting = Meeting(ranks)
    models: list[Glm53 | None] = [None] * ranks
    failures: list[BaseException] = []
    loaded = threading.Barrier(ranks, timeout=LIMIT)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)

    def loading(rank: int) -> Glm53:
        torch.set_num_threads(1)
        group = ThreadGroup(meeting, rank)
        models[rank] = model = load(checkpoint, group) if load else load_model(checkpoint, group=group, **options)
        loaded.wait()
        return model

    def follow(rank: int) -> None:
        try:
            model = loading(rank)
            known = {**model.handlers(), **(handlers(checkpoint, model) if handlers else {})}
            while (message := meeting.messages[rank].get()) is not None:
                known[message.kind](message)
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()
            loaded.abort()

    followers = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, ranks)]
    for thread in followers:
        thread.start()
    try:
        loading(0)
        yield [model for model in models if model is not None]
    except (threading.BrokenBarrierError, RanksError):
        if failures:
            raise failures[0] from None
        raise
    finally:
        for messages in meeting.messages:
            messages.put(None)
        for thread in followers:
            thread.join(LIMIT)
        torch.set_num_threads(threads_before)
