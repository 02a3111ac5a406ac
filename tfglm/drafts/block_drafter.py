"""What DSpark and DFlash2 have in common as drafters: contexts, candidates of every slot, a walk along the slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from tfglm.cache.pages import PAGE, Stream
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.block import BlockContext, BlockModel
from tfglm.drafts.block_files import page_rows, pages_of_window
from tfglm.drafts.candidates import best_candidates
from tfglm.drafts.ring_pages import PageNames, RingPages
from tfglm.models.glm53 import Glm53
from tfglm.models.taps import Passed, Taps
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight
from tfglm.ops.group import Fact, Message
from tfglm.ops.steps import Exchange


@dataclass
class BlockText:
    """What rank 0 alone knows of a stream. skipped: rows were, since the last that was read. first: the oldest row that
    is known. asked: drafts have been, so the prompt was read. kept: pages that need no more keeping."""

    number: int
    names: PageNames = field(default_factory=PageNames)
    skipped: bool = False
    first: int = 0
    asked: bool = False
    kept: int = 0


class BlockDrafter(ABC):
    """A block drafter over the target's own head [vocab, hidden]. kept_pages: pages of rows that rank 0 may keep."""

    def __init__(self, model: BlockModel, head: Weight, ops: Ops, candidates: int, kept_pages: int) -> None:
        self.config = model.config
        self.name = model.config.kind
        self.most = model.config.drafts
        self.taps = Taps(layers=model.config.layers)
        self.planes = ()
        self._model = model
        self._steps = model.steps
        self._head = head
        self._ops = ops
        self._candidates = candidates
        self._numbers = count()
        self._contexts: dict[int, BlockContext] = {}
        self._closed: list[int] = []
        self._pages = RingPages(kept_pages)

    # ---- rank 0, which alone chooses drafts

    def open(self, stream: Stream) -> BlockText:
        return BlockText(next(self._numbers))

    def close(self, context: BlockText) -> None:
        """The other ranks learn of it with the next rows."""
        self._contexts.pop(context.number, None)
        self._closed.append(context.number)

    def skip(self, context: BlockText, tokens: Sequence[int]) -> None:
        """Before a prompt's first row is read: what was kept of such a text is found when that happens."""
        context.names.add(tokens)
        context.skipped = context.skipped or bool(tokens)

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        starts = [fact for part in kept for fact in self._start(part.context)]
        saves = [fact for part in kept for fact in self._save(part.context)]
        parts = [(part.context.number, part.start, part.start + len(part.tokens)) for part in kept]
        for part in kept:
            part.context.names.add(part.tokens)
        facts: dict[str, Fact] = {
            "starts": starts,
            "saves": saves,
            "parts": [number for part in parts for number in part],
            "closed": self._closed,
        }
        with self._steps.lead(Message("block_extend", facts), tuple):
            self._closed = []
            self._keep(starts, saves)
            self._extend(parts, passed)

    def _start(self, text: BlockText) -> list[int]:
        """For a stream whose last rows were skipped: number, length, first row that is known again, page of the first
        one that is kept, how many these are, and where each is."""
        if not text.skipped:
            return []
        names, length = text.names.names, text.names.length
        found = self._pages.find(names, pages_of_window(self.config), page_rows(self.config))
        text.skipped, text.first, text.kept = False, length, len(names)
        if found:
            text.first = max(found[0].first, length - self.config.window)
        page = found[0].page if found else 0
        return [text.number, length, text.first, page, len(found), *(kept.place for kept in found)]

    def _save(self, text: BlockText) -> list[int]:
        """What to keep of a stream whose reply has begun: (number, page, place) of every page of which its rings hold
        something. Of a prompt's middle nothing is kept: who resumes there has enough left to read."""
        if not text.asked:
            return []
        names, oldest = text.names.names, max(text.first, text.names.length - self.config.window)
        pages = range(max(text.kept, oldest // PAGE), len(names))
        text.kept = len(names)
        kept = [one for page in pages for one in self._pages.keep(names, page, max(oldest, self._first(page)))]
        return [fact for one in kept for fact in (text.number, one.page, one.place)]

    def _first(self, page: int) -> int:
        """The first row of a page that is ever of use."""
        return (page + 1) * PAGE - page_rows(self.config)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        numbers, pending = [ask.context.number for ask in asks], [ask.pending for ask in asks]
        for ask in asks:
            ask.context.asked = True
        message = Message("block_fill", {"numbers": numbers, "pending": pending})
        with self._steps.lead(message, lambda: self._model.exchanges(len(numbers))):
            used, logits = self._fill(numbers, pending)
        ids, values = best_candidates(logits, self._candidates)
        drafts = []
        for number, ask in enumerate(asks):
            slots = slice(number * self.most, (number + 1) * self.most)
            drafts.append(self._walk(ask, used[number], ids[slots], values[slots]))
        return drafts

    # ---- other ranks

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        def extend(message: Message) -> None:
            for number in message.integers("closed"):
                self._contexts.pop(number, None)
            numbers, passed = message.integers("parts"), model.followed
            assert passed is not None, "rows are read after they went through the model"
            self._keep(message.integers("starts"), message.integers("saves"))
            self._extend(_threes(numbers), passed)

        def fill(message: Message) -> None:
            self._fill(message.integers("numbers"), message.integers("pending"))

        def meetings(message: Message) -> list[Exchange]:
            return self._model.exchanges(len(message.integers("numbers")))

        steps = self._steps
        return {"block_extend": steps.follow(extend, lambda _: ()), "block_fill": steps.follow(fill, meetings)}

    # ---- all ranks

    def _context(self, number: int) -> BlockContext:
        if number not in self._contexts:
            self._contexts[number] = self._model.open(number)
        return self._contexts[number]

    @torch.inference_mode()
    def _keep(self, starts: Sequence[int], saves: Sequence[int]) -> None:
        """What `_start` and `_save` say."""
        at = 0
        while at < len(starts):
            number, length, first, page, count = starts[at : at + 5]
            places = starts[at + 5 : at + 5 + count]
            self._model.start(self._context(number), length, first, list(enumerate(places, page)))
            at += 5 + count
        for number, page, place in _threes(saves):
            self._model.keep(self._context(number), page, place)

    @torch.inference_mode()
    def _extend(self, kept: Sequence[tuple[int, int, int]], passed: Passed) -> None:
        """kept: a stream's number, and (start, stop) of its rows in the window."""
        streams = [passed.streams[layer] for layer in self.taps.layers]
        parts = []
        for number, start, stop in kept:
            context = self._context(number)
            skipped = max(0, stop - start - self.config.window)
            context.length += skipped
            parts.append((context, torch.cat([stream[start + skipped : stop] for stream in streams], dim=1)))
        self._model.extend(parts)

    @torch.inference_mode()
    def _fill(self, numbers: Sequence[int], pending: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [streams, most, hidden] of the slots that draft, and their logits [streams * most, vocabulary]."""
        asked = [(self._context(number), token) for number, token in zip(numbers, pending, strict=True)]
        used = self._model.fill(asked)[:, self.config.block_size - self.most :]
        return used, self._model.vocabulary.logits(self._ops, self._head, used.flatten(0, 1))

    # ---- choosing

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


def _threes(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]


class Scorer(ABC):
    """Scores of one block's candidates."""

    @abstractmethod
    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        """Scores float64 [n] of the candidates ids [n] with logits values [n] after the token `before`, and how sure
        the drafter is of this slot, if it has a head for that."""


class Table:
    """A table [n, width] of any float dtype whose rows are wanted as float32, a few at a time. bfloat16 is read as
    words: numpy has no such type."""

    def __init__(self, table: torch.Tensor) -> None:
        self._words = table.dtype == torch.bfloat16
        self._table = (table.view(torch.int16) if self._words else table).numpy()
        if self._words:
            self._table = self._table.view(np.uint16)

    def __getitem__(self, ids: np.ndarray | int) -> np.ndarray:
        rows = self._table[ids]
        if not self._words:
            return rows.astype(np.float32)
        return np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
