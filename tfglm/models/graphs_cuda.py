"""CUDA graphs of one device: a kind of window is captured once and replayed ever after."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

GRAPH_ROWS = 16
"""Rows of the largest window that is captured: what the decode kernels take."""

LEAST_CONTEXT = 4096
MOST_GRAPHS = 320
"""Windows of 1 to 16 rows at nine contexts up to a million tokens, of a model and its MTP layer, and some to spare."""


def context_kind(tokens: int) -> int:
    """Of a window that sees so many tokens: the power of two that its launches are sized for."""
    return max(LEAST_CONTEXT, 1 << (tokens - 1).bit_length())


def context_kinds(window: int) -> list[int]:
    """Every kind up to that of a full window."""
    last = context_kind(window)
    return [LEAST_CONTEXT << n for n in range((last // LEAST_CONTEXT).bit_length())]


@dataclass(frozen=True)
class Captured:
    """A captured forward: where its inputs are read, what replays it, where its results lie until the next replay."""

    inputs: Any
    graph: torch.cuda.CUDAGraph
    result: Any


class Graphs:
    """Captures by key. Beyond `most` the least recently used is dropped.

    All share one pool of scratch and one buffer of logits, so only one may run at a time, and what a replay leaves is
    to be read before the next one. columns: of the logits; rows of 154,880 floats that each capture kept for itself
    would come to 80 MiB for every context.
    """

    def __init__(self, device: torch.device, columns: int, most: int = MOST_GRAPHS) -> None:
        self._device = device
        self._most = most
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.logits = torch.empty(GRAPH_ROWS, columns, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._captured)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Log what is captured meanwhile."""
        begin, before, free = time.monotonic(), len(self), torch.cuda.mem_get_info(self._device)[0]
        yield
        log.info(
            "%s: %d windows captured in %.1f s, %.0f MiB",
            what,
            len(self) - before,
            time.monotonic() - begin,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    def find(self, key: Hashable) -> Captured | None:
        if key not in self._captured:
            return None
        self._captured.move_to_end(key)
        return self._captured[key]

    def capture(self, key: Hashable, inputs: Any, forward: Callable[[], Any]) -> Captured:
        """What `forward` launches, which reads `inputs` and allocates its results. It runs once before: that loads its
        kernels and makes scratch that stays."""
        forward()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # torch.cuda.graph() would also give back all memory that is cached for the windows that run.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = forward()
            finally:
                graph.capture_end()
        if len(self._captured) >= self._most:
            self._captured.popitem(last=False)
        self._captured[key] = Captured(inputs, graph, result)
        return self._captured[key]
