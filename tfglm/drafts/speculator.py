"""Drafting for all streams of an engine: asks the drafters, lets the policy choose, tells them what was kept.

Nothing here can change a reply: what is proposed is verified. Nothing here can end one either: whatever a drafter
raises or proposes beyond the rules turns drafting off for good, with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import Stream
from tfglm.drafts.base import NO_DRAFT, Ask, Draft, Drafter, Draw, Kept
from tfglm.drafts.copy import CopyCorpus, CopyIndex, trusted
from tfglm.drafts.policy import Policy, Record
from tfglm.errors import RanksError
from tfglm.models.taps import Passed, Taps

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Lane:
    """What drafting knows of one stream. proposed: this round's draft before the policy cut it to `verified` tokens;
    drafted: the model's own, if it was asked. counts: per source, tokens verified and tokens kept."""

    index: CopyIndex | None
    context: Any
    record: Record
    proposed: Draft = NO_DRAFT
    verified: int = 0
    drafted: Draft = NO_DRAFT
    counts: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One stream in a round. room: tokens that a draft may have. draw: a fresh one for every path that is drafted."""

    lane: Lane
    pending: int
    room: int
    draw: Callable[[], Draw]


@dataclass(frozen=True)
class Outcome:
    """What became of a turn: the rows that were kept (the pending token and the right drafts) from row `start` of the
    window, and the target's tokens, one for each of them."""

    lane: Lane
    kept: Sequence[int]
    start: int
    targets: Sequence[int]


