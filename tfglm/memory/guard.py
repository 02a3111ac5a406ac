"""Watches memory while a model serves: a machine that shares it with its GPU freezes instead of failing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfglm.memory.info import read_available

log = logging.getLogger(__name__)

GIB = 2**30
PERIOD_S = 0.5
STRIKES = 2
"""Samples below the limit in a row that the guard acts on: one may be a moment's."""


@dataclass(frozen=True)
class LowWater:
    """The least available memory seen, in bytes, and when (seconds since the epoch)."""

    available: int
    when: float

    def __str__(self) -> str:
        return f"{self.available / GIB:.2f} GiB at {time.strftime('%H:%M:%S', time.localtime(self.when))}"


class Guard:
    """Samples available memory twice a second from a thread of its own.

    Below `floor` it warns, once for every time that memory falls below it. Below `limit` for STRIKES samples in a row
    it calls `act`, once and for all. limit 0 never acts.
    """

    def __init__(self, limit: int, floor: int, act: Callable[[LowWater], None], *, sysroot: Path = Path("/")) -> None:
        self.tripped = False
        self._limit, self._floor, self._act, self._sysroot = limit, floor, act, sysroot
        self._low = LowWater(read_available(sysroot), time.time())
        self._strikes = 0
        self._warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    @property
    def low(self) -> LowWater:
        return self._low

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the low-water mark stays."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def sample(self) -> None:
        """Read once, and warn or act on it."""
        available = read_available(self._sysroot)
        if available < self._low.available:
            self._low = LowWater(available, time.time())
        if available >= self._floor:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning("W_MEMORY: %.2f GiB are available, below --floor-gib %.2f", available / GIB, self._floor / GIB)
        self._strikes = self._strikes + 1 if available < self._limit else 0
        if self._strikes >= STRIKES and not self.tripped:
            self.tripped = True
            log.error("E_MEMORY: %.2f GiB are available, below --guard-gib %.2f", available / GIB, self._limit / GIB)
            self._act(self._low)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self.sample()
            except OSError as error:
                # No free file descriptor, for one: the next sample may succeed, but not if the thread has ended.
                log.warning("memory cannot be read: %s", error)
