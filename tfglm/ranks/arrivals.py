"""Which gathers have brought their data, where the host does not wait for them: a mark on the device after each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Mark(Protocol):
    """A place in what was launched."""

    def record(self) -> None:
        """Put it behind what was launched so far."""
        ...

    def query(self) -> bool:
        """Whether all of that is done."""
        ...


class Arrivals:
    """Marks behind gathers, oldest first. `launched` is called by the thread that launches, `last` by any."""

    def __init__(self, new: Callable[[], Mark]) -> None:
        self._new = new
        self._lock = threading.Lock()
        self._under_way: deque[tuple[int, Mark]] = deque()
        self._spare: list[Mark] = []
        self._last = 0

    def launched(self, gather: int) -> None:
        """The gather of this number stands on the current stream."""
        self.last()
        mark = self._spare.pop() if self._spare else self._new()
        mark.record()
        with self._lock:
            self._under_way.append((gather, mark))

    def last(self) -> int:
        """The last gather that has brought its data, and with it all before."""
        with self._lock:
            while self._under_way and self._under_way[0][1].query():
                self._last, mark = self._under_way.popleft()
                self._spare.append(mark)
            return self._last