class Speculator:
    """Copies and at most one model. corpus: replies of other requests to copy from as well. vocab_size: ids that may be
    proposed. One thread at a time."""

    def __init__(
        self, drafter: Drafter | None, policy: Policy, *, copy: bool, vocab_size: int, corpus: CopyCorpus | None = None
    ) -> None:
        self.slots: dict[tuple[str, int], list[int]] = {}
        """Per source and slot of a draft: tokens verified, tokens kept. Only ever grows."""
        self.when_off: Callable[[], None] | None = None
        """Called when a drafter has failed: from then on its rows are missing in what is read."""
        self._drafter = drafter
        self._policy = policy
        self._copy = copy
        self._corpus = corpus
        self._vocab_size = vocab_size
        self._on = True

    @property
    def on(self) -> bool:
        """False once a drafter failed."""
        return self._on

    @property
    def taps(self) -> Taps:
        """What to hand out of every forward. The same once drafting is off: windows were captured with it, and others
        would have to be while replies are written."""
        return self._drafter.taps if self._drafter else Taps()

    @property
    def planes(self) -> Sequence[LayerPlanes]:
        """What the model caches in the trunk's pages."""
        return self._drafter.planes if self._drafter else ()

    def open(self, stream: Stream, *, sampled: bool, copies: bool = True) -> Lane | None:
        """The lane of a new stream; None when drafting is off. copies False: nothing is to be copied in it."""
        return self._guard("opening a stream", lambda: self._open(stream, sampled, copies), None)

    def skip(self, lane: Lane, tokens: Sequence[int]) -> None:
        """A part of a stream's prompt did not go through the model, because its rows were kept."""
        self._guard("skipping a part of a prompt", lambda: self._skip(lane, tokens), None)

    def read(self, lane: Lane, tokens: Sequence[int], passed: Passed) -> None:
        """A chunk of a stream's prompt went through the model, as the whole of a window."""
        self._guard("reading a prompt", lambda: self._read(lane, tokens, passed), None)

    def propose(self, turns: Sequence[Turn], streams: int) -> list[tuple[int, ...]]:
        """Tokens to verify after each turn's pending token. streams: how many share the window, undrafted ones too."""
        nothing: list[tuple[int, ...]] = [()] * len(turns)
        return self._guard("proposing", lambda: self._propose(turns, streams), nothing)

    def settle(self, outcomes: Sequence[Outcome], passed: Passed, *, streams: int, rows: int, tokens: int) -> None:
        """A round of `rows` rows of `streams` streams gave `tokens` tokens in all; outcomes of those that drafted, in
        the order of the window."""
        self._guard("learning from a round", lambda: self._settle(outcomes, passed, streams, rows, tokens), None)

    def close(self, lane: Lane) -> None:
        self._guard("closing a stream", lambda: self._close(lane), None)

    def end(self) -> None:
        """No more rounds will come: what was learned goes where the next start finds it."""
        self._guard("keeping what was learned", self._policy.end, None)

    def _guard(self, doing: str, action: Callable[[], T], otherwise: T) -> T:
        """What action returns; `otherwise` if drafting is off or the action fails, which turns it off."""
        if not self._on:
            return otherwise
        try:
            return action()
        except RanksError:  # the ranks are lost, not the drafter alone
            raise
        except Exception as error:
            self._on = False
            log.warning(
                "W_DRAFTER: %s failed (%s: %s); drafting is off until the server restarts, replies go on one token at "
                "a time",
                doing,
                type(error).__name__,
                error,
                exc_info=True,
            )
            if self.when_off:
                self.when_off()
            return otherwise

    def _open(self, stream: Stream, sampled: bool, copies: bool) -> Lane:
        context = self._drafter.open(stream) if self._drafter else None
        return Lane(CopyIndex(self._corpus) if self._copy and copies else None, context, self._policy.record(sampled))

    def _close(self, lane: Lane) -> None:
        if lane.index:
            lane.index.close()
        if self._drafter:
            self._drafter.close(lane.context)

    def _skip(self, lane: Lane, tokens: Sequence[int]) -> None:
        if lane.index:
            lane.index.skip_prompt(tokens)
        if self._drafter:
            self._drafter.skip(lane.context, tokens)

    def _read(self, lane: Lane, tokens: Sequence[int], passed: Passed) -> None:
        if lane.index:
            lane.index.read_prompt(tokens)
        if self._drafter:
            self._drafter.read([Kept(lane.context, tokens, 0)], passed)

    def _propose(self, turns: Sequence[Turn], streams: int) -> list[tuple[int, ...]]:
        copies = [turn.lane.index.propose(turn.pending, turn.room) if turn.lane.index else NO_DRAFT for turn in turns]
        asked = [
            turn.room > 0 and not trusted(copied) and self._policy.asks_model(turn.lane.record)
            for turn, copied in zip(turns, copies, strict=True)
        ]
        drafts = iter(self._ask([turn for turn, wanted in zip(turns, asked, strict=True) if wanted], streams))
        for turn, copied, wanted in zip(turns, copies, asked, strict=True):
            lane = turn.lane
            lane.drafted = next(drafts) if wanted and self._drafter else NO_DRAFT
            after = NO_DRAFT
            if lane.index and lane.drafted.tokens:
                after = lane.index.propose_after(lane.drafted, turn.room)
            lane.proposed = self._policy.choose(copied, lane.drafted, after, lane.record, streams)
            self._check(lane.proposed, turn.room)
        lanes = [turn.lane for turn in turns]
        lengths = self._policy.lengths([(lane.proposed, lane.record) for lane in lanes], streams)
        for lane, length in zip(lanes, lengths, strict=True):
            lane.verified = length
        return [lane.proposed.tokens[: lane.verified] for lane in lanes]

    def _ask(self, turns: Sequence[Turn], streams: int) -> list[Draft]:
        drafter = self._drafter
        if drafter is None or not turns:
            return []

        def worth(record: Record, confidence: Sequence[float]) -> bool:
            return self._policy.goes_on(drafter.name, confidence, record, streams)

        return drafter.propose(
            [
                Ask(
                    context=turn.lane.context,
                    pending=turn.pending,
                    room=turn.room,
                    draw=turn.draw(),
                    go_on=partial(worth, turn.lane.record),
                    sampled=turn.lane.record.sampled,
                )
                for turn in turns
            ]
        )

    def _check(self, draft: Draft, room: int) -> None:
        if len(draft.tokens) > room or len(draft.tokens) != len(draft.confidence):
            raise ValueError(
                f"{draft.source} proposed {len(draft.tokens)} tokens with {len(draft.confidence)} confidences; there "
                f"is room for {room}"
            )
        if not all(0 <= token < self._vocab_size for token in draft.tokens):
            raise ValueError(f"{draft.source} proposed {draft.tokens}; token ids are 0 to {self._vocab_size - 1}")

    def _settle(self, outcomes: Sequence[Outcome], passed: Passed, streams: int, rows: int, tokens: int) -> None:
        made = max((len(outcome.lane.drafted.tokens) for outcome in outcomes), default=0)
        self._policy.spent(streams, rows, tokens, made)
        for outcome in outcomes:
            self._learn(outcome, streams)
        if self._drafter and outcomes:
            self._drafter.read([Kept(o.lane.context, o.kept, o.start) for o in outcomes], passed)

    def _learn(self, outcome: Outcome, streams: int) -> None:
        lane, right = outcome.lane, len(outcome.kept) - 1
        if lane.index:
            lane.index.add(outcome.kept[1:])
        drafts = {draft.source: draft for draft in (lane.drafted, lane.proposed)}
        for draft in drafts.values():
            self._policy.settle(draft, outcome.targets, lane.record)
        if lane.drafted.tokens:
            used = lane.proposed.source in (lane.drafted.source, "agreed")
            verified, kept = (lane.verified, right) if used else (0, 0)
            self._policy.settle_model(len(lane.drafted.tokens), verified, kept, lane.record, streams)
        for slot in range(lane.verified):
            _count(self.slots.setdefault((lane.proposed.source, slot), [0, 0]), 1, int(slot < right))
        if lane.verified:
            _count(lane.counts.setdefault(lane.proposed.source, [0, 0]), lane.verified, right)
        lane.proposed, lane.verified, lane.drafted = NO_DRAFT, 0, NO_DRAFT


def _count(pair: list[int], verified: int, kept: int) -> None:
    pair[0] += verified
    pair[1] += kept
