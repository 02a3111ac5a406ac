"""The engine as a child process: a group of its own, its words passed on and remembered, its end complete.

Everything an engine starts carries a mark in its environment. What bears the mark of this cluster and rank and is
still there when no engine should be is killed: also processes that left the group, those of a container, and those of
a supervisor that was killed itself.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfglm.supervisor.aside import aside
from tfglm.supervisor.notify import VARIABLES

log = logging.getLogger(__name__)

MARK = "GLM_SUPERVISED"
TAIL_LINES = 25
_LONGEST_LINE = 4096
_ERROR = re.compile(r"\b(E_[A-Z]+): (.*)")
DOCKER = re.compile(r"^docker: .*", re.MULTILINE)
"""How docker begins the line that says why there is no container."""
_PR_SET_PDEATHSIG = 1
_KILLED_FIRST = 500
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running engine. Make it with `start`; it is over when `wait` returns."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.pid = process.pid
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.error: tuple[str, str] | None = None
        """Code and message of the last line that named one."""
        self._process, self._mark = process, mark
        self._relay = threading.Thread(target=self._pass_on, name="relay", daemon=True)
        self._relay.start()

    @classmethod
    def start(cls, argv: Sequence[str], environ: Mapping[str, str], mark: str) -> Child:
        """Call it from the main thread: the engine dies with the thread that started it. Raises OSError.

        Neither systemd's variables nor its low score for the OOM killer are inherited.
        """
        clean = {name: value for name, value in environ.items() if name not in VARIABLES}
        process = subprocess.Popen(
            argv,
            env={**clean, MARK: mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(_KILLED_FIRST))
        return cls(process, mark)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"the engine was killed by {name}" + (" (by hand, or out of memory?)" if name == "SIGKILL" else "")
        last = self.error[1] if self.error else next((line for line in reversed(self.tail) if line.strip()), "")
        return f"the engine ended with code {code}{f': {last}' if last and code else ''}"

    @property
    def code(self) -> int | None:
        return self._process.returncode

    async def wait(self, seconds: float) -> bool:
        """Whether it has ended, after at most `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        return not self.running

    def terminate(self) -> None:
        """Ask the engine to end in order."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and after `grace_s` SIGKILL, to the whole group; then whatever else bears the mark."""
        if self.running:
            self.terminate()
            await self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await reap(self._mark)
        if not await self.wait(5.0):
            log.error("E_WORKER: process %d cannot be killed: it waits for the kernel (a dead NFS server?)", self.pid)
        await aside(lambda: self._relay.join(1.0), "last words")

    def _pass_on(self) -> None:
        """Reads until every process that holds the pipe has ended. Bytes that are no text and lines without an end must
        not be this process's end."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while line := pipe.readline(_LONGEST_LINE):
                with contextlib.suppress(OSError, ValueError):  # the log is full or closed: the engine goes on
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
                text = line.decode(errors="replace").rstrip()
                self.tail.append(text)
                found = _ERROR.search(text)
                if found:
                    self.error = (found.group(1), found.group(2))
                elif DOCKER.match(text):
                    self.error = ("E_WORKER", text)


def mark_of(cluster: str, rank: int) -> str:
    return f"{cluster}/{rank}"


async def reap(mark: str, limit: float = 2.0) -> None:
    """`kill_marked`, beside the event loop: reading /proc waits for a process that the kernel holds in a page fault."""
    try:
        await asyncio.wait_for(aside(lambda: kill_marked(mark), "reap"), limit)
    except TimeoutError:
        log.warning("W_WORKER: /proc did not answer within %g s; a process of an earlier start may be left", limit)


def kill_marked(mark: str, proc: Path = Path("/proc")) -> list[int]:
    """Kill every process that bears the mark, but this one. Returns their ids."""
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return killed


def _die_with_parent() -> None:
    """Runs in the child before the engine: SIGKILL to it when this supervisor dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
