"""A trace holds every position's draft, whatever part of the prompt was read, and can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tfglm.cache.pages import PagePool, Stream
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.costs import THREE_SPARKS
from tfglm.drafts.policy import Policy
from tfglm.drafts.trace import TracingDrafter, read_trace, replay
from tfglm.models.taps import Passed, Taps

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
PROMPT = 6
NOTHING = Passed(torch.empty(0), None, {})


class Knowing:
    """Drafts the text, as far as it was told where it is."""

    name, most, taps, planes = "knowing", 4, Taps(), ()

    def open(self, stream: Stream) -> list[int]:
        return []

    def skip(self, context: list[int], tokens: Sequence[int]) -> None:
        context.extend(tokens)

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        for part in kept:
            part.context.extend(part.tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        at = [len(ask.context) + 1 for ask in asks]
        tokens = [tuple(TEXT[start : start + min(4, ask.room)]) for start, ask in zip(at, asks, strict=True)]
        return [Draft(each, (0.75,) * len(each), self.name) for each in tokens]

    def close(self, context: list[int]) -> None:
        assert context == TEXT[:-1]


@pytest.mark.parametrize("skipped", [0, 4])
def test_a_trace_of_a_reply_is_replayed(skipped: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    drafter = TracingDrafter(Knowing(), path)  # type: ignore[arg-type]
    context = drafter.open(Stream(PagePool(0)))
    drafter.skip(context, TEXT[:skipped])
    drafter.read([Kept(context, TEXT[skipped:PROMPT], 0)], NOTHING)
    for at in range(PROMPT, len(TEXT) - 1):
        ask = Ask(context, TEXT[at], len(TEXT) - 2 - at, lambda *_: (0, 0.0), lambda confidence: False, sampled=True)
        [draft] = drafter.propose([ask])
        assert draft.tokens == (), "nothing is verified while a trace is made, so every position comes up"
        drafter.read([Kept(context, [TEXT[at]], 0)], NOTHING)
    drafter.close(context)
    trace = read_trace(path)
    [reply] = trace.replies
    assert (trace.drafter, trace.most, reply.prompt, reply.sampled) == ("knowing", 4, PROMPT, True)
    assert list(reply.tokens) == TEXT[:-1] and sorted(reply.drafts) == list(range(PROMPT, len(TEXT) - 1))
    assert reply.drafts[PROMPT] == (TEXT[PROMPT + 1 : PROMPT + 5], [0.75] * 4)
    replayed = replay(trace, Policy(THREE_SPARKS), copy=False)
    assert replayed.accepted == replayed.drafted > 0 and replayed.tokens == len(TEXT) - 2 - PROMPT
