"""A model without weights for engine tests: each row of logits is a hash of its stream's whole token history.

So a token lost, doubled, mixed between streams or read from an uncut draft changes every later row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tfglm.engine.model import Rows
from tfglm.errors import MemoryShortError


class FakeStream:
    def __init__(self, model: FakeModel) -> None:
        self.tokens: list[int] = []
        self.model = model
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]

    def close(self) -> None:
        assert not self.closed, "a stream was closed twice"
        self.closed = True
        self.model.streams.remove(self)


class FakeModel:
    """`before` is called with every window before it is computed: tests raise, wait or record there."""

    def __init__(
        self,
        vocab_size: int,
        *,
        capacity: int = 4096,
        context: int = 1024,
        page_tokens: int = 16,
        before: Callable[[Sequence[Rows]], None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.context = context
        self.capacity = capacity
        self.page_tokens = page_tokens
        self.before = before
        self.streams: list[FakeStream] = []
        self.windows: list[list[tuple[int, int]]] = []

    def open_stream(self) -> FakeStream:
        stream = FakeStream(self)
        self.streams.append(stream)
        return stream

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        if self.before is not None:
            self.before(window)
        self.windows.append([(len(rows.tokens), rows.want) for rows in window])
        logits = []
        for rows in window:
            stream = rows.stream
            assert isinstance(stream, FakeStream) and not stream.closed and 0 <= rows.want <= len(rows.tokens)
            stream.tokens.extend(rows.tokens)
            for want in range(rows.want, 0, -1):
                logits.append(logits_after(stream.tokens[: len(stream.tokens) + 1 - want], self.vocab_size))
        if sum(-(-s.length // self.page_tokens) for s in self.streams) * self.page_tokens > self.capacity:
            raise MemoryShortError("the fake cache is full")
        return torch.from_numpy(np.stack(logits) if logits else np.zeros((0, self.vocab_size), np.float32))


def logits_after(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """float32 [vocab_size], about normal with deviation 3."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    state = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    return (3 * state.standard_normal(vocab_size)).astype(np.float32)
