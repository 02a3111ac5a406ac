"""The choice of drafts: the target's own choice whenever the drafter's scores are the target's logits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tfglm.engine.api import SamplingParams
from tfglm.engine.guess import Guess
from tfglm.engine.sampler import TokenCounts, choose

VOCAB = 300


def guess(params: SamplingParams, position: int, counts: TokenCounts | None, **fields: Any) -> Guess:
    fields = {"seed": params.seed or 0, "vocab_size": VOCAB, "noise": 1.0} | fields
    return Guess(params, position=position, counts=counts, **fields)


@pytest.mark.parametrize("number", range(60))
def test_with_the_targets_logits_every_draft_of_a_path_is_the_targets_token(number: int) -> None:
    dice, random_rows = random.Random(number), np.random.default_rng(number)
    params = SamplingParams(
        temperature=dice.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=dice.choice([0, 1, 12]),
        top_p=dice.choice([1.0, 0.8]),
        min_p=dice.choice([0.0, 0.05]),
        repetition_penalty=dice.choice([1.0, 1.3]),
        frequency_penalty=dice.choice([0.0, 0.7]),
        presence_penalty=dice.choice([0.0, 0.4]),
        logit_bias=dice.choice([{}, {5: 3.0, 9: -9.0, 999: 1.0}]),
        seed=number,
    )
    prompt = [dice.randrange(VOCAB) for _ in range(20)]
    counts, known, minimum, ends = TokenCounts(prompt), TokenCounts(prompt), 3, [1, 2, 3]
    draw = guess(params, len(prompt), known, masked=ends, unmasked=minimum)
    for ahead in range(6):
        row = (2 * random_rows.standard_normal(VOCAB + 20)).astype(np.float32)
        row[[4, 8]] = row[1:3] = row.max()  # ties, and ends that are not allowed yet
        expected = choose(
            row,
            params,
            number,
            len(prompt) + ahead,
            vocab_size=VOCAB,
            counts=counts,
            masked=ends if ahead < minimum else (),
        )
        counts.add(expected)
        token, confidence = draw(np.arange(len(row)), row, ahead)
        assert token == expected and 0 < confidence <= 1


def test_what_a_greedy_guess_is_sure_of_is_its_share_of_the_candidates() -> None:
    draw = guess(SamplingParams(temperature=0), 5, None)
    assert draw(np.array([3, 9, 20]), np.log(np.array([0.1, 0.7, 0.2])), 0) == (9, pytest.approx(0.7))


def test_shared_noise_makes_near_targets_agree() -> None:
    """Logits off by normal noise of deviation 0.3, temperature 1, top_p 0.95, 256 tokens: a draft that shares the
    target's noise agrees most of the time, a greedy draft seldom."""
    params = SamplingParams(top_p=0.95, seed=3)
    rows = np.random.default_rng(0)
    kept = {0.0: 0, 0.7: 0, 1.0: 0}
    for position in range(400):
        target = (2 * rows.standard_normal(256)).astype(np.float32)
        scores = target + 0.3 * rows.standard_normal(256)
        token = choose(target, params, 3, position, vocab_size=256)
        for noise in kept:
            drafted, _ = guess(params, position, None, vocab_size=256, noise=noise, seed=3)(np.arange(256), scores, 0)
            kept[noise] += drafted == token
    assert kept[1.0] > 0.8 * 400 > 0.72 * 400 > kept[0.7] > kept[0.0]
    assert kept[0.0] < 0.5 * 400


def test_a_request_that_rules_out_every_candidate_gets_a_draft_that_nobody_believes_in() -> None:
    """Not an error: one request's stop ids would turn drafting off for all."""
    draw = guess(SamplingParams(), 5, None, masked=range(64), unmasked=1)
    assert draw(np.arange(64), np.zeros(64), 0) == (0, 0.0)
    assert draw(np.arange(64), np.zeros(64), 1)[1] > 0
    assert guess(SamplingParams(), 5, None)(np.arange(4), np.full(4, np.nan), 0) == (0, 0.0)
