"""The sampler against slow oracles: Python integers, fractions and whole sorts."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.engine.api import SamplingParams
from tfglm.engine.noise import derived_seed, gumbel
from tfglm.engine.sampler import LogitsError, TokenCounts, choose, kept, token_logprob

VOCAB = 154_856
COLUMNS = 154_880
INF = math.inf


def mix(x: int) -> int:
    """splitmix64's finalizer in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def hash_word(seed: int, position: int, token: int) -> int:
    x = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    return mix(mix(x ^ (position * 0xD1B54A32D192ED03) % 2**64) ^ token)


def slow_gumbel(seed: int, position: int, token: int) -> float:
    uniform = (hash_word(seed, position, token) >> 11) * 2.0**-53 + 2.0**-54
    return -math.log(-math.log(uniform)) if uniform < 1 else INF


def slow_values(
    logits: list[float], params: SamplingParams, prompt: list[int], reply: list[int], masked: list[int]
) -> list[float]:
    values = list(logits)
    for token in range(len(values)):
        if token in prompt or token in reply:
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.frequency_penalty * reply.count(token)
        values[token] -= params.presence_penalty * (token in reply)
        values[token] += params.logit_bias.get(token, 0.0)
        if token in masked:
            values[token] = -INF
    return values


def slow_kept(values: list[float], params: SamplingParams) -> list[int]:
    order = sorted((t for t in range(len(values)) if values[t] > -INF), key=lambda t: (-values[t], t))
    if params.top_k > 0:
        order = order[: params.top_k]
    scaled = {t: values[t] / max(params.temperature, 1e-6) for t in order}
    top = scaled[order[0]]
    if params.top_p < 1:
        masses = [math.floor(math.exp(scaled[t] - top) * 2**40) for t in order]
        need = Fraction(params.top_p) * sum(masses)
        count = 1
        while sum(masses[:count]) < need:
            count += 1
        order = order[:count]
    if params.min_p > 0:
        order = [t for t in order if scaled[t] >= top + math.log(params.min_p)]
    return order


def slow_choice(values: list[float], params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature == 0:
        return min(range(len(values)), key=lambda t: (-values[t], t))
    order = slow_kept(values, params)
    scores = [values[t] / max(params.temperature, 1e-6) + slow_gumbel(seed, position, t) for t in order]
    return order[scores.index(max(scores))]


level = st.integers(-8, 8).map(lambda n: n / 2)
"""Few distinct logits, so that ties are everywhere."""
logit_rows = st.lists(
    st.one_of(level, st.floats(-20, 20, width=32), st.sampled_from([0.0, -0.0, -INF])), min_size=2, max_size=24
).filter(lambda row: sum(value > -INF for value in row) > 1)
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 0.7, 1.0, 1.3, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.25, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds, st.integers(0, 2**21), st.lists(st.integers(0, COLUMNS - 1), min_size=1, max_size=5))
def test_noise_is_the_hash_of_its_key(seed: int, position: int, ids: list[int]) -> None:
    expected = [slow_gumbel(seed, position, token) for token in ids]
    np.testing.assert_allclose(gumbel(seed, position, np.array(ids)), expected, rtol=1e-12, atol=1e-14)


def test_known_noise() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "the published first output of splitmix64 from state 0"
    assert hash_word(7, 100, 154_842) == 0xF9FBF1D67BF9FEA8
    # -ln(-ln u) of that word in 50-digit decimals
    assert gumbel(7, 100, np.array([154_842]))[0] == pytest.approx(3.7389148866686654, rel=1e-14)


@given(seeds, st.integers(0, 10**6), st.integers(1, 40))
def test_noise_of_a_token_does_not_depend_on_its_company(seed: int, position: int, count: int) -> None:
    ids = np.arange(count)
    alone = [gumbel(seed, position, ids[i : i + 1])[0] for i in range(count)]
    assert gumbel(seed, position, ids).tolist() == alone


