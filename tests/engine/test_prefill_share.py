"""A prompt beside a reply that is being written gets its share of the time, no more and no less. The clock is ours."""

from __future__ import annotations

import pytest
from harness import EOS, TOKENIZER, request

from tfglm.engine.reply import Reply
from tfglm.engine.scheduler import Scheduler
from tfglm.engine.states import PromptStates


def reply(id: str, *, reading: bool) -> Reply:
    made = Reply(request(id, [1] * 50, max_tokens=100), lambda event: None, TOKENIZER, EOS, 0)
    made.read = 0 if reading else 50
    return made


def turns(share: float, chunk_s: float, round_s: float, count: int, *, decoding: bool = True) -> list[str]:
    scheduler = Scheduler(4, 4, 100, PromptStates(), share)
    if decoding:
        scheduler.add(reply("talk", reading=False))
    scheduler.add(reply("long", reading=True))
    kinds = []
    for _ in range(count):
        plan = scheduler.plan()
        kinds.append("chunk" if plan.prompt else "round")
        scheduler.took(plan, chunk_s if plan.prompt else round_s)
    return kinds


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 1), (0.5, 8), (0.68, 4), (0.9, 1)])
def test_a_chunk_is_paid_for_in_rounds(share: float, rounds: int) -> None:
    """A chunk of a second owes (1 - share) / share of a second; a round pays 0.125."""
    assert turns(share, 1.0, 0.125, 3 * (rounds + 1)) == ["chunk", *["round"] * rounds] * 3


def test_long_rounds_do_not_pay_in_advance() -> None:
    assert turns(0.5, 1.0, 30.0, 6) == ["chunk", "round"] * 3


def test_over_time_the_share_is_kept() -> None:
    kinds = turns(0.3, 0.37, 0.11, 2000)
    spent = {kind: kinds.count(kind) * seconds for kind, seconds in (("chunk", 0.37), ("round", 0.11))}
    assert spent["chunk"] / sum(spent.values()) == pytest.approx(0.3, abs=0.01)


def test_nobody_else_no_debt() -> None:
    assert turns(0.1, 1.0, 0.1, 5, decoding=False) == ["chunk"] * 5
