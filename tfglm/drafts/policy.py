"""How many drafts a round verifies, and whose.

The rule is that of a long-run rate: with R tokens a millisecond, a row is worth verifying if the probability that its
draft is kept is at least R times the milliseconds it adds (Dinkelbach's fixed point of tokens over time; the best
single round's ratio would draft too little or too much). R comes from the cost table and the tokens that were kept,
never from a clock, so that equal histories make equal decisions. Of several ranks rank 0 alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from tfglm.drafts.base import Draft
from tfglm.drafts.calibration import Calibration, Key
from tfglm.drafts.costs import Costs
from tfglm.drafts.learned import Learned

WINDOW_ROWS = 16
"""Rows of a window over all streams: the widest that kernels read in one tile."""

MEMORY = 0.98
"""Weight of the past in the long-run rate, a round: about 50 rounds."""

LONGEST_REST = 32
"""Rounds that a model which does not pay for itself is left alone before it is tried again."""

FIRST_GAIN = 0.2
"""What is expected of a model at first: enough to be heard for a few rounds."""

Survivals = list[float]
"""For each token of a draft, the probability that it and all before it are kept."""


@dataclass
class Record:
    """How drafting goes for one stream. recent: per source, share of verified drafts kept lately. gain: tokens a round
    that the model's drafts gave beyond what their rows cost. resting: rounds to go without the model."""

    sampled: bool = False
    recent: dict[str, float] = field(default_factory=dict)
    gain: float = 0.0
    resting: int = 0
    rest: int = 0

    def recently(self, source: str) -> float:
        return self.recent.get(source, 0.7)


