"""Who waits, who runs, and what the model does next. Plain state: no thread, no clock, no model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tfglm.cache.pages import PAGE, pages_for
from tfglm.engine.api import QueueFullError
from tfglm.engine.reply import Reply
from tfglm.engine.states import PromptStates

RETRY_AFTER_S = 5


@dataclass(frozen=True)
class Plan:
    """One turn of the engine, to be carried out in this order."""

    dropped: list[Reply]
    """Cancelled: out of the queue or off the model."""
    admitted: list[Reply]
    """Left the queue: their streams are to be opened."""
    prompt: Reply | None
    """The reply whose prompt is read on, or None for a decode round."""
    decoding: list[Reply]
    """The replies of the decode round."""
    could_decode: bool
    """Whether any reply could decode, in this turn or instead of it."""


class Scheduler:
    """First come, first served, into `parallel` lanes over a cache of `pages` pages of `page_tokens` tokens.

    A request is admitted once the pages of its whole prompt and reply are free, less the kept ones it begins with, so
    that nothing runs out in the middle of a reply; it is never overtaken by a smaller one. Several prompts are read in
    turns.

    A prompt gets the share `prefill_share` of the time while others are decoding: a chunk of c seconds is followed by
    decode rounds of at least c * (1 - share) / share seconds, and by one round in any case.
    """

    def __init__(
        self,
        parallel: int,
        max_queued: int,
        pages: int,
        states: PromptStates,
        prefill_share: float = 1.0,
        page_tokens: int = PAGE,
    ) -> None:
        self.waiting: deque[Reply] = deque()
        self.running: list[Reply] = []
        self._pages = pages
        self._page_tokens = page_tokens
        self._states = states
        self._parallel = parallel
        self._max_queued = max_queued
        self._withdrawn: list[Reply] = []
        self._prefill_share = prefill_share
        self._owed_s = 0.0
        self._read_last = False

    @property
    def free_pages(self) -> int:
        """Pages that are neither promised to a running reply nor kept."""
        return self._pages - sum(reply.promised for reply in self.running) - self._states.pages

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._withdrawn)

    def add(self, reply: Reply) -> None:
        """Queue a reply. Raises QueueFullError when all lanes are taken and max_queued others wait."""
        if len(self.waiting) >= self._max_queued + self._parallel - len(self.running):
            raise QueueFullError(
                f"{len(self.running)} requests are running and {len(self.waiting)} waiting; the queue holds "
                f"{self._max_queued}",
                RETRY_AFTER_S,
            )
        self.waiting.append(reply)

    def withdraw(self, reply: Reply) -> None:
        """Mark a reply as cancelled; a waiting one frees its place in the queue at once."""
        reply.cancelled = True
        if reply in self.waiting:
            self.waiting.remove(reply)
            self._withdrawn.append(reply)

    def plan(self) -> Plan:
        """Decide the next turn. The replies it drops have left their lanes and given their pages back."""
        dropped = [*self._withdrawn, *(reply for reply in self.running if reply.cancelled)]
        self._withdrawn = []
        for reply in dropped:
            self.remove(reply)
        admitted = []
        while self.waiting and len(self.running) < self._parallel and self._promise(self.waiting[0]):
            reply = self.waiting.popleft()
            self.running.append(reply)
            admitted.append(reply)
        decoding = [reply for reply in self.running if not reply.reading]
        prompt = next((reply for reply in self.running if reply.reading), None)
        if prompt is not None and decoding and (self._read_last or self._owed_s > 0):
            prompt = None
        self._read_last = prompt is not None
        could_decode = bool(decoding)
        if prompt is not None:
            self.running.remove(prompt)
            self.running.append(prompt)
            decoding = []
        return Plan(dropped, admitted, prompt, decoding, could_decode)

    def took(self, plan: Plan, seconds: float) -> None:
        """A plan was carried out: what its chunk makes the prompts owe to those who decode, or its round pays back."""
        if not plan.could_decode:
            self._owed_s = 0.0
        elif plan.prompt is not None:
            self._owed_s += seconds * (1 - self._prefill_share) / self._prefill_share
        else:
            self._owed_s = max(0.0, self._owed_s - seconds)

    def _promise(self, reply: Reply) -> bool:
        """Set aside what a reply needs beside the kept pages it begins with; others are dropped for it. False if there
        is no room yet; it holds what was found until then."""
        self._states.find(reply)
        reply.promised = pages_for(reply.longest, self._page_tokens) - len(reply.reused)
        self._states.drop(reply.promised - self.free_pages)
        return reply.promised <= self.free_pages

    def remove(self, reply: Reply) -> None:
        """Free the lane and the pages of a reply that runs; anything else is left alone."""
        if reply in self.running:
            self.running.remove(reply)

    def clear(self) -> None:
        """Forget everyone."""
        self.waiting.clear()
        self.running.clear()
        self._withdrawn.clear()