def test_a_uniform_that_rounds_to_one_is_infinite_noise_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_ones(words: np.ndarray) -> None:
        words[:] = 2**64 - 1

    monkeypatch.setattr("tfglm.engine.noise._mix", all_ones)
    with np.errstate(all="raise"):
        assert gumbel(0, 0, np.arange(2)).tolist() == [INF, INF]
    assert choose(np.array([1, 3, 3], np.float32), SamplingParams(), 0, 0, vocab_size=3) == 1


def test_the_derived_seed_is_the_prompts_hash() -> None:
    digest = hashlib.sha256(b"salt|" + struct.pack("<3I", 1, 22, 333)).digest()
    assert derived_seed([1, 22, 333], "salt") == int.from_bytes(digest[:8], "little") % 2**63
    assert derived_seed([1, 22, 333], "salt") == derived_seed(np.array([1, 22, 333], np.uint32), "salt")
    assert derived_seed([1, 22, 333], "") != derived_seed([12, 2, 333], "")


@settings(max_examples=300)
@given(logit_rows, filters)
def test_the_kept_set_is_the_oracles(row: list[float], params: SamplingParams) -> None:
    assert kept(np.array(row, np.float32), params).tolist() == sorted(slow_kept(row, params))


@settings(max_examples=300)
@given(logit_rows, filters, seeds, st.integers(0, 10**6), st.data())
def test_the_token_is_the_oracles(
    row: list[float], params: SamplingParams, seed: int, position: int, data: st.DataObject
) -> None:
    token = st.integers(0, len(row) - 1)
    penalty = st.sampled_from([0.0, 0.5, -1.5])
    params = SamplingParams(
        **{
            **vars(params),
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.25, 0.5])),
            "frequency_penalty": data.draw(penalty),
            "presence_penalty": data.draw(penalty),
            "logit_bias": data.draw(st.dictionaries(token, st.sampled_from([-100.0, -0.5, 2.0]), max_size=3)),
        }
    )
    prompt, reply = (data.draw(st.lists(token, min_size=1, max_size=8)) for _ in range(2))
    masked = data.draw(st.lists(token, max_size=1))
    counts = TokenCounts(prompt)
    for drawn in reply:
        counts.add(drawn)
    values = slow_values(row, params, prompt, reply, masked)
    padded = np.array([*row, 1e9, INF], np.float32)
    found = choose(padded, params, seed, position, vocab_size=len(row), counts=counts, masked=masked)
    assert found == slow_choice(values, params, seed, position)
    assert padded[: len(row)].tolist() == row, "the row was changed"


def test_near_ties_are_decided_in_float64() -> None:
    """Two logits that their noise brings within float32's rounding of each other."""
    params = SamplingParams(temperature=0.3)
    for seed in range(100):
        first, second = (slow_gumbel(seed, 5, token) for token in (0, 1))
        row = [10.0, float(np.float32(10.0 + 0.3 * (first - second)))]
        assert choose(np.array(row, np.float32), params, seed, 5, vocab_size=2) == slow_choice(row, params, seed, 5)


@given(logit_rows, seeds, st.integers(0, 1000))
def test_greedy_is_top_k_1_at_any_temperature(row: list[float], seed: int, position: int) -> None:
    logits = np.array(row, np.float32)
    best = min(range(len(row)), key=lambda t: (-row[t], t))
    for params in (SamplingParams(temperature=0.0), *(SamplingParams(temperature=t, top_k=1) for t in (0.1, 1.0, 2.0))):
        assert choose(logits, params, seed, position, vocab_size=len(row)) == best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, math.nan], [math.nan, 1.0], [1.0, INF], [-INF, -INF]])
def test_a_row_no_token_can_be_chosen_from_is_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(LogitsError, match="position 5"):
        choose(np.array(row, np.float32), SamplingParams(temperature=temperature), 0, 5, vocab_size=2)


def test_masking_everything_is_an_error() -> None:
    with pytest.raises(LogitsError):
        choose(np.zeros(2, np.float32), SamplingParams(), 0, 5, vocab_size=2, masked=[0, 1])


