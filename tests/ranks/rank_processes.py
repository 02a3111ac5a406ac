"""Starts toy ranks (toy_rank.py) as processes and follows what they say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

TOY = Path(__file__).parent / "toy_rank.py"
PATIENCE_S = 90.0  # for what is no fault's detection: starting Python and torch on a busy machine


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


class Toy:
    """One toy rank."""

    def __init__(self, plan: dict, log: Path, prefix: tuple[str, ...] = ()) -> None:
        self.rank = plan["rank"]
        self.log = log
        self.events: list[dict] = []
        self.ended_at: float | None = None
        self._changed = threading.Condition()
        with log.open("w") as stderr:
            command = [*prefix, sys.executable, str(TOY), json.dumps(plan)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self.ended_at = time.monotonic()
            self._changed.notify_all()

    def wait_for(self, event: str, count: int = 1, within_s: float = PATIENCE_S) -> dict:
        """The count-th event of this name."""

        def found() -> list[dict]:
            return [entry for entry in self.events if entry["event"] == event]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= count or self.ended_at is not None, within_s)
            assert len(found()) >= count, f"rank {self.rank} never said {event!r}: {self.story()}"
            return found()[count - 1]

    def wait_end(self, within_s: float = PATIENCE_S) -> float:
        """When it ended, on time.monotonic()'s clock."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended_at is not None, within_s)
            assert self.ended_at is not None, f"rank {self.rank} still runs after {within_s} s: {self.story()}"
            return self.ended_at

    def error(self) -> dict:
        return self.wait_for("error", within_s=0)

    def story(self) -> str:
        return f"{self.events[-5:]}, exit code {self.process.poll()}, log: {self.log.read_text()[-2000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Toys:
    """Toy ranks of one test; ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Toy] = []

    def start(self, plan: dict, prefix: tuple[str, ...] = ()) -> Toy:
        toy = Toy(plan, self.folder / f"toy{len(self.all)}.log", prefix)
        self.all.append(toy)
        return toy

    def start_ranks(self, ranks: int = 3, only: tuple[int, ...] | None = None, **plan: object) -> list[Toy]:
        """Toy ranks 0 .. ranks - 1 with the same plan."""
        plan = {"port": free_port(), "ranks": ranks, **plan}
        return [self.start({**plan, "rank": rank}) for rank in only or range(ranks)]

    def end(self) -> None:
        for toy in self.all:
            toy.kill()
