"""Prompt states on the disks of all ranks: each writes the pages of its own caches to its own disk, and a prompt goes
on from those that every rank has. No page travels between ranks."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from tfglm.cache.disk import AHEAD, PageStore
from tfglm.cache.kept import Block, KeptStates
from tfglm.cache.tier import CLOSE_LIMIT_S, DiskTier, Fetch, PageLateError, Pages, Readers
from tfglm.ops.group import Fact, Group, Message, together

log = logging.getLogger(__name__)

_LOST, _LATE, _READY = range(3)
"""How a rank's next page is: not to be had, not there yet, in memory."""


class RankedDiskTier(DiskTier):
    """Rank 0's: a DiskTier that tells the others what to write and what to bring back. The engine's thread calls it."""

    def __init__(self, kept: KeptStates, pages: Pages, store: PageStore, group: Group) -> None:
        super().__init__(kept, pages, store)
        self._group = group
        self._under_way: dict[int, Fetch] = {}
        self._begun = 0

    def fetch(self, keys: Sequence[bytes]) -> Fetch | None:
        """The pages that the disks of all ranks have."""
        count = self._stored(keys)
        if not count:
            return None
        self._under_way = {number: fetch for number, fetch in self._under_way.items() if fetch.left}
        self._begun += 1
        facts: dict[str, Fact] = {"number": self._begun, "under_way": list(self._under_way)}
        with together(self._group, Message("disk_find", facts, _packed(keys[:count]))):
            count = least(self._group, count, self.pages.device)
        if not count:
            return None
        fetch = self._under_way[self._begun] = self._fetch(keys[:count])
        return fetch

    def put(self, fetch: Fetch, page: int, data: bytearray) -> bool:
        number = next(number for number, one in self._under_way.items() if one is fetch)
        with together(self._group, Message("disk_put", {"number": number, "page": page})):
            state = least(self._group, _READY, self.pages.device)
            if state == _READY:
                self.pages.write(page, data)
        if state == _LATE:
            raise PageLateError
        return state == _READY

    def used(self, keys: Sequence[bytes]) -> None:
        super().used(keys)
        with together(self._group, Message("disk_used", arrays=_packed(keys))):
            pass

    def _write_later(self, blocks: Sequence[Block]) -> None:
        """One message, however many they are: a long reply's are kept all at once when it ends."""
        befores = (block.parent.key if block.parent is not None else self._kept.root for block in blocks)
        keys = [key for pair in zip([block.key for block in blocks], befores, strict=True) for key in pair]
        with together(self._group, Message("disk_keep", {"pages": [block.page for block in blocks]}, _packed(keys))):
            super()._write_later(blocks)


class DiskFollower:
    """Another rank's side. What is to be written is copied at once, for the next forward may use the page again, and
    written by a thread of its own; with AHEAD pages on their way those after them are left out, and then no prompt goes
    on from them."""

    def __init__(self, pages: Pages, store: PageStore, group: Group) -> None:
        self._pages, self._store, self._group = pages, store, group
        self._readers = Readers()
        self._fetches: dict[int, Fetch] = {}
        self._to_write: queue.Queue[tuple[bytes, bytes, bytearray] | list[bytes] | None] = queue.Queue(AHEAD)
        self._broken = False
        self._writer = threading.Thread(target=self._run, name="disk-write", daemon=True)
        self._writer.start()

    def handlers(self) -> Mapping[str, Callable[[Message], None]]:
        return {
            "disk_keep": self._keep,
            "disk_find": self._find,
            "disk_put": self._put,
            "disk_used": self._used,
        }

    def close(self) -> None:
        """Write what was named so far, as far as there is time, then end."""
        try:
            self._to_write.put(None, timeout=CLOSE_LIMIT_S)
        except queue.Full:
            self._broken = True
        self._writer.join(CLOSE_LIMIT_S)
        self._readers.pool.shutdown(cancel_futures=True)
        self._store.close()

    def _keep(self, message: Message) -> None:
        keys = _keys(message)
        for page, key, before in zip(message.integers("pages"), keys[::2], keys[1::2], strict=True):
            if self._broken or self._to_write.full():
                return
            if key not in self._store:
                self._offer((key, before, self._pages.read(page)))

    def _used(self, message: Message) -> None:
        self._offer(_keys(message))

    def _find(self, message: Message) -> None:
        under_way = set(message.integers("under_way"))
        for number in [number for number in self._fetches if number not in under_way]:
            self._fetches.pop(number).close()
        keys = _keys(message)
        count = next((n for n, key in enumerate(keys) if key not in self._store), len(keys))
        count = least(self._group, count, self._pages.device)
        if count:
            [number] = message.integers("number")
            self._fetches[number] = Fetch(self._store, keys[:count], self._readers)

    def _put(self, message: Message) -> None:
        [number], [page] = message.integers("number"), message.integers("page")
        fetch = self._fetches[number]
        state, data = _LATE, None
        with contextlib.suppress(PageLateError):
            data = fetch.next()
            state = _LOST if data is None else _READY
        if least(self._group, state, self._pages.device) == _READY and data is not None:
            self._pages.write(page, data)
            fetch.taken()

    def _offer(self, item: tuple[bytes, bytes, bytearray] | list[bytes]) -> None:
        try:
            self._to_write.put_nowait(item)
        except queue.Full:
            log.debug("the disk is behind: a page is left out")

    def _run(self) -> None:
        while (item := self._to_write.get()) is not None:
            if isinstance(item, list):
                self._store.touch(item)
            elif not self._broken:
                self._write(*item)

    def _write(self, key: bytes, before: bytes, data: bytearray) -> None:
        try:
            self._store.write(key, before, data)
        except Exception as error:  # the thread goes on: handlers must not find its queue full for ever
            self._broken = True
            log.warning(
                "W_DISK_CACHE: writing failed (%s: %s); nothing more is written until this rank restarts",
                type(error).__name__,
                error,
            )


def least(group: Group, count: int, device: torch.device) -> int:
    """The smallest count of any rank."""
    return int(group.gather(torch.tensor([count], dtype=torch.int64, device=device)).min())


def _packed(keys: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """Keys of one length as an array of a message, uint8 [keys, bytes]: of a long text there are thousands."""
    joined = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)
    return {"keys": joined.view(len(keys), -1)}


def _keys(message: Message) -> list[bytes]:
    rows: torch.Tensor = message.arrays["keys"]
    return [row.tobytes() for row in rows.numpy()]
