"""Server processes for tests: start one, wait for the line with its address, end it."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# SERVER_DEVICE=cuda runs the suite against servers on a GPU.
DEVICE = {"TFGLM_DEVICE": os.environ.get("SERVER_DEVICE", "cpu")}
STATE = tempfile.mkdtemp(prefix="tfglm-state-")


class ServerProcess:
    """A child whose stdout and stderr are read line by line; ends with the `with` block."""

    def __init__(
        self, *command: str | Path, environ: dict[str, str] | None = None, patches: Path | None = None
    ) -> None:
        """patches: a folder with a sitecustomize.py, which it and its children begin with."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TFGLM_")}
        path = os.pathsep.join(
            [*([str(patches)] if patches else []), str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={
                **clean,
                **DEVICE,
                "XDG_STATE_HOME": STATE,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                **(environ or {}),
            },
        )
        self.lines: list[str] = []
        self._fresh: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._fresh.put(line.rstrip())
        self._fresh.put(None)

    def wait_for(self, pattern: str, seconds: float = 120.0) -> str:
        """The first group of the next line that matches."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._fresh.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} in {seconds} s: {self.lines}") from None
            if line is None:
                raise AssertionError(f"ended without a line like {pattern!r}: {self.lines}")
            found = re.search(pattern, line)
            if found:
                return found.group(1)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 30.0) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
