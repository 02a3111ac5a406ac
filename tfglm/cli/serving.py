"""What `tfglm serve` and rank 0 of `tfglm engine` do: check everything, take the port, load, try one request, serve."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tfglm.errors import MemoryShortError, TfglmError
from tfglm.settings import Settings

if TYPE_CHECKING:
    from tfglm.engine.engine import Engine
    from tfglm.engine.spread import Leader
    from tfglm.memory.guard import Guard, LowWater
    from tfglm.server.state import Served

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
        if self.engine is not None:
            self.engine.stop()
        if self.leader is not None:
            self.leader.close(error)
        if self.others is not None:
            self.others.close(failed=error is not None)
        if self.guard is not None:
            self.guard.stop()
            log.info("the least memory available was %s", self.guard.low)


def start_logging(settings: Settings) -> None:
    """Other libraries' everyday news (torch has some at exit) would only hide our own."""
    rank = f" rank {settings.rank}" if settings.ranks > 1 else ""
    logging.basicConfig(level="WARNING", format=f"%(asctime)s{rank} %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tfglm").setLevel(settings.log_level.upper())


def serve_model(path: Path, settings: Settings, others: OtherRanks | None) -> int:
    """Serve a checkpoint until a signal ends it. others: the ranks to share it with, None for one rank."""
    from tfglm.server.run import bind, serve

    listener = bind(settings)
    session = Session(others)
    failure: BaseException | None = None
    try:
        # Imported after the port is taken: torch needs seconds, and a busy port should be reported at once.
        from tfglm.checkpoint.store import Checkpoint
        from tfglm.cli.loading import load
        from tfglm.engine.spread import Leader

        settings = chosen(settings, one_machine=others is not None and others.one_machine)
        with Checkpoint.open(path) as checkpoint:
            if others is not None:
                session.leader = Leader(settings, others.start(settings), others.check, session.ranks_ended)
            session.serving = True
            serve(listener, settings, lambda: load(checkpoint, settings, session), _announce, session.rank_states)
            if session.leader is not None:
                session.leader.check()
    except BaseException as error:
        failure = error
        raise
    finally:
        session.close(failure)
        listener.close()
    if session.guard is not None and session.guard.tripped:
        raise MemoryShortError(
            f"the server stopped because memory ran short: {session.guard.low} were available, --guard-gib is "
            f"{settings.guard_gib}; free memory, or lower --context or --parallel"
        )
    return 0


def chosen(settings: Settings, *, one_machine: bool) -> Settings:
    """The settings with what they leave to the machine decided, and torch told of it. one_machine: all ranks are on
    this one and share its processors."""
    import torch

    from tfglm.engine.device import choose_device
    from tfglm.engine.machine import cores
    from tfglm.engine.spread import chosen_wire, take_gpu

    device = choose_device(settings.device, settings.kv, settings.dense, settings.head)
    settings = dataclasses.replace(settings, device=device)
    if settings.ranks > 1:
        settings = dataclasses.replace(settings, wire=chosen_wire(settings, one_machine=one_machine))
        take_gpu(settings)
    threads = settings.threads or max(1, cores() // (settings.ranks if one_machine else 1))
    torch.set_num_threads(threads)
    return dataclasses.replace(settings, threads=threads)


def _announce(served: Served, url: str) -> None:
    """The one line on stdout. A reader that is gone or a full disk is no reason to drop a model that took minutes."""
    line = f"tfglm serves {served.info.name}, window {served.info.context} tokens, at {url}/v1 (Ctrl-C stops it)"
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("stdout cannot be written (%s): %s", error.strerror, line)
        # What is left in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
