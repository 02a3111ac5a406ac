"""The engine's side of drafting: which replies draft, what they propose, what was kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tfglm.cache.latent import LayerPlanes
from tfglm.drafts.speculator import Lane, Outcome, Speculator, Turn
from tfglm.engine.api import DraftCount
from tfglm.engine.reply import Reply
from tfglm.models.taps import Passed, Taps


@dataclass(frozen=True)
class Drawn:
    """What a round gave one reply: the tokens drawn, and the row of the window its pending token was fed to."""

    reply: Reply
    tokens: Sequence[int]
    start: int


class Drafting:
    """Without a speculator nothing is drafted. noise: weight of the target's noise in the choice of drafts."""

    def __init__(self, speculator: Speculator | None = None, noise: float = 1.0) -> None:
        self._speculator = speculator
        self._noise = noise
        self._lanes: dict[Reply, Lane] = {}

    @property
    def taps(self) -> Taps:
        """What to hand out of every forward."""
        return self._speculator.taps if self._speculator else Taps()

    @property
    def planes(self) -> Sequence[LayerPlanes]:
        """What is cached for drafts in the pages of the model's cache."""
        return self._speculator.planes if self._speculator else ()

    def when_incomplete(self, call: Callable[[], None]) -> None:
        """Have `call` run once pages are read without what `planes` cache of them."""
        if self._speculator and self.planes:
            self._speculator.when_off = call

    @property
    def counts(self) -> tuple[DraftCount, ...]:
        """Drafts verified and kept since the start, by source and slot."""
        slots = self._speculator.slots.copy() if self._speculator else {}
        return tuple(
            DraftCount(source, drafted, kept, slot) for (source, slot), (drafted, kept) in sorted(slots.items())
        )

    def start(self, reply: Reply) -> None:
        """A reply left the queue; what its stream does not hold yet of its prompt will be read. So it is for a reply
        without drafts if others may begin with its pages and draft from them."""
        drafts = reply.request.draft and reply.request.max_tokens > 2
        if self._speculator and (drafts or self.planes):
            sampling = reply.request.sampling
            assert reply.stream is not None
            sampled = sampling.temperature > 0 and sampling.top_k != 1
            lane = self._speculator.open(reply.stream, sampled=sampled, copies=drafts)
            if lane is not None:
                self._lanes[reply] = lane
                self.skip(reply, reply.request.prompt[: reply.read])

    def skip(self, reply: Reply, tokens: Sequence[int]) -> None:
        """A part of a reply's prompt is not read, because its rows are there. It is copied from; a drafting model knows
        of it what it has kept itself."""
        if self._speculator and reply in self._lanes:
            self._speculator.skip(self._lanes[reply], tokens)

    def read(self, reply: Reply, tokens: Sequence[int], passed: Passed) -> None:
        """A chunk of a reply's prompt went through the model."""
        if self._speculator and reply in self._lanes:
            self._speculator.read(self._lanes[reply], tokens, passed)

    def propose(self, replies: Sequence[Reply]) -> list[Sequence[int]]:
        """Guesses at the tokens that follow each reply's pending one: at most as many as it has room for, less the one
        that every round gives anyway."""
        drafts: dict[Reply, Sequence[int]] = {}
        drafting = [reply for reply in replies if reply in self._lanes and reply.request.draft]
        if self._speculator and drafting:
            turns = [
                Turn(
                    self._lanes[reply],
                    reply.tokens[-1],
                    max(0, reply.room - 1),
                    partial(reply.guess, self._noise),
                )
                for reply in drafting
            ]
            drafts = dict(zip(drafting, self._speculator.propose(turns, len(replies)), strict=True))
        return [drafts.get(reply, ()) for reply in replies]

    def settle(self, drawn: Sequence[Drawn], passed: Passed, rows: int) -> None:
        """A round of `rows` rows is over."""
        if not self._speculator:
            return
        outcomes = []
        for one in drawn:
            if one.tokens and one.reply in self._lanes:
                before = len(one.reply.tokens) - len(one.tokens)
                kept = [one.reply.tokens[before - 1], *one.tokens[:-1]]
                outcomes.append(Outcome(self._lanes[one.reply], kept, one.start, one.tokens))
        total = sum(len(one.tokens) for one in drawn)
        self._speculator.settle(outcomes, passed, streams=len(drawn), rows=rows, tokens=total)

    def close(self, reply: Reply) -> None:
        """A reply is over: note in it whose drafts it kept."""
        lane = self._lanes.pop(reply, None)
        if self._speculator and lane is not None:
            reply.draft_counts = tuple(
                DraftCount(source, drafted, kept) for source, (drafted, kept) in sorted(lane.counts.items())
            )
            self._speculator.close(lane)

    def end(self) -> None:
        """The engine has ended."""
        if self._speculator:
            self._speculator.end()
