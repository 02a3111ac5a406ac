"""Who holds which page of the cache. A page is PAGE consecutive tokens of one stream, in every layer's planes alike;
over context-parallel ranks it is PAGE tokens of each."""

from __future__ import annotations

from tfglm.errors import MemoryShortError

PAGE = 256
"""Tokens a page; also the tile of keys the indexer scores at a time."""
GATHERED_PAGES = 64
"""Of each context-parallel rank, that a prompt's window takes in one gather."""


class PagePool:
    """The free pages. Used from one thread, that of the forward pass. ranks: those that a page's tokens are dealt out
    to, in turns."""

    def __init__(self, pages: int, ranks: int = 1) -> None:
        self.pages = pages
        self.page_tokens = PAGE * ranks
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, or MemoryShortError and none."""
        if count > self.free:
            raise MemoryShortError(
                f"the cache is full: {count * self.page_tokens} more tokens are needed, {self.free * self.page_tokens} "
                f"of {self.pages * self.page_tokens} are free; end a stream or give the cache more tokens"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


class Stream:
    """The cached tokens of one conversation: their number and their pages. Ends with `close`.

    lent: those of its pages that belong to someone else. They are read and never written, nor given to the pool.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.lent: set[int] = set()
        self.length = 0
        self.closed = False

    @property
    def pool(self) -> PagePool:
        return self._pool

    def missing_pages(self, length: int) -> int:
        """Pages to take before the stream can hold `length` tokens."""
        return max(0, pages_for(length, self.pool.page_tokens) - len(self.pages))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; pages that hold none of the rest become free. Raises ValueError."""
        if self.closed or not 0 <= length <= self.length:
            state = "closed" if self.closed else f"{self.length} tokens long"
            raise ValueError(f"cannot truncate a stream to {length} tokens: it is {state}")
        self.length = length
        self.release_spare()

    def lend(self, pages: list[int]) -> None:
        """Begin with pages that stay another's."""
        self.pages += pages
        self.lent.update(pages)

    def release_spare(self) -> None:
        """Give back the pages past the stream's length."""
        kept = pages_for(self.length, self._pool.page_tokens)
        self._pool.give([page for page in self.pages[kept:] if page not in self.lent])
        self.lent.difference_update(self.pages[kept:])
        del self.pages[kept:]

    def close(self) -> None:
        """Free every page. Closing again does nothing."""
        self.closed, self.length = True, 0
        self.release_spare()


class Follower(Stream):
    """A length of its own over another stream's pages, for further planes that have the same pages. It takes pages for
    the stream where it is ahead, and gives none back. Begins where the stream ends."""

    def __init__(self, leader: Stream) -> None:
        self._leader = leader
        self.length = leader.length
        self.closed = False

    @property
    def pool(self) -> PagePool:
        return self._leader.pool

    @property
    def pages(self) -> list[int]:
        return self._leader.pages

    @pages.setter
    def pages(self, pages: list[int]) -> None:
        self._leader.pages = pages

    def release_spare(self) -> None:
        """The stream does that, when it is cut."""

    def close(self) -> None:
        self.closed = True


def pages_for(tokens: int, page_tokens: int = PAGE) -> int:
    return -(-tokens // page_tokens)
