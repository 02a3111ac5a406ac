"""The model that comes with tfglm still knows what it learnt: sums, keys in long texts, JSON; drafted or not.

A change of kernels, caches or formats that costs quality shows here. The limits lie below what was measured when the
model was shipped (tfglm/bundled/README.md) and far above what a broken model reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from harness import Receiver
from threaded_ranks import spread

from tfglm.bundled import DRAFTER, FOLDER, MODEL
from tfglm.checkpoint.store import Checkpoint
from tfglm.checks import needle
from tfglm.checks.problem import Problem, Reply, judge
from tfglm.checks.suite import problem
from tfglm.cli.loading import load
from tfglm.cli.serving import Session
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.engine import Engine
from tfglm.server.state import Served
from tfglm.server.thinking import close_thinking
from tfglm.settings import Settings

LIMIT = 240.0
_numbers = itertools.count()


def started(**given: object) -> Iterator[Served]:
    """The model behind an engine, without HTTP."""
    settings = Settings.from_sources(
        {"device": "cpu", "threads": 2, "context": 4096, "parallel": 2, "kept_gib": 0, **given}
    )
    session = Session(None)
    threads = torch.get_num_threads()
    with Checkpoint.open(MODEL) as checkpoint:
        served = load(checkpoint, settings, session)
        yield served
    assert session.engine is not None
    session.engine.stop()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from started()


def ask(served: Served, problems: Sequence[Problem], *, thinking: bool) -> list[Receiver]:
    """Greedy replies to all problems, asked at once."""
    receivers = []
    for one in problems:
        prompt = served.template.render(one.messages, tools=list(one.tools))
        ids = served.tokenizer.encode(prompt if thinking else close_thinking(prompt))
        request = GenerationRequest(
            f"q{next(_numbers)}", ids, SamplingParams(temperature=0.0), max_tokens=400, starts_in_reasoning=thinking
        )
        receivers.append(Receiver())
        served.engine.submit(request, receivers[-1])
    assert all(receiver.ended.wait(LIMIT) for receiver in receivers)
    return receivers


def answers(served: Served, problems: Sequence[Problem], *, thinking: bool) -> list[Reply]:
    return [
        Reply(r.text("answer"), r.text("reasoning"), finish=r.finished.reason)
        for r in ask(served, problems, thinking=thinking)
    ]


def right(problems: Sequence[Problem], replies: Sequence[Reply]) -> float:
    return sum(judge(p, r).outcome == "right" for p, r in zip(problems, replies, strict=True)) / len(problems)


def of(category: str, count: int) -> list[Problem]:
    return [problem(category, 500_000 + n, 0) for n in range(count)]


@pytest.mark.parametrize(("category", "least"), [("arithmetic", 0.85), ("ledger", 0.85), ("json", 0.85)])
def test_it_reckons_and_writes_json(served: Served, category: str, least: float) -> None:
    problems = of(category, 12)
    replies = answers(served, problems, thinking=True)
    assert right(problems, replies) >= least
    assert all(reply.reasoning for reply in replies)


def test_it_finds_keys_and_their_corrections_far_outside_its_selection(served: Served) -> None:
    """2,000 tokens of filler; a row attends to 256 of them."""
    problems = [
        needle.of_kind(Random(f"bundled {n}"), kind, 150, n % 4 / 4, level=1)
        for n, kind in enumerate(["single", "corrected"] * 4)
    ]
    assert right(problems, answers(served, problems, thinking=False)) >= 0.75


def test_drafts_change_nothing(served: Served) -> None:
    problems = of("ledger", 6) + of("python", 4)
    drafted = answers(served, problems, thinking=True)
    [plain] = [answers(one, problems, thinking=True) for one in started(drafter="none", copy=False)]
    assert drafted == plain


def test_the_drafter_that_comes_with_it_changes_nothing_and_guesses_well(served: Served) -> None:
    problems = of("ledger", 6)
    expected = [receiver.ids for receiver in ask(served, problems, thinking=True)]
    [receivers] = [
        ask(one, problems, thinking=True) for one in started(drafter="dspark", drafter_path=str(DRAFTER), copy=False)
    ]
    assert [receiver.ids for receiver in receivers] == expected
    usage = [receiver.finished.usage for receiver in receivers]
    assert sum(u.accepted_tokens for u in usage) > 0.4 * sum(u.drafted_tokens for u in usage) > 0


def recalls() -> list[Problem]:
    """1,300 tokens of filler, five times what a row attends to."""
    kinds = ["single", "corrected"] * 2
    return [needle.of_kind(Random(f"recall {n}"), kind, 100, n / 4, level=1) for n, kind in enumerate(kinds)]


@pytest.mark.parametrize("kv", ["fp32", "fp8", "fp4"])
def test_every_cache_format_keeps_what_it_knows(kv: str) -> None:
    sums, keys = of("arithmetic", 8), recalls()
    for one in started(kv=kv):
        assert right(sums, answers(one, sums, thinking=True)) >= 0.75
        assert right(keys, answers(one, keys, thinking=False)) >= 0.75


@pytest.mark.parametrize("cp", [False, True])
def test_three_ranks_keep_what_it_knows(cp: bool, served: Served) -> None:
    """In threads of this process, experts 2/1/1 blocks a rank, caches whole or dealt out."""
    sums, keys = of("arithmetic", 6), recalls()
    settings = Settings(context=4096, parallel=2, kept_gib=0)
    with Checkpoint.open(MODEL) as checkpoint, spread(checkpoint, 3, tokens=8192, cp=cp) as [model, *_]:
        engine = Engine(model, served.tokenizer, settings, checkpoint.config.eos_token_ids)
        engine.start()
        over_ranks = replace(served, engine=engine)
        assert right(sums, answers(over_ranks, sums, thinking=True)) >= 0.8
        assert right(keys, answers(over_ranks, keys, thinking=False)) >= 0.75
        assert engine.stop(LIMIT)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 16_000_000
    assert sum(file.stat().st_size for file in DRAFTER.iterdir()) <= 3_000_000
    assert (FOLDER / "README.md").is_file()
