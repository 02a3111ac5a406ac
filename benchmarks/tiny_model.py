"""The tiny trained model behind an engine of this process, for benchmarks; and drafting on another clock."""

from __future__ import annotations

import dataclasses
import os
import platform
import queue
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfglm.bundled import DRAFTER, MODEL
from tfglm.checkpoint.store import Checkpoint
from tfglm.cli import loading
from tfglm.cli.session import Session
from tfglm.drafts.costs import THREE_SPARKS
from tfglm.drafts.policy import Policy
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest
from tfglm.server.state import Served
from tfglm.settings import Settings

DSPARK = {"drafter": "dspark", "drafter_path": str(DRAFTER)}


@dataclasses.dataclass
class Reply:
    ids: list[int]
    text: str
    end: Finished


@contextmanager
def served(threads: int, **given: Any) -> Iterator[Served]:
    """The model, loaded, and nothing learned of its drafters yet."""
    settings = Settings.from_sources({"device": "cpu", "threads": threads, "context": 2048, "parallel": 1, **given})
    session, before = Session(None), os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory() as nothing_learned, Checkpoint.open(MODEL) as checkpoint:
        os.environ["XDG_STATE_HOME"] = nothing_learned
        yield loading.load(checkpoint, settings, session)
        assert session.engine is not None
        session.engine.stop()
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


def ask(served: Served, request: GenerationRequest) -> Reply:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    served.engine.submit(request, events.put)
    ids, text = [], ""
    while True:
        event = events.get(timeout=600)
        if isinstance(event, Delta):
            ids += event.token_ids
            text += event.text if event.channel == "answer" else ""
        if isinstance(event, Failed):
            raise SystemExit(f"a reply failed: {event.message}")
        if isinstance(event, Finished):
            return Reply(ids, text, event)


class SparkClock:
    """Rounds cost what they do on three DGX Sparks, for the policy and for what is counted: this machine's load decides
    nothing. ms: of all rounds so far; tokens: that they gave."""

    def __init__(self) -> None:
        self.on = False
        self.ms = 0.0
        self.tokens = 0

    @contextmanager
    def running(self) -> Iterator[SparkClock]:
        """For models that are loaded inside."""
        costs, spent = loading.sound_costs, Policy.spent

        def counted(policy: Policy, streams: int, rows: int, tokens: int, drafted: int) -> None:
            self.ms += THREE_SPARKS.window(rows) + THREE_SPARKS.drafting(drafted)
            self.tokens += tokens
            spent(policy, streams, rows, tokens, drafted)

        loading.sound_costs = lambda model, drafter, *_: (drafter, THREE_SPARKS)  # type: ignore[assignment]
        Policy.spent = counted  # type: ignore[method-assign]
        self.on = True
        try:
            yield self
        finally:
            self.on = False
            loading.sound_costs, Policy.spent = costs, spent  # type: ignore[method-assign]


def hardware(threads: int) -> dict[str, str]:
    return {
        "command": f"python {' '.join(sys.argv)}",
        "hardware": f"{processor()}, {os.cpu_count()} processors, {threads} threads, load {os.getloadavg()[0]:.1f}",
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'processor'} ({platform.machine()})"
