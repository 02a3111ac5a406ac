"""A fake model that remembers tokens in the pages of its cache, as a real one remembers what it made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fake_model import FakeModel
from harness import LIMIT, TOKENIZER

from tfglm.cache.kept import KeptStates
from tfglm.cache.pages import PAGE
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.states import PromptStates
from tfglm.models.window import Rows, reserve
from tfglm.settings import Settings

COLUMNS = TOKENIZER.vocab_size + 12


class PagedModel(FakeModel):
    """Logits follow from the tokens found in the stream's pages, whoever wrote them. Pages start as garbage. alike: a
    row of a reply is cached as one of a prompt is."""

    def __init__(
        self, pages: int, before: Callable[[Sequence[Rows]], None] = lambda window: None, *, alike: bool = True
    ) -> None:
        super().__init__(COLUMNS, tokens=pages * PAGE, before=before)
        self.alike = alike
        self.memory = np.full((self.pool.pages, PAGE), -7, np.int64)

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        self.before(window)
        self.windows.append([(len(rows.tokens), rows.want) for rows in window])
        reserve(window, self.pool)
        logits = []
        for rows in window:
            stream, count = rows.stream, len(rows.tokens)
            for position, token in enumerate(rows.tokens, stream.length):
                page = stream.pages[position // PAGE]
                assert page not in stream.lent, "a page of another's was written"
                self.memory[page, position % PAGE] = token if rows.prompt or self.alike else -1 - token
            stream.length += count
            held = self.memory[stream.pages].reshape(-1)[: stream.length].tolist()
            logits += [self._logits(held[: stream.length - left], COLUMNS) for left in range(rows.want - 1, -1, -1)]
        return torch.from_numpy(np.stack(logits) if logits else np.zeros((0, COLUMNS), np.float32))


class KeepingEngine:
    """An engine over a paged model that keeps up to `budget` pages. Checks the books of its pages when it ends."""

    def __init__(
        self,
        pages: int,
        budget: int,
        *,
        drafting: Drafting | None = None,
        eos: Sequence[int] = (),
        alike: bool = True,
        **settings: Any,
    ) -> None:
        self.model = PagedModel(pages, alike=alike)
        self.kept = KeptStates(self.model.pool, budget)
        states = PromptStates(self.kept, replies=alike)
        self.engine = Engine(self.model, TOKENIZER, Settings(**settings), eos, drafting, states)

    def __enter__(self) -> KeepingEngine:
        self.engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        idle = self.engine.wait_idle(LIMIT)
        assert self.engine.stop(LIMIT)
        if kind is None:
            assert idle
            pool = self.model.pool
            assert pool.free + self.kept.pages == pool.pages
            self.kept.drop(pool.pages)
            assert pool.free == pool.pages, "a kept page is still held"

    @property
    def rows(self) -> int:
        """Rows of all windows so far."""
        return sum(tokens for window in self.model.windows for tokens, _ in window)
