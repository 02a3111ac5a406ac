"""What one process may hold: weights and cache against the memory there is, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tfglm.errors import MemoryShortError

GIB = 2**30
RESERVE_BYTES = 1 * GIB
"""Left to the interpreter, the forward pass's scratch and everybody else."""
LARGEST_DEFAULT_CONTEXT = 131072
"""Window taken when none is asked for, even if more would fit: a cache is paid for whether it is used or not."""


@dataclass(frozen=True)
class CachePlan:
    """A window of `context` tokens for each of the parallel requests: `tokens` in all, `nbytes` of cache."""

    context: int
    tokens: int
    nbytes: int


def plan_cache(
    *, available: int, weights: int, bytes_per_token: int, page: int, context: int, longest: int, parallel: int
) -> CachePlan:
    """The cache to allocate beside `weights` bytes of weights when `available` bytes are free.

    context 0 takes the largest window up to LARGEST_DEFAULT_CONTEXT and `longest` (the model's) that fits. Raises
    MemoryShortError with the figures when the asked one, or a single page, does not fit.
    """
    room = available - RESERVE_BYTES - weights
    pages_that_fit = max(0, room) // (bytes_per_token * page * parallel)
    wanted = min(context or LARGEST_DEFAULT_CONTEXT, longest)
    pages = -(-wanted // page)
    if pages > pages_that_fit:
        if context or pages_that_fit == 0:
            need = weights + RESERVE_BYTES + max(1, pages) * page * parallel * bytes_per_token
            fits = f"--context {pages_that_fit * page} fits" if pages_that_fit else "no window fits"
            raise MemoryShortError(
                f"{parallel} windows of {wanted} tokens need {need / GIB:.2f} GiB (weights {weights / GIB:.2f}, cache "
                f"{bytes_per_token} bytes a token, reserve {RESERVE_BYTES / GIB:.0f}); {available / GIB:.2f} GiB are "
                f"available: {fits}, or lower --parallel"
            )
        pages, wanted = pages_that_fit, pages_that_fit * page
    tokens = pages * page * parallel
    return CachePlan(wanted, tokens, tokens * bytes_per_token)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory a new process can have without swapping: Linux's own estimate, elsewhere all physical memory."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
