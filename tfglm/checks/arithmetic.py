"""Chained arithmetic. Level 0: two to four terms below 100, nothing below zero. Level 4: nested, with three digits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tfglm.checks.problem import Problem, number_grader, user

PHRASES = ("{} = ?", "What is {}?", "Calculate {}.", "Work out {}.")
ENDING = " End your reply with the result."


@dataclass(frozen=True)
class _Limits:
    terms: tuple[int, int]
    top: int
    times: float
    """share of multiplications"""
    factor: int
    brackets: float
    signed: bool = True


_LEVELS = (
    _Limits((2, 4), 99, 0.0, 1, 0.0, signed=False),
    _Limits((4, 6), 999, 0.0, 1, 0.0),
    _Limits((3, 5), 99, 0.3, 12, 0.2),
    _Limits((6, 8), 999, 0.35, 25, 0.35),
    _Limits((10, 14), 9999, 0.4, 999, 0.5),
)


def make(rng: Random, level: int) -> Problem:
    limits = _LEVELS[level]
    count = rng.randint(*limits.terms)
    if limits.times == 0.0:
        text, value, steps = _chain(rng, count, limits)
    else:
        text, value, steps = _tree(rng, count, limits)
    prompt = rng.choice(PHRASES).format(text) + (ENDING if level else "")
    return Problem(
        "arithmetic", "chain" if limits.times == 0.0 else "nested", text, (user(prompt),), number_grader(value),
        answer=str(value), steps="\n".join(steps),
    )  # fmt: skip


def _chain(rng: Random, count: int, limits: _Limits) -> tuple[str, int, list[str]]:
    value = rng.randint(1, limits.top)
    text, steps = str(value), []
    for _ in range(count - 1):
        minus = rng.random() < 0.5 and (limits.signed or value > 0)
        term = rng.randint(1, limits.top if limits.signed or not minus else min(value, limits.top))
        after = value - term if minus else value + term
        text += f" {'-' if minus else '+'} {term}"
        steps.append(f"{value} {'-' if minus else '+'} {term} = {after}")
        value = after
    return text, value, steps


def _tree(rng: Random, count: int, limits: _Limits) -> tuple[str, int, list[str]]:
    """An expression of `count` numbers split at random; brackets wherever precedence needs them."""
    steps: list[str] = []

    def build(size: int) -> tuple[str, int, int]:  # text, value, precedence: 0 sum, 1 product, 2 atom
        if size == 1:
            value = rng.randint(2, limits.top if rng.random() < 0.5 else 99)
            return str(value), value, 2
        if rng.random() < limits.times:
            text, value, rank = build(size - 1)
            factor = rng.randint(2, limits.factor if abs(value) < 10_000 else 9)
            steps.append(f"{value} * {factor} = {value * factor}")
            return f"{text if rank else f'({text})'} * {factor}", value * factor, 1
        left = size - 1 if rng.random() >= limits.brackets else rng.randint(1, size - 1)
        (a, x, _), (b, y, rank) = build(left), build(size - left)
        if rng.random() < 0.5:
            steps.append(f"{x} - {y} = {x - y}")
            return f"{a} - {b if rank else f'({b})'}", x - y, 0
        steps.append(f"{x} + {y} = {x + y}")
        return f"{a} + {b}", x + y, 0

    text = ""
    while "*" not in text:
        steps.clear()
        text, value, _ = build(count)
    return text, value, steps
