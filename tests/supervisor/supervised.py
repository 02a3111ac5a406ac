"""A cluster of real supervisor processes on loopback addresses, with fake engines or real ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAKE = [sys.executable, str(HERE / "fake_engine.py")]
FITS = {"floor": 1, "largest_context": 4096, "refusal": ""}
LIMITS = {"dead": 2.0, "join": 10.0, "stop": 2.0, "backoff": 0.1, "backoff_most": 0.2, "start": 120.0}


def free_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Supervised:
    """`count` ranks at 127.0.0.1, .2, .. with one folder for configuration and one for state each."""

    def __init__(self, folder: Path, count: int = 3, command: list[str] | None = None, **changes: Any) -> None:
        self.folder, self.count = folder, count
        self.checkpoint = folder / "checkpoint"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.environ: dict[str, str] = {}
        self.entry = [sys.executable, "-m", "tfglm.cli.main"]
        self.port = free_port(socket.SOCK_STREAM)
        if command is None:
            self.checkpoint.mkdir()
            (self.checkpoint / "config.json").write_text("{}")
            self.plan()
        limits, settings = changes.pop("limits", {}), changes.pop("settings", {})
        self.cluster: dict[str, Any] = {
            "version": 1,
            "name": f"test-{os.getpid()}-{self.port}",
            "checkpoint": str(self.checkpoint),
            "command": command or FAKE,
            "settings": {"port": self.port, "guard_gib": 0, "drain_s": 2, **settings},
            "ranks": [{"name": f"spark{rank}", "control": f"127.0.0.{rank + 1}"} for rank in range(count)],
            "ports": {"rendezvous": free_port(socket.SOCK_STREAM), "heartbeat": free_port(socket.SOCK_DGRAM)},
            "limits": LIMITS | limits,
            **changes,
        }
        self.nodes: list[dict[str, Any]] = [{} for _ in range(count)]
        self.namespaces: list[str] = [""] * count
        for rank in range(count):
            self.write(rank)

    def plan(self, lowest_free: int = 2) -> None:
        ranks = [{"lowest_free": lowest_free, "need": 2**30, "available": 2**30 + lowest_free}] * self.count
        new = self.checkpoint / "plan.new"
        new.write_text(json.dumps(FITS | {"ranks": ranks}))
        new.replace(self.checkpoint / "plan.json")

    def write(self, rank: int, **changes: Any) -> None:
        """cluster.json of one rank, with changes that the others do not have."""
        config = self.config(rank)
        config.mkdir(exist_ok=True)
        (config / "cluster.json").write_text(json.dumps(self.cluster | changes))
        (config / "rank.json").write_text(
            json.dumps({"version": 1, "rank": rank, "interface": "lo"} | self.nodes[rank])
        )

    def behave(self, rank: int, **how: Any) -> None:
        """What the rank's next fake engines do."""
        (self.checkpoint / f"rank{rank}.json").write_text(json.dumps(how))

    def config(self, rank: int) -> Path:
        return self.folder / f"etc{rank}"

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(self.count):
            config, state = str(self.config(rank)), str(self.folder / f"run{rank}")
            self.run(rank, "rank", "run", "--rank", str(rank), "--config", config, "--state", state)

    def run(self, rank: int, *words: str) -> subprocess.Popen[bytes]:
        """A tfglm command on behalf of a rank, which ends with the cluster."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TFGLM_")}
        with (self.folder / f"rank{rank}.log").open("ab") as log:
            inside = ["ip", "netns", "exec", self.namespaces[rank]] if self.namespaces[rank] else []
            self.processes[rank] = subprocess.Popen(
                [*inside, *self.entry, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=clean | self.environ
            )
        self.started.append(self.processes[rank])
        return self.processes[rank]

    def state(self, rank: int) -> dict[str, Any]:
        try:
            state = json.loads((self.folder / f"run{rank}" / f"rank{rank}.json").read_text())
        except (OSError, ValueError):
            return {"phase": "none", "generation": 0, "reason": ""}
        return next(facts for facts in state["ranks"] if facts["rank"] == rank) | {"tail": state["tail"]}

    def phases(self) -> list[tuple[str, int]]:
        return [(state["phase"], state.get("generation", 0)) for state in map(self.state, range(self.count))]

    def engine(self, rank: int) -> int:
        """Process id of a rank's engine, which must be there: signals to 0 go to the test itself."""
        pid = int(self.state(rank)["pid"])
        assert pid > 1, self.state(rank)
        return pid

    def engines(self) -> list[int]:
        """Every engine that was ever started and still runs."""
        starts = self.checkpoint / "starts"
        pids = [int(line.split()[1]) for line in starts.read_text().splitlines()] if starts.exists() else []
        return [pid for pid in pids if alive(pid)]

    def until(self, true: Callable[[], object], seconds: float = 60.0, what: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- rank {rank}\n{self.log(rank)[-3000:]}" for rank in self.processes)
                raise AssertionError(f"{what or true} did not come true in {seconds} s: {self.phases()}\n{logs}")
            time.sleep(0.05)

    def until_serving(self, generation: int, seconds: float = 60.0) -> None:
        wanted = [("serving", generation)] * self.count
        self.until(lambda: self.phases() == wanted, seconds, f"all ranks serving in start {generation}")

    def until_down(self, seconds: float = 10.0) -> None:
        self.until(lambda: not self.engines(), seconds, "no engine left")

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def ended(self, rank: int, seconds: float = 30.0) -> int:
        return self.processes[rank].wait(seconds)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.started:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        mark = f"GLM_SUPERVISED={self.cluster['name']}/".encode()
        for pid in _processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def _processes_with(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(
                word.startswith(mark) for word in (entry / "environ").read_bytes().split(b"\0")
            ):
                yield int(entry.name)
        except OSError:
            continue
