"""Between kept pages and the disk: writes in the background, reads ahead of whoever waits for them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from tfglm.cache.disk import AHEAD, READERS, PageStore
from tfglm.cache.kept import Block, KeptStates
from tfglm.cache.latent import LayerPlanes

log = logging.getLogger(__name__)

TURN_S = 0.02
"""How long a turn of the engine waits for a page; replies that are being written go on in between."""
READ_LIMIT_S = 5.0
"""A page that a disk does not deliver in this time is computed instead."""
CLOSE_LIMIT_S = 30.0
"""What may be written yet when the server stops; the rest is forgotten."""


class Pages:
    """A page of the cache as bytes: every layer's rows of it, latent, rotary and index.

    On a GPU `read` copies on a stream of its own: it waits for what was launched before it, and nothing that is
    launched after it waits for its copies. One thread at a time.
    """

    def __init__(self, layers: Sequence[LayerPlanes]) -> None:
        planes = (plane for layer in layers for plane in (layer.latent, layer.rope, layer.index))
        self._planes = [plane for plane in planes if plane is not None]
        self.nbytes = sum(plane[0].nbytes for plane in self._planes)
        self.device = self._planes[0].device
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._pinned = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)

    def read(self, page: int) -> bytearray:
        data = bytearray(self.nbytes)
        whole = torch.frombuffer(data, dtype=torch.uint8)
        if self._stream is None:
            self._copy(page, whole)
            return data
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(page, self._pinned)
        self._stream.synchronize()
        whole.copy_(self._pinned)
        return data

    def write(self, page: int, data: bytearray) -> None:
        for part, plane in self._parts(torch.frombuffer(data, dtype=torch.uint8)):
            rows = plane[page]
            rows.copy_(part.view(rows.dtype).view(rows.shape))

    def _copy(self, page: int, whole: torch.Tensor) -> None:
        for part, plane in self._parts(whole):
            part.copy_(plane[page].contiguous().view(torch.uint8).view(-1), non_blocking=True)

    def _parts(self, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the bytes beside the planes they belong to."""
        return list(zip(whole.split([plane[0].nbytes for plane in self._planes]), self._planes, strict=True))


class Readers:
    """Threads that read pages, and how many pages they were sent for that nobody has taken yet."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(READERS, "disk-read")
        self.ahead = 0


class PageLateError(Exception):
    """A page has not come yet."""


class Fetch:
    """Pages on their way from the disk, in order. `next` gives one, the same until it is `taken`; None means that the
    rest is to be computed.

    All fetches together read AHEAD pages before they are asked for, and one that is waited for.
    """

    def __init__(self, store: PageStore, keys: Sequence[bytes], readers: Readers) -> None:
        self._store, self._readers = store, readers
        self._keys = deque(keys)
        self._coming: deque[Future[bytearray | None]] = deque()
        self._waiting_since: float | None = None
        self._read_ahead()

    @property
    def left(self) -> int:
        return len(self._keys) + len(self._coming)

    def next(self) -> bytearray | None:
        """Raises PageLateError while a page is to be asked for again."""
        if not self._coming and self._keys:
            self._send()
        if not self._coming:
            return None
        try:
            page = self._coming[0].result(TURN_S)
        except FutureTimeoutError:
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            if now - self._waiting_since < READ_LIMIT_S:
                raise PageLateError from None
            log.warning("W_DISK_CACHE: a page was not read within %.0f s; it is computed instead", READ_LIMIT_S)
            page = None
        except Exception as error:  # no memory for it, for one: no reason to end the reply
            log.warning("W_DISK_CACHE: a page could not be read (%s: %s); it is computed instead", _name(error), error)
            page = None
        self._waiting_since = None
        if page is None:
            self.close()
        return page

    def taken(self) -> None:
        """What `next` gave is in the cache: on to the page after it."""
        self._coming.popleft()
        self._readers.ahead -= 1
        self._read_ahead()

    def close(self) -> None:
        self._keys.clear()
        self._readers.ahead -= len(self._coming)
        for future in self._coming:
            future.cancel()
        self._coming.clear()

    def _read_ahead(self) -> None:
        while self._keys and self._readers.ahead < AHEAD:
            self._send()

    def _send(self) -> None:
        self._coming.append(self._readers.pool.submit(self._store.read, self._keys.popleft()))
        self._readers.ahead += 1


class DiskTier:
    """Writes every page that becomes kept, from a thread of its own: the engine only names it."""

    def __init__(self, kept: KeptStates, pages: Pages, store: PageStore) -> None:
        self.pages = pages
        self._kept, self._store = kept, store
        self._readers = Readers()
        self._named: queue.SimpleQueue[Block | list[bytes] | None] = queue.SimpleQueue()
        self._broken = False
        kept.write_away = self._write_later
        self._writer = threading.Thread(target=self._run, name="disk-write", daemon=True)
        self._writer.start()

    def fetch(self, keys: Sequence[bytes]) -> Fetch | None:
        """The pages that the disk has of a text whose pages these are, from the first one on; None if it has none."""
        count = self._stored(keys)
        return self._fetch(keys[:count]) if count else None

    def put(self, fetch: Fetch, page: int, data: bytearray) -> bool:
        """Put what a fetch gave into a page of the cache. False: it is of no use, and neither is what follows. Raises
        PageLateError where it is to be put again later."""
        self.pages.write(page, data)
        return True

    def used(self, keys: Sequence[bytes]) -> None:
        """A text whose pages these are was used, here or in memory."""
        self._named.put(list(keys))

    def close(self) -> None:
        """Write what was named so far, as far as there is time, then end."""
        self._named.put(None)
        self._writer.join(CLOSE_LIMIT_S)
        self._broken = True
        self._writer.join(READ_LIMIT_S)
        self._readers.pool.shutdown(cancel_futures=True)
        self._store.close()

    def _write_later(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._named.put(block)

    def _stored(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys the disk has."""
        return next((n for n, key in enumerate(keys) if key not in self._store), len(keys))

    def _fetch(self, keys: Sequence[bytes]) -> Fetch:
        return Fetch(self._store, keys, self._readers)

    def _run(self) -> None:
        while (item := self._named.get()) is not None:
            if isinstance(item, list):
                self._store.touch(item)
            else:
                self._write(item)
                self._kept.written(item)

    def _write(self, block: Block) -> None:
        """Write a page unless it is there already, or was dropped because a reply needed the room."""
        if self._broken or block.key in self._store:
            return
        held = self._kept.borrow(block.key)
        if held is None:
            return
        before = block.parent.key if block.parent is not None else self._kept.root
        try:
            try:
                page = self.pages.read(held.page)
            finally:
                self._kept.release([held])
            self._store.write(block.key, before, page)
        except Exception as error:  # whatever it is, the thread goes on: pages wait for it, and its queue only grows
            self._broken = True
            log.warning(
                "W_DISK_CACHE: writing failed (%s: %s); nothing more is written until the server restarts",
                _name(error),
                error,
            )


def _name(error: Exception) -> str:
    return type(error).__name__