def test_ids_outside_the_vocabulary_in_bias_and_mask_do_nothing() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={-1: 100.0, 3: 100.0})
    row = np.array([1, 2, 0, 9], np.float32)
    assert choose(row, params, 0, 0, vocab_size=3, masked=[3]) == 1


@given(st.lists(st.integers(0, 50), max_size=30), st.lists(st.integers(0, 300), max_size=200))
def test_counts_are_the_histories(prompt: list[int], reply: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in reply:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.in_reply.tolist(), strict=True))
    assert found == {token: Counter(reply)[token] for token in {*prompt, *reply}}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_filtered_softmax(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws: seeds and positions are fixed, so the outcome is too."""
    row = np.linspace(3, -3, 20, dtype=np.float32)[np.random.default_rng(0).permutation(20)]
    draws = Counter(
        choose(row, params, seed, position, vocab_size=20) for seed in range(20) for position in range(1000)
    )
    ids = slow_kept(row.tolist(), params)
    weights = np.exp(row[ids].astype(np.float64) / params.temperature)
    expected = weights / weights.sum() * 20_000
    assert set(draws) <= set(ids)
    statistic = sum((draws[t] - e) ** 2 / e for t, e in zip(ids, expected, strict=True))
    freedom = len(ids) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 4 standard deviations.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def whole_sort(values: np.ndarray, params: SamplingParams) -> list[int]:
    """slow_kept with numpy's stable sort, for a whole vocabulary."""
    order = np.argsort(-values, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    scaled = values[order].astype(np.float64) / params.temperature
    if params.top_p < 1:
        masses = [int(m) for m in np.floor(np.exp(scaled - scaled[0]) * 2.0**40)]
        need, total, count = Fraction(params.top_p) * sum(masses), 0, 0
        while total < need:
            total, count = total + masses[count], count + 1
        order, scaled = order[:count], scaled[:count]
    if params.min_p > 0:
        order = order[scaled >= scaled[0] + math.log(params.min_p)]
    return sorted(order.tolist())


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "constant", "wide"])
def test_the_kept_set_at_the_real_vocabulary(kind: str) -> None:
    normal = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32)
    values = {
        "peaked": np.where(np.arange(VOCAB) % 5000 == 0, normal + 18, 2.5 * normal),
        "flat": normal,
        "ties": np.round(2 * normal),
        "constant": np.zeros(VOCAB),
        "wide": 1000 * normal,
    }[kind].astype(np.float32)
    for params in (
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.6, top_p=0.5),
        SamplingParams(top_p=0.999, temperature=1.7),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_k=1000, min_p=0.1),
        SamplingParams(top_p=0.99, min_p=0.02),
    ):
        assert kept(values, params).tolist() == whole_sort(values, params)


def test_pad_columns_are_never_drawn() -> None:
    row = np.full(COLUMNS, -5, np.float32)
    row[VOCAB:] = 50
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
        assert choose(row, params, 1, 1, vocab_size=VOCAB) < VOCAB


@given(logit_rows, st.integers(0, 20), st.data())
def test_logprobs_are_the_raw_log_softmax(row: list[float], alternatives: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    told = token_logprob(np.array([*row, 1e9], np.float32), token, alternatives, len(row))
    expected = torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0).tolist()
    assert told.token_id == token
    assert told.logprob == pytest.approx(expected[token], rel=1e-12, abs=1e-12)
    order = sorted((t for t in range(len(row)) if row[t] > -INF), key=lambda t: (-row[t], t))[:alternatives]
    assert [t for t, _ in told.top] == order
    assert [p for _, p in told.top] == pytest.approx([expected[t] for t in order], rel=1e-12, abs=1e-12)
    assert all(p == told.logprob for t, p in told.top if t == token)


def test_logprobs_of_a_broken_row_are_an_error() -> None:
    with pytest.raises(LogitsError, match="nan"):
        token_logprob(np.array([0, math.nan], np.float32), 0, 1, 2)
