"""What DSpark and DFlash2 have in common as drafters: contexts, candidates of every slot, a walk along the slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from tfglm.cache.pages import Stream
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.block import BlockContext, BlockModel
from tfglm.drafts.candidates import best_candidates
from tfglm.models.taps import Passed, Taps
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight


class BlockDrafter(ABC):
    """A block drafter over the target's own head [vocab, hidden]."""

    def __init__(self, model: BlockModel, head: Weight, ops: Ops, candidates: int) -> None:
        self.config = model.config
        self.name = model.config.kind
        self.most = model.config.drafts
        self.taps = Taps(layers=model.config.layers)
        self.planes = ()
        self._model = model
        self._head = head
        self._ops = ops
        self._candidates = candidates

    def open(self, stream: Stream) -> BlockContext:
        """Positions count from the first row that is read: those before it are unknown, and only distances matter."""
        return self._model.open()

    def close(self, context: BlockContext) -> None:
        context.keys = context.values = torch.empty(0)

    @torch.inference_mode()
    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        streams = [passed.streams[layer] for layer in self.taps.layers]
        window = self.config.window
        parts = []
        for part in kept:
            stop = part.start + len(part.tokens)
            skipped = max(0, len(part.tokens) - window)
            part.context.length += skipped
            rows = [stream[part.start + skipped : stop] for stream in streams]
            parts.append((part.context, torch.cat(rows, dim=1)))
        self._model.extend(parts)

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        hidden = self._model.fill([(ask.context, ask.pending) for ask in asks])
        used = hidden[:, self.config.block_size - self.most :]
        logits = self._ops.linear(used.flatten(0, 1), self._head)
        ids, values = best_candidates(logits, self._candidates)
        drafts = []
        for number, ask in enumerate(asks):
            slots = slice(number * self.most, (number + 1) * self.most)
            drafts.append(self._walk(ask, used[number], ids[slots], values[slots]))
        return drafts

    def _walk(self, ask: Ask, hidden: torch.Tensor, ids: np.ndarray, values: np.ndarray) -> Draft:
        """Choose slot after slot, each given the one before it."""
        tokens: list[int] = []
        confidence: list[float] = []
        score = self.scorer(hidden)
        before = ask.pending
        while len(tokens) < min(self.most, ask.room) and (not tokens or ask.go_on(confidence)):
            slot = len(tokens)
            scores, sure = score(slot, before, ids[slot], values[slot])
            before, drawn = ask.draw(ids[slot], scores, slot)
            tokens.append(before)
            confidence.append(drawn if sure is None else sure)
        return Draft(tuple(tokens), tuple(confidence), self.name)

    @abstractmethod
    def scorer(self, hidden: torch.Tensor) -> Scorer:
        """For the rows [slots, hidden] of one block: a function, to be called for slot 0, 1, ... in order."""


class Scorer(ABC):
    """Scores of one block's candidates."""

    @abstractmethod
    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        """Scores float64 [n] of the candidates ids [n] with logits values [n] after the token `before`, and how sure
        the drafter is of this slot, if it has a head for that."""


def table_rows(table: torch.Tensor, ids: np.ndarray | int) -> np.ndarray:
    """Rows of a table [n, width] of any float dtype as float64. bfloat16 is read as words: numpy has no such type."""
    if table.dtype == torch.bfloat16:
        words = table.view(torch.int16).numpy()[ids].astype(np.uint16)
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    rows: np.ndarray = table.numpy()[ids].astype(np.float64)
    return rows


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