class Policy:
    """Decisions of all streams of one engine. learned: where what confidences are worth outlives it."""

    def __init__(self, costs: Costs, learned: Learned | None = None) -> None:
        self.costs = costs
        self._learned = learned
        self._calibration = learned.load() if learned else Calibration()
        self._totals: dict[int, tuple[float, float]] = {}
        self._gains: dict[bool, float] = {}

    def end(self) -> None:
        """No more rounds will come."""
        if self._learned:
            self._learned.save(self._calibration)

    def record(self, sampled: bool) -> Record:
        """Of a new stream, which expects of the model what streams like it had of late."""
        return Record(sampled, gain=self._gains.get(sampled, FIRST_GAIN))

    def rate(self, streams: int) -> float:
        """Long-run tokens a millisecond with so many streams together; serial decoding until something is known."""
        tokens, ms = self._totals.get(streams, (float(streams), self.costs.window(streams)))
        return tokens / ms

    def survivals(self, draft: Draft, record: Record) -> Survivals:
        recent = record.recently(draft.source)
        each = (
            self._calibration.probability(_key(draft, record), slot, confidence, recent)
            for slot, confidence in enumerate(draft.confidence)
        )
        return list(accumulate(each, mul))

    def goes_on(self, source: str, confidence: Sequence[float], record: Record, streams: int) -> bool:
        """Whether a chain of drafts is worth one more step: even a certain one must pay for its row and its making."""
        survival = self.survivals(Draft((0,) * len(confidence), tuple(confidence), source), record)[-1]
        rows = streams + len(confidence)
        added = self.costs.window(rows + 1) - self.costs.window(rows) + self.costs.next_ms
        return survival >= self.rate(streams) * added

    def asks_model(self, record: Record) -> bool:
        """Whether a model drafts for a stream this round. Counts down its rest."""
        if record.resting:
            record.resting -= 1
            return False
        return True

    def choose(self, copied: Draft, drafted: Draft, after: Draft, record: Record, streams: int) -> Draft:
        """One draft of a copy and a model's: whichever promises more; both together where they agree throughout.
        after: a copy of what followed where the text went on once as the model drafts, the likeliest way or not.

        The model draws every token given those before it, so its own draft is a copy's for as long as the two agree,
        and the rest of its draft is conditioned on what they agree on.
        """
        if not drafted.tokens:
            return copied
        if copied.tokens[: len(drafted.tokens)] == drafted.tokens:
            both = [max(a, b) for a, b in zip(copied.confidence, drafted.confidence, strict=False)]
            tail = copied.confidence[len(both) :]
            return Draft(copied.tokens, (*both, *tail), "agreed", copied.match)
        if after.tokens:
            tokens, confidence = drafted.tokens + after.tokens, drafted.confidence + after.confidence
            drafted = Draft(tokens, confidence, "agreed", after.match)
        if not copied.tokens:
            return drafted
        values = [self._value(self.survivals(draft, record), streams) for draft in (drafted, copied)]
        return copied if values[1] > values[0] else drafted

    def lengths(self, drafts: Sequence[tuple[Draft, Record]], streams: int) -> list[int]:
        """How many tokens of each draft go into the window: the likeliest of all, up to the number that brings most at
        the present rate."""
        slots = [
            (-survival, stream, slot)
            for stream, (draft, record) in enumerate(drafts)
            for slot, survival in enumerate(self.survivals(draft, record))
        ]
        slots = sorted(slots)[: max(0, WINDOW_ROWS - streams)]
        lengths = [0] * len(drafts)
        for _, stream, _ in slots[: self._best_length([-survival for survival, _, _ in slots], streams)]:
            lengths[stream] += 1
        return lengths

    def settle(self, draft: Draft, targets: Sequence[int], record: Record) -> None:
        """A stream's round is over and the target's tokens are known, as far as the draft was right and one more.

        draft is what was proposed, not what was verified: the first token that was cut off is settled too.
        """
        recent, right, settled = record.recently(draft.source), 0, 0
        for slot, (token, confidence, target) in enumerate(zip(draft.tokens, draft.confidence, targets, strict=False)):
            self._calibration.learn(_key(draft, record), slot, confidence, recent, token == target)
            settled += 1
            if token != target:
                break
            right += 1
        if settled:
            record.recent[draft.source] = 0.875 * recent + 0.125 * right / settled

    def settle_model(self, made: int, verified: int, right: int, record: Record, streams: int) -> None:
        """A model drafted `made` tokens for a stream; `verified` of them went into the window and `right` were kept.
        When its drafts bring less than they cost it rests, longer each time."""
        rate = self.rate(streams)
        rows = self.costs.window(streams + verified) - self.costs.window(streams)
        gain = right - rate * (rows + self.costs.drafting(made) / streams)
        record.gain += (gain - record.gain) / 32
        expected = self._gains.get(record.sampled, FIRST_GAIN)
        self._gains[record.sampled] = max(0.0, expected + (gain - expected) / 128)
        if record.gain >= 0:
            record.rest = 0
        else:
            record.rest = min(LONGEST_REST, 2 * record.rest + 1)
            record.resting, record.gain = record.rest, 0.0

    def spent(self, streams: int, rows: int, tokens: int, drafted: int) -> None:
        """A round of `rows` rows gave `tokens` tokens; drafted: the longest draft a model made for it, 0 for none."""
        before = self._totals.get(streams)
        if before is None:
            # As if serial for a while, so that the first rounds do not swing the rate.
            before = (10.0 * streams, 10 * self.costs.window(streams))
        ms = self.costs.window(rows) + self.costs.drafting(drafted)
        self._totals[streams] = MEMORY * before[0] + tokens, MEMORY * before[1] + ms

    def _value(self, survivals: Survivals, streams: int) -> float:
        best = self._best_length(survivals, streams)
        return sum(survivals[:best]) - self.rate(streams) * (
            self.costs.window(streams + best) - self.costs.window(streams)
        )

    def _best_length(self, survivals: Survivals, streams: int) -> int:
        """How many rows, likeliest first, bring most tokens beyond what their time is worth; the fewest of equals."""
        rate, base = self.rate(streams), self.costs.window(streams)
        best, most, tokens = 0, 0.0, 0.0
        for count, survival in enumerate(survivals, start=1):
            tokens += survival
            value = tokens - rate * (self.costs.window(streams + count) - base)
            if value > most:
                best, most = count, value
        return best


def _key(draft: Draft, record: Record) -> Key:
    return draft.source, _bucket(draft.match), record.sampled


def _bucket(match: int) -> int:
    """Matches of similar length: 0, 1, 2-3, 4-7, 8-15, ... up to 64 and more."""
    return min(match.bit_length(), 7)
