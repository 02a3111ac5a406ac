"""The other ranks of `tfglm serve --ranks N`: children of this process that end with it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tfglm.errors import RanksError
from tfglm.ranks.bootstrap import listen
from tfglm.settings import ENV_PREFIX, Settings, env_name

_END_S, _LAST_WORDS_S = 5.0, 1.0
"""That a rank gets to end: told to in order, and after another was lost."""
_PR_SET_PDEATHSIG = 1
_RANK_0_ONLY = {"host", "port", "api_key", "served_name"}


class LocalRanks:
    """Implements OtherRanks. What the children say comes out on stderr, each line after the number of its rank."""

    one_machine = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: dict[int, subprocess.Popen[str]] = {}
        self._last: dict[int, str] = {}

    def start(self, settings: Settings) -> socket.socket:
        meeting = listen(("127.0.0.1", 0))
        leader = f"127.0.0.1:{meeting.getsockname()[1]}"
        for rank in range(1, settings.ranks):
            given = dataclasses.replace(settings, rank=rank, leader=leader)
            command = [sys.executable, "-m", "tfglm.cli.main", "engine", str(self._path), "--parent", str(os.getpid())]
            self._children[rank] = child = subprocess.Popen(
                command,
                env=_environment(given),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is rank 0's to act on
            )
            threading.Thread(target=self._relay, args=(rank, child), name=f"rank-{rank}", daemon=True).start()
        return meeting

    def check(self) -> None:
        for rank, child in self._children.items():
            if (code := child.poll()) is not None:
                raise RanksError(f"rank {rank} ended with exit code {code}: {self._last.get(rank, 'it said nothing')}")

    def close(self, *, failed: bool) -> None:
        deadline = time.monotonic() + (_LAST_WORDS_S if failed else _END_S)
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _relay(self, rank: int, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._last[rank] = line.rstrip()
            with contextlib.suppress(OSError):  # a log that cannot be written must not block the rank
                print(f"rank {rank}: {line}", end="", file=sys.stderr, flush=True)


def _environment(settings: Settings) -> Mapping[str, str]:
    """This process's, with the settings as they have come out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if f.name not in _RANK_0_ONLY and value != f.default:
            kept[env_name(f.name)] = str(int(value) if isinstance(value, bool) else value)
    return kept


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends; at once if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
