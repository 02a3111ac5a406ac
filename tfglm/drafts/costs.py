"""What a round costs in milliseconds: measured once at startup, so that every later decision is a function of tokens.

Windows are timed on text: random tokens would overstate how many experts the rows of a window touch between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

PROMPT = 64
"""Tokens read before the first window is timed."""

TEXT = '''The harbour was quiet when the two engineers came down to look at the old crane. It had been built in 1911,
and nobody had moved it for thirty years. "If the gears are sound," said the elder, "we can have it lifting by June."

def gear_ratio(teeth: list[int]) -> float:
    """Product of the ratios of each pair of wheels."""
    ratio = 1.0
    for driver, driven in zip(teeth, teeth[1:]):
        ratio *= driven / driver
    return ratio

They measured every wheel twice and wrote the numbers in a table.
'''
"""Prose and code, for timing."""


@dataclass(frozen=True)
class Costs:
    """verify_ms[r - 1]: a window of r rows. first_ms: a model's first draft of a round; next_ms: each one after it."""

    verify_ms: tuple[float, ...]
    first_ms: float = 0.0
    next_ms: float = 0.0

    def window(self, rows: int) -> float:
        """Milliseconds of a window; past the table it grows as at the table's end."""
        known = len(self.verify_ms)
        if rows <= known:
            return self.verify_ms[rows - 1]
        slope = self.verify_ms[-1] - self.verify_ms[-2] if known > 1 else self.verify_ms[0]
        return self.verify_ms[-1] + (rows - known) * slope

    def drafting(self, tokens: int) -> float:
        """Milliseconds of a model's draft of so many tokens."""
        return self.first_ms + (tokens - 1) * self.next_ms if tokens else 0.0


THREE_SPARKS = Costs((52.4, 64.3, 74.7, 84.4, 95.4, 104.1, 112.3, 121.0, 127.9), first_ms=3.4)
"""Published verification times of GLM-5.3 at 2.75 bits on three DGX Sparks, with a DSpark block."""


def measure(window: Callable[[int], object], widths: int, *, repeats: int = 7, budget_s: float = 5.0) -> list[float]:
    """Milliseconds of window(1) to window(widths): the fastest of `repeats`, made non-decreasing.

    When the budget is spent every width has been timed at least once.
    """
    fastest = [float("inf")] * widths
    window(widths)
    end = time.monotonic() + budget_s
    for _ in range(repeats):
        for rows in range(1, widths + 1):
            start = time.perf_counter()
            window(rows)
            fastest[rows - 1] = min(fastest[rows - 1], (time.perf_counter() - start) * 1000)
        if time.monotonic() > end:
            break
    return list(accumulate(fastest, max))


def enough(text: Sequence[int], count: int) -> list[int]:
    """The text, repeated until it has `count` tokens."""
    return (list(text) * -(-count // len(text)))[:count]
