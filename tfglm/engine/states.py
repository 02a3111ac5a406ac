"""Prompt states that outlive their requests: what a new prompt need not read again, and what of a reply is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from tfglm.cache.kept import KeptStates
from tfglm.cache.pages import Stream
from tfglm.cache.tier import DiskTier, Fetch, PageLateError
from tfglm.engine.reply import Reply

log = logging.getLogger(__name__)

RESTORE_BYTES = 64 << 20
"""What is copied from the disk's pages in one turn: some 30 ms, less than a chunk of a prompt takes."""


class PromptStates:
    """Without `kept` nothing is kept and every prompt is read from its start; `disk` keeps more, and across restarts.
    replies: keep the rows of replies too, which needs a model that decodes a row as it reads it (decodes_alike): a
    prompt that goes on from them must get the reply of one that was read whole.
    Used by the engine's thread alone, but for `keys`."""

    def __init__(self, kept: KeptStates | None = None, disk: DiskTier | None = None, *, replies: bool = True) -> None:
        self._kept = kept
        self._replies = replies
        self._disk = disk
        self._fetches: dict[Reply, Fetch] = {}

    @property
    def pages(self) -> int:
        """Pages that are kept, whether a reply reads them or not."""
        return self._kept.pages if self._kept else 0

    def keys(self, prompt: Sequence[int] | np.ndarray) -> list[bytes]:
        """A reply's page_keys. Any thread may call it: it takes its time for a long prompt."""
        return self._kept.keys(prompt) if self._kept else []

    def find(self, reply: Reply) -> None:
        """Hold the kept pages that a waiting reply's prompt begins with, besides those that it holds already: it waits
        at every turn, and the walk over a long prompt's pages is not made again."""
        if self._kept:
            reply.reused += self._kept.find(self._useful(reply)[len(reply.reused) :])

    def _useful(self, reply: Reply) -> list[bytes]:
        """Of the pages that a prompt may begin with. Its last token is always read: the logits that follow it are not
        kept. Neither are those that prompt_logprobs asks for, so such a prompt is read whole."""
        if self._kept is None or reply.request.prompt_logprobs is not None:
            return []
        return reply.page_keys[: (len(reply.request.prompt) - 1) // self._kept.page_tokens]

    def drop(self, pages: int) -> None:
        """Make room for a reply: give up to `pages` kept pages to the pool."""
        if self._kept:
            self._kept.drop(pages)

    def begin(self, reply: Reply, stream: Stream) -> None:
        """Put the pages that `find` holds at the start of an empty stream, and send for those that the disk has."""
        if self._kept and reply.reused:
            self._kept.lend(stream, reply.reused)
            reply.reused = []
        if self._disk and (keys := self._useful(reply)):
            self._disk.used(keys)
            fetch = self._disk.fetch(keys[len(stream.pages) :])
            if fetch is not None:
                self._fetches[reply] = fetch

    def restore(self, reply: Reply) -> int | None:
        """Put the next pages from the disk into a reply's stream, as many as a turn may take; how many tokens these
        are. 0: the prompt is to be read from here on. None: the disk takes its time."""
        fetch, stream = self._fetches.get(reply), reply.stream
        if fetch is None or self._disk is None or stream is None:
            return 0
        start, most = stream.length, max(1, RESTORE_BYTES // self._disk.pages.nbytes)
        while stream.length - start < most * stream.pool.page_tokens:
            try:
                page = fetch.next()
            except PageLateError:
                return stream.length - start or None
            if page is None:
                break
            stream.pages += stream.pool.take(1)
            try:
                useful = self._disk.put(fetch, stream.pages[-1], page)
            except PageLateError:
                stream.release_spare()
                return stream.length - start or None
            if not useful:
                stream.release_spare()
                fetch.close()
                break
            fetch.taken()
            stream.length += stream.pool.page_tokens
        if not fetch.left:
            del self._fetches[reply]
        return stream.length - start

    def read(self, reply: Reply) -> None:
        """A part of a prompt was read: keep its whole pages, so that others share them at once. Not of a reply that
        failed: its logits may have been the last of rows that are no numbers either."""
        if self._kept and reply.stream is not None and reply.failure is None:
            reply.promised -= self._kept.keep(reply.stream, reply.page_keys[: reply.read // self._kept.page_tokens])

    def finished(self, reply: Reply) -> None:
        """A reply is over, and its pages are promised to nobody else yet: keep the whole pages of prompt and reply."""
        if self._kept and self._replies and reply.stream is not None and reply.failure is None:
            known = reply.page_keys[: reply.read // self._kept.page_tokens]
            prompt, cached = (
                reply.request.prompt[len(known) * self._kept.page_tokens :],
                min(reply.cached, reply.stream.length),
            )
            text = [*prompt, *reply.tokens][: cached - len(known) * self._kept.page_tokens]
            keys = known + self._kept.keys(text, known[-1] if known else None)
            self._kept.keep(reply.stream, keys)

    def write_no_more(self) -> None:
        """Pages lack a drafter's rows from now on. In memory nobody misses them, for the drafter has ended; on the disk
        the next start's would. What is there already is still read."""
        if self._disk and self._kept and self._kept.write_away:
            self._kept.write_away = None
            log.warning(
                "W_DISK_CACHE: no further states of prompts are written until the server restarts: they would lack the "
                "rows of the drafter that failed"
            )

    def end(self, reply: Reply) -> None:
        """A reply's stream is about to close."""
        fetch = self._fetches.pop(reply, None)
        if fetch is not None:
            fetch.close()
        if self._kept:
            self._kept.release(reply.reused)
            reply.reused = []
            if reply.stream is not None:
                self._kept.part(reply.stream)

    def close(self) -> None:
        """The engine has ended: bring what was kept to the disk."""
        if self._disk:
            self._disk.close()
