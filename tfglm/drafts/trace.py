"""Traces of serial replies with what a drafter would have proposed at every position, and their replay under a policy.

Replies do not depend on drafts, so a trace made once answers for any policy: the replay runs the very code that serves,
with drafts from the file, the known reply as the target, and a cost table as the clock. No model and no accelerator.

File: JSON lines. The first is {"tfglm_trace": 1, "drafter": name, "most": longest draft}. Then one line a reply:
{"prompt": tokens of the prompt, "sampled": bool, "tokens": prompt and reply, "drafts": {position: [tokens,
confidences]}}, where position is that of the pending token, after which the draft stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tfglm.cache.pages import PagePool, Stream
from tfglm.drafts.base import NO_DRAFT, Ask, Draft, Drafter, Kept
from tfglm.drafts.costs import Costs
from tfglm.drafts.policy import Policy, Record
from tfglm.drafts.speculator import Outcome, Speculator, Turn
from tfglm.errors import ConfigError
from tfglm.models.glm53 import Glm53
from tfglm.models.taps import Passed, Taps
from tfglm.ops.group import Message

VERSION = 1
Proposal = tuple[list[int], list[float]]


@dataclass
class _Traced:
    inner: Any
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    sampled: bool = False
    pending: int = 0
    drafts: dict[int, Proposal] = field(default_factory=dict)


class TracingDrafter:
    """Writes down what another drafter proposes, and proposes nothing, so that every position comes up."""

    def __init__(self, inner: Drafter | None, path: Path) -> None:
        self._inner = inner
        self.name = inner.name if inner else "none"
        self.most = inner.most if inner else 0
        self.taps = inner.taps if inner else Taps()
        self.planes = inner.planes if inner else ()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--draft-trace is {str(path)!r}, which cannot be written: {error.strerror}") from None
        self._write({"tfglm_trace": VERSION, "drafter": self.name, "most": self.most})

    def open(self, stream: Stream) -> _Traced:
        return _Traced(self._inner.open(stream) if self._inner else None)

    def skip(self, context: _Traced, tokens: Sequence[int]) -> None:
        context.tokens += tokens
        if self._inner:
            self._inner.skip(context.inner, tokens)

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        for part in kept:
            part.context.tokens += part.tokens
        if self._inner:
            self._inner.read([replace(part, context=part.context.inner) for part in kept], passed)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        inner = [replace(ask, context=ask.context.inner, go_on=lambda confidence: True) for ask in asks]
        drafts = self._inner.propose(inner) if self._inner else [NO_DRAFT] * len(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            traced: _Traced = ask.context
            if not traced.drafts:
                traced.prompt, traced.sampled = len(traced.tokens), ask.sampled
            traced.pending = ask.pending
            traced.drafts[len(traced.tokens)] = list(draft.tokens), list(draft.confidence)
        return [NO_DRAFT] * len(asks)

    def close(self, context: _Traced) -> None:
        if self._inner:
            self._inner.close(context.inner)
        if context.drafts:
            self._write(
                {
                    "prompt": context.prompt,
                    "sampled": context.sampled,
                    "tokens": context.tokens,
                    "drafts": context.drafts,
                }
            )

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        return self._inner.handlers(model) if self._inner else {}

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class TracedReply:
    prompt: int
    sampled: bool
    tokens: tuple[int, ...]
    drafts: dict[int, Proposal]


@dataclass(frozen=True)
class Trace:
    drafter: str
    most: int
    replies: tuple[TracedReply, ...]


def read_trace(path: Path) -> Trace:
    """Raises ConfigError for a file that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head, *rest = (json.loads(line) for line in lines)
        if head["tfglm_trace"] != VERSION:
            raise ConfigError(f"{path}: its version is {head['tfglm_trace']!r}; {VERSION} can be read")
        replies = tuple(
            TracedReply(
                one["prompt"],
                one["sampled"],
                tuple(one["tokens"]),
                {int(at): (tokens, confidence) for at, (tokens, confidence) in one["drafts"].items()},
            )
            for one in rest
        )
        return Trace(head["drafter"], head["most"], replies)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no trace of drafts ({type(error).__name__}: {error}); serve with --draft-trace writes one"
        ) from None


@dataclass(frozen=True)
class Replayed:
    """Figures of a replay. ms is the cost table's time of all rounds."""

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    ms: float

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens / self.ms if self.ms else 0.0


class _FileDrafter:
    """Proposes what a trace says. A context is the reply and how much of it has been read."""

    most, taps, planes = 0, Taps(), ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply = TracedReply(0, False, (), {})

    def open(self, stream: Stream) -> list[int]:
        return [0]

    def skip(self, context: list[int], tokens: Sequence[int]) -> None:
        context[0] += len(tokens)

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        for part in kept:
            part.context[0] += len(part.tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        tokens, confidence = self.reply.drafts.get(ask.context[0], ([], []))
        length = min(1, len(tokens))
        while length < min(len(tokens), ask.room) and ask.go_on(confidence[:length]):
            length += 1
        return Draft(tuple(tokens[:length]), tuple(confidence[:length]), self.name)

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        return {}

    def close(self, context: list[int]) -> None:
        pass


class FixedPolicy(Policy):
    """Verifies so many drafts whenever there are, whatever they promise."""

    def __init__(self, costs: Costs, length: int) -> None:
        super().__init__(costs)
        self._length = length

    def goes_on(self, source: str, confidence: Sequence[float], record: Record, streams: int) -> bool:
        return len(confidence) < self._length

    def asks_model(self, record: Record) -> bool:
        return self._length > 0

    def lengths(self, drafts: Sequence[tuple[Draft, Record]], streams: int) -> list[int]:
        return [min(self._length, len(draft.tokens)) for draft, _ in drafts]


def replay(trace: Trace, policy: Policy, *, copy: bool) -> Replayed:
    """Every reply of a trace, one after the other, as a policy would have drafted it."""
    drafter = _FileDrafter(trace.drafter)
    speculator = Speculator(drafter if trace.most else None, policy, copy=copy, vocab_size=1 << 62)
    costs = policy.costs
    rounds = tokens = drafted = accepted = 0
    ms = 0.0
    for reply in trace.replies:
        drafter.reply = reply
        lane = speculator.open(Stream(PagePool(0)), sampled=reply.sampled)
        assert lane is not None
        speculator.read(lane, reply.tokens[: reply.prompt], _NOTHING)
        at = reply.prompt
        while at < len(reply.tokens) - 1:
            room = max(0, len(reply.tokens) - at - 2)
            [draft] = speculator.propose([Turn(lane, reply.tokens[at], room, lambda: _no_draw)], 1)
            made = len(lane.drafted.tokens)
            right = _agreeing(draft, reply.tokens[at + 1 :])
            targets = reply.tokens[at + 1 : at + 2 + right]
            kept = reply.tokens[at : at + 1 + right]
            speculator.settle(
                [Outcome(lane, kept, 0, targets)], _NOTHING, streams=1, rows=1 + len(draft), tokens=len(targets)
            )
            rounds, tokens = rounds + 1, tokens + len(targets)
            drafted, accepted = drafted + len(draft), accepted + right
            ms += costs.window(1 + len(draft)) + costs.drafting(made)
            at += 1 + right
        speculator.close(lane)
    return Replayed(rounds, tokens, drafted, accepted, ms)


_NOTHING = Passed(torch.empty(0), None, {})


def _no_draw(ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
    raise AssertionError("a traced draft has been drawn already")


def _agreeing(draft: Sequence[int], targets: Sequence[int]) -> int:
    pairs = zip(draft, targets, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(targets)))
