"""What `tfglm serve` and rank 0 of `tfglm engine` do: check everything, take the port, load, try one request, serve."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tfglm.cli.session import OtherRanks, Session
from tfglm.errors import MemoryShortError
from tfglm.settings import Settings
from tfglm.supervisor.child import MARK

if TYPE_CHECKING:
    from tfglm.server.state import Served

log = logging.getLogger("tfglm.serve")


def start_logging(settings: Settings) -> None:
    """Other libraries' everyday news (torch has some at exit) would only hide our own."""
    rank = f" rank {settings.rank}" if settings.ranks > 1 else ""
    # A service's journal has the time and the rank already.
    begins = "" if MARK in os.environ else f"%(asctime)s{rank} "
    logging.basicConfig(level="WARNING", format=f"{begins}%(levelname)s %(name)s: %(message)s")
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
    from tfglm.engine.spread import take_gpu
    from tfglm.ranks.wires import chosen_wire

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
