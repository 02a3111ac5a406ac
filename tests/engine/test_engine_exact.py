"""A reply beside others, with drafts, or after a long queue is the reply alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_model import FakeModel
from harness import EOS, LIMIT, TOKENIZER, Arrivals, Proposing, Receiver, alone, ask, in_order, request, running

from tfglm.cache.pages import PAGE
from tfglm.engine.api import GenerationRequest
from tfglm.engine.engine import Engine
from tfglm.engine.reply import Reply
from tfglm.settings import Settings

COLUMNS = TOKENIZER.vocab_size + 12


def random_request(dice: random.Random, number: int, longest: int = 25) -> GenerationRequest:
    """Any mixture of what a request can ask for."""
    prompt = [dice.randrange(TOKENIZER.vocab_size) for _ in range(dice.choice([1, 3, 17, 60, 130]))]
    return request(
        f"r{number}",
        prompt,
        max_tokens=dice.randint(1, longest),
        temperature=dice.choice([0.0, 0.7, 1.0, 1.3]),
        top_p=dice.choice([1.0, 0.9]),
        top_k=dice.choice([0, 0, 30]),
        min_p=dice.choice([0.0, 0.02]),
        repetition_penalty=dice.choice([1.0, 1.2]),
        frequency_penalty=dice.choice([0.0, 0.3]),
        presence_penalty=dice.choice([0.0, -0.3]),
        logit_bias={dice.choice(EOS): 4.0} if dice.random() < 0.3 else {},
        seed=dice.choice([None, dice.randrange(2**40)]),
        min_tokens=dice.choice([0, 0, 1]),
        stop=dice.choice([(), ("e",), ("a", "th", "in")]),
        stop_token_ids=dice.choice([(), tuple(TOKENIZER.encode("o"))]),
        include_stop_in_output=dice.random() < 0.3,
        ignore_eos=dice.random() < 0.5,
        starts_in_reasoning=dice.random() < 0.5,
        logprobs=dice.choice([None, 0, 3]),
        prompt_logprobs=dice.choice([None, None, 1]),
    )


def expected(wanted: Sequence[GenerationRequest]) -> list[tuple[Any, ...]]:
    """Every request's outcome when it has the engine to itself."""
    return [alone(one).outcome() for one in wanted]


@pytest.mark.parametrize("parallel", [1, 2, 4, 8])
def test_requests_joining_at_any_time_get_their_lone_reply(parallel: int) -> None:
    dice = random.Random(parallel)
    wanted = [random_request(dice, n, longest=90) for n in range(24)]
    arrivals = Arrivals([(dice.randrange(40), one) for one in wanted])
    model = FakeModel(COLUMNS, before=arrivals.arrive)
    with running(model, parallel=parallel, prefill_rows=16) as engine:
        arrivals.run(engine)
        outcomes = [arrivals.receivers[one.id].outcome() for one in wanted]
    assert outcomes == expected(wanted)
    assert all(in_order(receiver.events) for receiver in arrivals.receivers.values())
    assert max(len(window) for window in model.windows) == parallel


@pytest.mark.parametrize("rows", [16, 33, 4096])
def test_the_cut_of_the_prompt_does_not_matter(rows: int) -> None:
    wanted = [random_request(random.Random(n), n) for n in range(6)]
    assert [alone(one, prefill_rows=rows).outcome() for one in wanted] == expected(wanted)


Propose = Callable[[Reply, int], Sequence[int]]


def proposers(replies: dict[str, list[int]]) -> dict[str, Propose]:
    """Proposers that know the whole replies, in part, or nothing."""
    dice = random.Random(0)

    def oracle(reply: Reply, limit: int) -> Sequence[int]:
        return replies[reply.request.id][len(reply.tokens) :][:limit]

    def all_wrong(reply: Reply, limit: int) -> Sequence[int]:
        return [(token + 1) % TOKENIZER.vocab_size for token in oracle(reply, limit)][:5]

    def mixed(reply: Reply, limit: int) -> Sequence[int]:
        return [token if dice.random() < 0.8 else 7 for token in oracle(reply, dice.randrange(6))]

    def noise(reply: Reply, limit: int) -> Sequence[int]:
        return [dice.randrange(TOKENIZER.vocab_size) for _ in range(dice.randrange(16))]

    return {"oracle": oracle, "all wrong": all_wrong, "mixed": mixed, "noise": noise}


