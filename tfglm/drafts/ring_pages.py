"""Which rows of block drafters' rings outlive their streams, so that a prompt that resumes is drafted for at once.

A prompt state brings the trunk's rows of a prompt without reading them, so a drafter that reads the trunk's streams
would know nothing of it. Its own rows are kept page by page, under names that stand for the text up to a page's end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfglm.cache.pages import PAGE


@dataclass(frozen=True)
class KeptPage:
    """A page of a text, where its rows are kept, and the first row of them that was known."""

    page: int
    place: int
    first: int


class PageNames:
    """Names of the whole pages of a text that grows: alike for alike beginnings."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.length = 0
        self._rest: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)
        self._rest += tokens
        whole = len(self._rest) // PAGE * PAGE
        for start in range(0, whole, PAGE):
            page = np.array(self._rest[start : start + PAGE], np.int64).tobytes()
            before = self.names[-1] if self.names else b""
            self.names.append(hashlib.blake2b(before + page, digest_size=16).digest())
        self._rest = self._rest[whole:]


class RingPages:
    """The book of `places` kept pages; those that went unused longest make way. Who has the rows does what it says."""

    def __init__(self, places: int) -> None:
        self._free = list(range(places))
        self._kept: OrderedDict[bytes, KeptPage] = OrderedDict()

    def find(self, names: Sequence[bytes], most: int, whole: int) -> list[KeptPage]:
        """The last pages of a text, up to `most` of them, the oldest first. Only the oldest may lack rows: a page's
        last `whole` are all of it."""
        found: list[KeptPage] = []
        for name in reversed(names[max(0, len(names) - most) :]):
            kept = self._kept.get(name)
            if kept is None:
                break
            self._kept.move_to_end(name)
            found.insert(0, kept)
            if kept.first > (kept.page + 1) * PAGE - whole:
                break
        return found

    def keep(self, names: Sequence[bytes], page: int, first: int) -> list[KeptPage]:
        """Where to put a page of a text that is known from row `first` on; nothing if as much of it is there already,
        or there is no room at all."""
        name = names[page]
        known = self._kept.pop(name, None)
        if known is not None and known.first <= first:
            self._kept[name] = known
            return []
        if known is not None:
            place = known.place
        elif self._free:
            place = self._free.pop()
        elif self._kept:
            place = self._kept.popitem(last=False)[1].place
        else:
            return []
        self._kept[name] = KeptPage(page, place, first)
        return [self._kept[name]]
