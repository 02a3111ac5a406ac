"""Pages of finished prompts and replies, kept for whoever begins with the same tokens.

A page's key is a hash over its tokens and the key of the page before it, so equal keys mean equal text from the start.
What a page holds depends on that text alone (the bits of a row depend on nothing else), so a prompt that resumes on
kept pages goes on exactly as one that was read anew.

A page of the pool has one owner: a stream, or this. Streams read kept pages that are lent to them; a page in use, or
one that others follow, is not dropped.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfglm.cache.pages import PagePool, Stream


@dataclass(eq=False)
class Block:
    """A kept page. users: streams it is lent to, and whoever reads it to write it away; followers: kept pages right
    after it; pending: it waits for that."""

    key: bytes
    parent: Block | None
    page: int
    users: int = 0
    followers: int = 0
    pending: bool = False

    @property
    def idle(self) -> bool:
        """Whether nobody reads it and nothing follows it."""
        return not self.users and not self.followers


class KeptStates:
    """At most `budget` pages, the least recently used dropped first; more only while they wait to be written away, and
    then only as long as nobody else needs them. identity: of the model and all that decides the
    bits of its cache; part of every key.

    One thread at a time, but for `borrow`, `release` and `written`, which a writer of pages may call from its own.
    """

    def __init__(self, pool: PagePool, budget: int, identity: bytes = b"") -> None:
        self.write_away: Callable[[Sequence[Block]], None] | None = None
        """Called with pages that have become kept; `written` is to be called for each when that is done."""
        self.page_tokens = pool.page_tokens
        self._pool = pool
        self._budget = budget
        self._root = hashlib.blake2b(identity, digest_size=32).digest()
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._lent: dict[Stream, list[Block]] = {}
        self._lock = threading.Lock()

    @property
    def root(self) -> bytes:
        """What stands for the key before a text's first page."""
        return self._root

    @property
    def pages(self) -> int:
        """Pages that belong to no stream."""
        return len(self._blocks)

    def keys(self, tokens: Sequence[int] | np.ndarray, before: bytes | None = None) -> list[bytes]:
        """The keys of the whole pages of a text; `before`: the key of the page before it, if it is not the first."""
        raw = np.asarray(tokens, "<u4").tobytes()
        keys, key, size = [], self._root if before is None else before, 4 * self.page_tokens
        for start in range(0, len(raw) - size + 1, size):
            key = hashlib.blake2b(raw[start : start + size], key=key, digest_size=32).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[Block]:
        """The kept pages that a text begins with, held until they are released or lent."""
        with self._lock:
            found: list[Block] = []
            for key in keys:
                block = self._blocks.get(key)
                if block is None:
                    break
                found.append(block)
            for block in found:
                self._blocks.move_to_end(block.key)
                block.users += 1
            return found

    def release(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                block.users -= 1

    def written(self, block: Block) -> None:
        """A page need no longer wait."""
        with self._lock:
            block.pending = False

    def borrow(self, key: bytes) -> Block | None:
        """A kept page, held until it is released; None if it was dropped."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                block.users += 1
            return block

    def lend(self, stream: Stream, blocks: Sequence[Block]) -> None:
        """Begin an empty stream with pages that `find` found."""
        stream.lend([block.page for block in blocks])
        stream.length = len(blocks) * self.page_tokens
        self._lent[stream] = list(blocks)

    def keep(self, stream: Stream, keys: Sequence[bytes]) -> int:
        """Take over a stream's first pages, whose keys these are, as far as the budget allows; the stream goes on to
        read them. Returns how many pages changed hands."""
        lent = self._lent.setdefault(stream, [])
        parent: Block | None = None
        kept: list[Block] = []
        with self._lock:
            for key, page in zip(keys, stream.pages, strict=False):
                block = self._blocks.get(key)
                if block is None:
                    if not self._make_room(parent):
                        break
                    block = Block(key, parent, page, users=1, pending=self.write_away is not None)
                    if parent is not None:
                        parent.followers += 1
                    self._blocks[key] = block
                    stream.lent.add(page)
                    lent.append(block)
                    kept.append(block)
                parent = block
        if self.write_away and kept:
            self.write_away(kept)
        return len(kept)

    def part(self, stream: Stream) -> None:
        """A stream is about to close: it no longer reads what was lent to it."""
        self.release(self._lent.pop(stream, ()))

    def drop(self, pages: int) -> int:
        """Give up to `pages` pages back to the pool, whether they wait to be written or not; returns how many."""
        if pages <= 0:
            return 0
        with self._lock:
            # One walk for all of them: with half a million tokens in use, one for each would take a third of a second.
            blocks = list(self._blocks.values())
            places = {block.key: place for place, block in enumerate(blocks)}
            idle = [place for place, block in enumerate(blocks) if block.idle]  # ascending, and so a heap
            dropped = 0
            while idle and dropped < pages:
                block = blocks[heapq.heappop(idle)]
                self._forget(block)
                dropped += 1
                if block.parent is not None and block.parent.idle:
                    heapq.heappush(idle, places[block.parent.key])
            return dropped

    def _make_room(self, spare: Block | None) -> bool:
        """Whether one page more may be kept, after dropping what has to go but `spare`, which it will follow."""
        while len(self._blocks) >= self._budget:
            if not self._drop_one(spare):
                return self.write_away is not None
        return True

    def _drop_one(self, spare: Block | None) -> bool:
        """Drop the least recently used page that is idle and does not wait to be written."""
        for block in self._blocks.values():
            if block.idle and block is not spare and not block.pending:
                self._forget(block)
                return True
        return False

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.followers -= 1
        self._pool.give([block.page])
