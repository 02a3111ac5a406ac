"""What a drafter's confidence is really worth, learned while serving.

A confidence is trained or guessed for another question than ours, which is "will the target draw this very token". So
each kind of draft has a logistic model of that, P = sigmoid(w . x), adjusted after every verified token. It sees token
comparisons alone and adds in a fixed order in float64, so that it is the same on every rank of a group.
"""

from __future__ import annotations

import math

STEP = 0.05
"""Of the gradient descent: about 20 outcomes move a probability visibly."""

Key = tuple[str, int, bool]
"""Source, match bucket, sampled or greedy."""


class Calibration:
    """Starts by believing the confidence: weights 0 for a constant, 1 for its logit, 0 for slot and recent success."""

    def __init__(self) -> None:
        self._weights: dict[Key, list[float]] = {}

    def probability(self, key: Key, slot: int, confidence: float, recent: float) -> float:
        """That the token in `slot` (from 0) is right if all before it are. recent: share of late drafts kept, 0..1."""
        weights = self._weights.get(key)
        return _sigmoid(_dot(weights or _START, _features(slot, confidence, recent)))

    def learn(self, key: Key, slot: int, confidence: float, recent: float, kept: bool) -> None:
        """One settled token: those before it were right, and it was or was not."""
        weights = self._weights.setdefault(key, list(_START))
        features = _features(slot, confidence, recent)
        error = float(kept) - _sigmoid(_dot(weights, features))
        for i, feature in enumerate(features):
            weights[i] += STEP * error * feature


_START = [0.0, 1.0, 0.0, 0.0]


def _features(slot: int, confidence: float, recent: float) -> tuple[float, ...]:
    return 1.0, _logit(confidence), slot / 8, _logit(recent)


def _logit(p: float) -> float:
    p = min(max(p, 0.005), 0.995)
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -30.0), 30.0)))


def _dot(a: list[float], b: tuple[float, ...]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
