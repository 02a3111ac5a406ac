"""How many drafts are verified: the rule against brute force, against every fixed length, and what it learns."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tfglm.drafts.base import Draft
from tfglm.drafts.calibration import Calibration
from tfglm.drafts.costs import THREE_SPARKS, Costs, enough, measure
from tfglm.drafts.policy import LONGEST_REST, WINDOW_ROWS, Policy, Record
from tfglm.drafts.trace import FixedPolicy, Trace, TracedReply, read_trace, replay
from tfglm.errors import ConfigError


def draft(*confidence: float, source: str = "mtp") -> Draft:
    return Draft(tuple(range(len(confidence))), confidence, source)


@pytest.mark.parametrize("seed", range(20))
def test_the_window_is_the_best_of_all_windows(seed: int) -> None:
    dice = random.Random(seed)
    steps = [dice.choice([0.5, 3.0, 9.0, 12.0]) for _ in range(16)]
    costs = Costs(tuple(50 + sum(steps[:n]) for n in range(16)))
    policy = Policy(costs)
    streams = dice.randrange(1, 4)
    offers = [(draft(*(dice.uniform(0.3, 0.99) for _ in range(dice.randrange(5)))), Record()) for _ in range(streams)]
    survivals = [policy.survivals(*offer) for offer in offers]

    def worth(lengths: Sequence[int]) -> float:
        rows = costs.window(streams + sum(lengths)) - costs.window(streams)
        tokens = sum(sum(each[:length]) for each, length in zip(survivals, lengths, strict=True))
        return tokens - policy.rate(streams) * rows

    best = max(worth(lengths) for lengths in product(*(range(len(each) + 1) for each in survivals)))
    assert worth(policy.lengths(offers, streams)) == pytest.approx(best, abs=1e-12)


def test_a_survival_is_the_product_of_what_came_before() -> None:
    policy = Policy(THREE_SPARKS)
    assert policy.survivals(draft(0.9, 0.5, 0.8), Record()) == pytest.approx([0.9, 0.45, 0.36])


def test_no_window_is_wider_than_a_tile() -> None:
    policy = Policy(Costs((1.0,) * 16))
    for streams in (1, 3, 8):
        lengths = policy.lengths([(draft(*[0.9] * 15), Record())] * streams, streams)
        assert streams + sum(lengths) == WINDOW_ROWS
    assert policy.lengths([(draft(0.9), Record())] * 8, 20) == [0] * 8


def chances(q: float, count: int, seed: int) -> Trace:
    """Replies whose drafts are right with probability q each, and say so."""
    dice = random.Random(seed)
    tokens = tuple(dice.randrange(1000) for _ in range(count))
    drafts = {}
    for at in range(1, count):
        right = [dice.random() < q for _ in range(8)]
        guessed = [t if ok else 5000 for t, ok in zip(tokens[at + 1 : at + 9], right, strict=False)]
        drafts[at] = (guessed, [q] * len(guessed))
    return Trace("mtp", 8, (TracedReply(1, False, tokens, drafts),))


@pytest.mark.parametrize("q", [0.3, 0.6, 0.75, 0.85, 0.95])
def test_the_policy_is_as_fast_as_the_best_fixed_length(q: float) -> None:
    trace = chances(q, 4000, 7)
    ours = replay(trace, Policy(THREE_SPARKS), copy=False).tokens_per_second
    fixed = [replay(trace, FixedPolicy(THREE_SPARKS, length), copy=False).tokens_per_second for length in range(9)]
    assert ours > 0.98 * max(fixed)
    assert fixed[0] == pytest.approx(1000 / THREE_SPARKS.verify_ms[0])


def test_of_mixed_text_the_policy_beats_every_fixed_length() -> None:
    easy, hard = chances(0.95, 3000, 1), chances(0.4, 1500, 2)
    mixed = Trace("mtp", 8, tuple(one for _ in range(2) for trace in (easy, hard) for one in trace.replies))
    ours = replay(mixed, Policy(THREE_SPARKS), copy=False)
    fixed = [replay(mixed, FixedPolicy(THREE_SPARKS, length), copy=False).tokens_per_second for length in range(9)]
    assert ours.tokens_per_second > 1.03 * max(fixed)
    assert ours.tokens == 2 * (3000 - 2 + 1500 - 2)


def test_a_wrong_confidence_is_learned() -> None:
    dice, calibration, key = random.Random(3), Calibration(), ("mtp", 0, False)
    assert calibration.probability(key, 0, 0.9, 0.7) == pytest.approx(0.9)
    for _ in range(3000):
        calibration.learn(key, 0, 0.9, 0.7, dice.random() < 0.5)
    assert calibration.probability(key, 0, 0.9, 0.7) == pytest.approx(0.5, abs=0.1)
    assert calibration.probability(("mtp", 0, True), 0, 0.9, 0.7) == pytest.approx(0.9), "sampled is another matter"


def test_the_first_draft_that_was_cut_off_teaches_too() -> None:
    """Else a source once distrusted would never be heard again."""
    policy, record = Policy(Costs((10.0, 1000.0))), Record()
    distrusted = draft(0.02)
    assert policy.lengths([(distrusted, record)], 1) == [0]
    before = policy.survivals(distrusted, record)[0]
    for _ in range(50):
        policy.settle(distrusted, [0], record)
    assert policy.survivals(distrusted, record)[0] > 2 * before


def test_equal_histories_make_equal_decisions() -> None:
    """Ranks decide alike: nothing but tokens and the table goes in."""
    trace = chances(0.7, 500, 3)
    assert replay(trace, Policy(THREE_SPARKS), copy=True) == replay(trace, Policy(THREE_SPARKS), copy=True)


def test_a_model_that_never_pays_rests_and_is_tried_again() -> None:
    policy, record, asked = Policy(Costs((10.0, 11.0), first_ms=5.0)), Record(), 0
    for _ in range(400):
        if policy.asks_model(record):
            asked += 1
            policy.settle_model(1, 1, 0, record, 1)
    assert 400 / LONGEST_REST <= asked < 60
    for _ in range(100):
        if policy.asks_model(record):
            policy.settle_model(1, 1, 1, record, 1)
    assert record.rest == record.resting == 0


def test_a_chain_stops_where_even_a_certain_draft_would_not_pay() -> None:
    policy = Policy(Costs((50.0, 60.0, 70.0), first_ms=3, next_ms=2))
    sure, unsure = [0.9, 0.9], [0.3, 0.3]
    assert policy.goes_on("mtp", sure, Record(), 1)
    assert not policy.goes_on("mtp", unsure, Record(), 1)


def test_copy_and_model_become_one_draft() -> None:
    policy, record = Policy(THREE_SPARKS), Record()
    copied, agreeing = Draft((1, 2, 3, 4), (0.5, 0.5, 0.5, 0.5), "copy-prompt", 5), Draft((1, 2), (0.9, 0.2), "mtp")
    none = Draft()
    both = policy.choose(copied, agreeing, none, record, 1)
    assert both == Draft((1, 2, 3, 4), (0.9, 0.5, 0.5, 0.5), "agreed", 5)
    sure = Draft((9, 8), (0.95, 0.95), "mtp")
    assert policy.choose(copied, sure, none, record, 1) == sure
    assert policy.choose(copied, Draft((9,), (0.05,), "mtp"), none, record, 1) == copied
    assert policy.choose(none, sure, none, record, 1) == sure
    assert policy.choose(copied, none, none, record, 1) == copied


def test_a_model_that_takes_the_rarer_way_is_followed_on_it() -> None:
    policy, record = Policy(THREE_SPARKS), Record()
    copied, sure = Draft((1, 2, 3, 4), (0.5, 0.5, 0.5, 0.5), "copy-prompt", 5), Draft((9, 8), (0.95, 0.9), "dspark")
    after = Draft((7, 6), (0.8, 0.7), "copy-prompt", 7)
    together = Draft((9, 8, 7, 6), (0.95, 0.9, 0.8, 0.7), "agreed", 7)
    assert policy.choose(copied, sure, after, record, 1) == policy.choose(Draft(), sure, after, record, 1) == together
    doubtful = Draft((9, 8), (0.05, 0.9), "dspark")
    assert policy.choose(copied, doubtful, after, record, 1) == copied


def test_a_windows_cost_goes_on_as_the_table_ends() -> None:
    costs = Costs((10.0, 12.0, 15.0), first_ms=4.0, next_ms=1.0)
    assert [costs.window(rows) for rows in (1, 3, 4, 5)] == [10.0, 15.0, 18.0, 21.0]
    assert [costs.drafting(tokens) for tokens in (0, 1, 3)] == [0.0, 4.0, 6.0]


def test_measured_widths_never_fall_and_a_spent_budget_times_each_once() -> None:
    called: list[int] = []
    times = measure(called.append, 5, repeats=3, budget_s=0.0)
    assert called == [5, 1, 2, 3, 4, 5] and times == sorted(times) and len(times) == 5
    assert enough([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for text in (
        "",
        "{}",
        "nonsense",
        '{"tfglm_trace": 2}',
        json.dumps({"tfglm_trace": 1, "drafter": "x", "most": 3}) + "\n[1]",
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.jsonl"):
            read_trace(bad)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
