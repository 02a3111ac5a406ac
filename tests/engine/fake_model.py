"""A model without weights for engine tests: each row of logits is a hash of its stream's whole token history.

So a token lost, doubled, mixed between streams or read from an uncut draft changes every later row. Streams and pages
are the real ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tfglm.cache.pages import PAGE, PagePool, Stream, pages_for
from tfglm.models.window import Rows, reserve

LogitsOf = Callable[[Sequence[int], int], np.ndarray]


def hashed(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """The row that follows these tokens: float32 [vocab_size], about normal with deviation 3."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    state = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    return (3 * state.standard_normal(vocab_size)).astype(np.float32)


class FakeModel:
    """`before` is called with every window before it is computed: tests raise, wait and record there."""

    def __init__(
        self,
        vocab_size: int,
        *,
        tokens: int = 16 * PAGE,
        logits: LogitsOf = hashed,
        before: Callable[[Sequence[Rows]], None] = lambda window: None,
    ) -> None:
        self.vocab_size = vocab_size
        self.pool = PagePool(pages_for(tokens))
        self.before = before
        self.windows: list[list[tuple[int, int]]] = []
        """Of every forward: (tokens, want) of each entry."""
        self._logits = logits
        self._history: dict[Stream, list[int]] = {}

    page_tokens = PAGE

    @property
    def tokens_total(self) -> int:
        return self.pool.pages * PAGE

    @property
    def empty(self) -> bool:
        """Whether every stream was closed and every page given back."""
        return self.pool.free == self.pool.pages and all(stream.closed for stream in self._history)

    def open_stream(self) -> Stream:
        stream = Stream(self.pool)
        self._history[stream] = []
        return stream

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        self.before(window)
        self.windows.append([(len(rows.tokens), rows.want) for rows in window])
        reserve(window, self.pool)
        logits = []
        for rows in window:
            stream, tokens = rows.stream, self._history[rows.stream]
            assert not stream.closed and rows.tokens and 0 <= rows.want <= len(rows.tokens)
            del tokens[stream.length :]
            tokens.extend(rows.tokens)
            stream.length = len(tokens)
            for left in range(rows.want - 1, -1, -1):
                logits.append(self._logits(tokens[: len(tokens) - left], self.vocab_size))
        return torch.from_numpy(np.stack(logits) if logits else np.zeros((0, self.vocab_size), np.float32))
