"""What a server has begun and must end: the other ranks, the engine, the guard of its memory."""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tfglm.errors import TfglmError
from tfglm.settings import Settings

if TYPE_CHECKING:
    from tfglm.engine.engine import Engine
    from tfglm.engine.spread import Leader
    from tfglm.memory.guard import Guard, LowWater
    from tfglm.models.glm53 import Glm53

log = logging.getLogger("tfglm.serve")


class OtherRanks(Protocol):
    """Where the ranks besides 0 come from. one_machine: they run on this one."""

    one_machine: bool

    def start(self, settings: Settings) -> socket.socket:
        """The listening socket at which they will join. Called from the main thread: a child that is to end with its
        parent ends with the thread that made it."""
        ...

    def check(self) -> None:
        """Raise RanksError if one of them is known not to come."""
        ...

    def close(self, *, failed: bool) -> None:
        """Rank 0 has told them to end, or the ranks have failed."""
        ...


@dataclass
class Session:
    """What there is to bring to an end, as far as it has begun."""

    others: OtherRanks | None
    leader: Leader | None = None
    model: Glm53 | None = None
    engine: Engine | None = None
    guard: Guard | None = None
    serving: bool = False

    def watch_memory(self, limit: int, floor: int) -> None:
        """From now on stop in order when memory falls below `limit` bytes."""
        from tfglm.memory.guard import Guard

        def stop(low: LowWater) -> None:
            self._signal()

        self.guard = Guard(limit, floor, stop)
        self.guard.start()

    def rank_states(self) -> list[str]:
        return self.leader.states() if self.leader else []

    def ranks_ended(self, error: TfglmError) -> None:
        """Replies end with an error, then the process as on SIGTERM."""
        if self.engine is not None:
            self.engine.end(error)
        self._signal()

    def _signal(self) -> None:
        """What SIGTERM does: no new requests, those running get their time, then the end."""
        if self.serving:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, error: BaseException | None) -> None:
        self.serving = False
        idle = self.engine is not None and self.engine.stop()
        if self.model is not None and idle:
            self.model.close()
        if self.leader is not None:
            self.leader.close(error, idle=idle)
        if self.others is not None:
            self.others.close(failed=error is not None or not idle)
        if self.guard is not None:
            self.guard.stop()
            log.info("the least memory available was %s", self.guard.low)
