"""What a drafter's confidence is really worth, learned while serving.

A confidence is trained or guessed for another question than ours, which is "will the target draw this very token". So
each kind of draft has a logistic model of that, P = sigmoid(w . x), adjusted after every settled token: a Kalman filter
whose covariance is kept diagonal. It sees token comparisons alone and adds in a fixed order in float64, so that a run
can be repeated. Of several ranks only rank 0, which chooses what all verify, has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Key = tuple[str, int, bool]
"""Source, match bucket, sampled or greedy."""

_START = (0.0, 1.0, 0.0, 0.0)
"""Weights of a constant, the confidence's logit, the slot and recent success: at first the confidence is believed."""

_DOUBT = (0.5, 0.05, 0.5, 0.05)
"""Variance of each weight at first."""

_DRIFT = 1e-4
"""Share of the first variance that comes back with every outcome, so that a change of text is noticed."""


_LIMIT = 1e3
"""No weight that was learned comes near it."""


class _Weights:
    def __init__(self, mean: Sequence[float] = _START, variance: Sequence[float] = _DOUBT) -> None:
        self.mean = list(mean)
        self.variance = list(variance)


class Calibration:
    """One model a key; keys are made as they come up."""

    def __init__(self) -> None:
        self._weights: dict[Key, _Weights] = {}

    def probability(self, key: Key, slot: int, confidence: float, recent: float) -> float:
        """That the token in `slot` (from 0) is right if all before it are. recent: share of late drafts kept, 0..1."""
        weights = self._weights.get(key)
        return _sigmoid(_dot(weights.mean if weights else _START, _features(slot, confidence, recent)))

    def learn(self, key: Key, slot: int, confidence: float, recent: float, kept: bool) -> None:
        """One settled token: those before it were right, and it was or was not."""
        weights = self._weights.setdefault(key, _Weights())
        x = _features(slot, confidence, recent)
        p = _sigmoid(_dot(weights.mean, x))
        spread = p * (1 - p)
        gains = [variance * feature for variance, feature in zip(weights.variance, x, strict=True)]
        scale = 1 + spread * _dot(gains, x)
        for i, gain in enumerate(gains):
            weights.mean[i] += (float(kept) - p) * gain / scale
            weights.variance[i] += _DRIFT * _DOUBT[i] - spread * gain * gain / scale

    def facts(self) -> list[list[Any]]:
        """All of it as JSON can hold it."""
        return [[*key, weights.mean, weights.variance] for key, weights in self._weights.items()]

    @classmethod
    def from_facts(cls, facts: Any) -> Calibration:
        """Raises ValueError or TypeError for anything that `facts` would not give."""
        made = cls()
        for source, match, sampled, mean, variance in facts:
            if not (type(source) is str and type(match) is int and type(sampled) is bool):
                raise ValueError(f"{[source, match, sampled]} is no source, match and sampled")
            numbers = [float(number) for number in (*mean, *variance)]
            if len(mean) != 4 or len(variance) != 4 or not all(abs(number) < _LIMIT for number in numbers):
                raise ValueError(f"{mean} and {variance} are not four weights and their variances below {_LIMIT:g}")
            if min(numbers[4:]) < 0:
                raise ValueError(f"{variance} has a variance below 0")
            made._weights[source, match, sampled] = _Weights(numbers[:4], numbers[4:])
        return made


def _features(slot: int, confidence: float, recent: float) -> tuple[float, ...]:
    return 1.0, _logit(confidence), slot / 8, _logit(recent)


def _logit(p: float) -> float:
    p = max(0.005, min(0.995, p))  # in this order nan becomes 0.995
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -30.0), 30.0)))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
