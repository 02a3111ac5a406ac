"""How often a broken cluster is started again, and after what time: doubling waits, and an end to it."""

from __future__ import annotations

from dataclasses import dataclass

from tfglm.supervisor.cluster import Limits


@dataclass
class Attempts:
    """Failed starts in a row. Kept by rank 0, which alone declares starts."""

    limits: Limits
    failed: int = 0

    def record(self, served_s: float, in_order: bool) -> None:
        """A generation is over that served for `served_s` seconds; long service makes earlier failures forgotten."""
        if in_order or served_s >= self.limits.stable:
            self.failed = 0
        if not in_order:
            self.failed += 1

    @property
    def exhausted(self) -> bool:
        return self.failed >= self.limits.attempts

    @property
    def wait_s(self) -> float:
        """Before the next attempt."""
        if not self.failed:
            return 0.0
        return min(self.limits.backoff * 2.0 ** min(self.failed - 1, 30), self.limits.backoff_most)
