"""Width allocation against trying every choice."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.errors import ConfigError
from tfglm.quantize.allocate import NMSE, Item, allocate, budgets, floored


def spent(items: list[Item], widths: list[float]) -> float:
    return sum(item.matrices * width for item, width in zip(items, widths, strict=True))


def total(items: list[Item], offer: tuple[float, ...], widths: list[float]) -> float:
    return sum(item.errors[offer.index(width)] for item, width in zip(items, widths, strict=True))


def best_by_trying_all(items: list[Item], offer: tuple[float, ...], bits: float) -> float:
    choices = itertools.product(offer, repeat=len(items))
    return min((total(items, offer, list(c)) for c in choices if spent(items, list(c)) == bits), default=np.inf)


@settings(max_examples=60, deadline=None)
@given(
    errors=st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=6),
    counts=st.lists(st.sampled_from([1, 2]), min_size=6, max_size=6),
    offer=st.sampled_from([(2, 3, 4), (2, 2.5, 3), (1.5, 3, 8)]),
    bits=st.integers(0, 60),
)
def test_optimum_of_any_errors(errors: list[list[float]], counts: list[int], offer: tuple, bits: int) -> None:
    items = [Item(count, tuple(e)) for count, e in zip(counts, errors, strict=False)]
    best = best_by_trying_all(items, offer, bits / 2)
    if np.isinf(best):
        with pytest.raises(ConfigError, match="no choice of widths"):
            allocate(items, offer, bits)
    else:
        widths = allocate(items, offer, bits)
        assert spent(items, widths) == bits / 2
        assert total(items, offer, widths) == pytest.approx(best, abs=1e-9)


def test_a_layer_of_256_experts_has_the_exact_mean_and_favours_the_used_ones() -> None:
    random, offer = np.random.default_rng(0), (2.0, 3.0, 4.0)
    importance = np.exp(random.standard_normal(256))
    items = [Item(n, tuple(n * i * NMSE[w] for w in offer)) for i in importance for n in (2, 1)]
    widths = allocate(items, offer, round(2 * 2.75 * 768))
    assert spent(items, widths) == 2.75 * 768
    mean = np.array(widths).reshape(256, 2) @ np.array([2, 1]) / 3
    order = np.argsort(importance)
    assert mean[order[:64]].mean() < mean[order[64:192]].mean() < mean[order[192:]].mean()
    # No exchange of one bit between two groups of equal size helps (the sum is unchanged by it).
    errors = np.array([item.errors for item in items])
    column = np.array([offer.index(w) for w in widths])
    for size in (0, 1):
        group = np.arange(size, 512, 2)
        c, e = column[group], errors[group]
        up = np.where(c < 2, e[np.arange(256), c] - e[np.arange(256), np.minimum(c + 1, 2)], -np.inf)
        down = np.where(c > 0, e[np.arange(256), np.maximum(c - 1, 0)] - e[np.arange(256), c], np.inf)
        assert up.max() <= down.min() + 1e-12


def test_uniform_width() -> None:
    assert allocate([Item(2, (1.0,)), Item(1, (1.0,))], (3.0,), 18) == [3.0, 3.0]
    with pytest.raises(ConfigError, match=r"widths 3 for 3 matrices has a mean of 2\.5 bits"):
        allocate([Item(2, (1.0,)), Item(1, (1.0,))], (3.0,), 15)


@pytest.mark.parametrize(
    ("mean", "matrices", "offer"),
    [
        (2.75, [768] * 75, (2, 3, 4)),
        (2.75, [30] * 6, (2, 3, 4)),
        (2.5, [24] * 3, (2.5,)),
        (2.1, [9, 9, 9, 9], (2, 3)),
        (2.5, [3, 3, 3, 3], (2, 4)),
    ],
)
def test_budgets_hit_the_mean_over_all_layers(mean: float, matrices: list[int], offer: tuple) -> None:
    found = budgets(mean, matrices, offer)
    exact = 2 * mean * sum(matrices)
    step = 2 * (offer[-1] - offer[0]) / max(1, len(offer) - 1)
    assert abs(sum(found) - exact) <= step / 2
    for budget, count in zip(found, matrices, strict=True):
        assert abs(budget - 2 * mean * count) <= step


def test_floor_for_rarely_routed_experts() -> None:
    assert floored([8.0, 0.0, 4.0], 0.1) == [8.0, pytest.approx(0.4), 4.0]