@pytest.mark.parametrize("kind", ["oracle", "all wrong", "mixed", "noise"])
def test_drafts_never_change_a_reply(kind: str) -> None:
    wanted = [random_request(random.Random(n), n) for n in range(100, 140)]
    serial = expected(wanted)
    propose = proposers({one.id: outcome[0] for one, outcome in zip(wanted, serial, strict=True)})[kind]
    model = FakeModel(COLUMNS)
    with running(model, drafting=Proposing(propose), parallel=8) as engine:
        receivers = [ask(engine, one) for one in wanted]
        assert [receiver.outcome() for receiver in receivers] == serial
        snapshot = engine.snapshot()
    usages = [receiver.finished.usage for receiver in receivers]
    assert snapshot.drafted_tokens == sum(usage.drafted_tokens for usage in usages) > 0
    assert snapshot.accepted_tokens == sum(usage.accepted_tokens for usage in usages)
    assert snapshot.generation_tokens == sum(usage.completion_tokens for usage in usages)
    assert (snapshot.accepted_tokens == 0) == (kind == "all wrong")
    if kind == "oracle":
        assert all(usage.accepted_tokens <= usage.drafted_tokens for usage in usages)
        assert max(len([d for d in receiver.deltas if d.token_ids]) for receiver in receivers) <= 4


def test_a_perfect_drafter_needs_one_round() -> None:
    wanted = request(max_tokens=20, ignore_eos=True)
    ids = alone(wanted).ids
    with running(drafting=Proposing(lambda reply, limit: ids[len(reply.tokens) :][:limit])) as engine:
        receiver = ask(engine, wanted)
        usage, rounds = receiver.finished.usage, engine.snapshot().rounds
    assert receiver.ids == ids and rounds == 1
    assert (usage.drafted_tokens, usage.accepted_tokens) == (18, 18)


def test_draft_false_is_never_drafted() -> None:
    asked: list[int] = []

    def propose(reply: Reply, limit: int) -> Sequence[int]:
        asked.append(limit)
        return [1, 2, 3]

    with running(drafting=Proposing(propose)) as engine:
        receiver = ask(engine, replace(request(max_tokens=5, ignore_eos=True), draft=False))
        assert receiver.finished.usage.drafted_tokens == 0 and not asked
        receiver = ask(engine, request(max_tokens=5, ignore_eos=True))
        assert receiver.finished.usage.drafted_tokens > 0
    assert max(asked) == 3, "a draft beyond the last token could never be used"


def test_a_thousand_short_requests_leave_nothing_behind() -> None:
    """More requests than pages, lanes and queue together, from several threads, some of them cancelled."""
    model = FakeModel(COLUMNS, tokens=6 * PAGE)
    ends: list[Receiver] = []

    def client(number: int, engine: Engine) -> None:
        dice = random.Random(number)
        for n in range(250):
            one = request(f"{number}-{n}", [dice.randrange(300)] * dice.randint(1, 20), max_tokens=dice.randint(1, 6))
            receiver = ask(engine, one)
            ends.append(receiver)
            if dice.random() < 0.2:
                engine.cancel(one.id)
            if n % 10 == 0:
                assert receiver.last

    with running(model, parallel=8, max_queued=1000, prefill_rows=16) as engine:
        threads = [threading.Thread(target=client, args=(n, engine)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert len(ends) == 1000 and all(in_order(end.events) for end in ends if end.last)
        assert {end.finished.reason for end in ends} >= {"length", "cancelled"}
        assert engine.snapshot().generation_tokens == sum(end.finished.usage.completion_tokens for end in ends)
        assert engine.snapshot().iteration_tokens == sum(rows for window in model.windows for rows, _ in window)


def test_settings_may_come_from_anywhere() -> None:
    """The engine reads the settings object that the command line makes."""
    assert alone(request(), **vars(Settings.from_sources({"parallel": 2}, {}))).finished
