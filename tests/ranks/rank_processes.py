"""Starts toy ranks (toy_rank.py) as processes and follows what they say."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import toy_rank

PATIENCE_S = 90.0  # for what is no fault's detection: starting processes on a busy machine
# A server that has loaded torch once forks the ranks.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tfglm.ranks.gloo", "tfglm.ranks.shared", "tfglm.ranks.wires", "toy_rank"])


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def record(took: dict[int, float]) -> None:
    """Note the seconds from a fault to each rank's end, if RANK_FAULT_TIMES names a file; a JSON object a line."""
    if path := os.environ.get("RANK_FAULT_TIMES"):
        test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": test, "ended_s": {rank: round(s, 2) for rank, s in took.items()}}) + "\n")


class Toy:
    """One toy rank."""

    def __init__(self, plan: dict, log: Path) -> None:
        self.rank = plan["rank"]
        self.log = log
        self.events: list[dict] = []
        self.ended_at: float | None = None
        self._changed = threading.Condition()
        self._heard, said = _PROCESSES.Pipe(duplex=False)
        self.process = _PROCESSES.Process(target=toy_rank.run, args=(plan, said, str(log)), daemon=True)
        self.process.start()
        said.close()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            while True:
                event = self._heard.recv()
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except EOFError:
            with self._changed:
                self.ended_at = time.monotonic()  # the kernel closes the pipe when it ends the process
                self._changed.notify_all()

    @property
    def exit_code(self) -> int | None:
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def send(self, what: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, what)

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
        return f"{self.events[-5:]}, exit code {self.process.exitcode}, log: {self.log.read_text()[-2000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._heard.close()


class Toys:
    """Toy ranks of one test; ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Toy] = []

    def start(self, plan: dict) -> Toy:
        toy = Toy(plan, self.folder / f"toy{len(self.all)}.log")
        self.all.append(toy)
        return toy

    def start_ranks(self, ranks: int = 3, only: tuple[int, ...] | None = None, **plan: object) -> list[Toy]:
        """Toy ranks 0 .. ranks - 1 with the same plan."""
        plan = {"port": free_port(), "ranks": ranks, **plan}
        return [self.start({**plan, "rank": rank}) for rank in only or range(ranks)]

    def end(self) -> None:
        for toy in self.all:
            toy.kill()
