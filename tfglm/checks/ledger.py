"""A ledger of transfers: who has how much at the end. Level 0: three names, three to six transfers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tfglm.checks.problem import Problem, number_grader, user
from tfglm.checks.words import NAMES

TRANSFERS = ("{a} gives {b} {n}.", "{a} pays {b} {n}.", "{b} gets {n} from {a}.")
QUESTIONS = ("How much does {} have now?", "What does {} have at the end?", "How much has {} got now?")
ENDING = " End your reply with the amount."


@dataclass(frozen=True)
class _Limits:
    names: int
    transfers: tuple[int, int]
    top: int
    cancelled: int = 0
    halves: float = 0.0


_LEVELS = (
    _Limits(3, (3, 6), 50),
    _Limits(4, (7, 10), 90),
    _Limits(5, (14, 18), 500, halves=0.1),
    _Limits(8, (35, 45), 900, cancelled=3, halves=0.1),
    _Limits(14, (110, 130), 5000, cancelled=8, halves=0.15),
)


def make(rng: Random, level: int) -> Problem:
    """Nobody gives what he has not got. A cancelled transfer is one that is undone at the end by the same amount."""
    limits = _LEVELS[level]
    names = rng.sample(NAMES, limits.names)
    has = {name: rng.randint(5, limits.top) for name in names}
    lines = [", ".join(f"{name} has {has[name]}" for name in names) + "."]
    steps: list[str] = []
    done: list[tuple[str, str, int]] = []
    for _ in range(rng.randint(*limits.transfers)):
        a = rng.choice([name for name in names if has[name] > 1])
        b = rng.choice([name for name in names if name != a])
        half = rng.random() < limits.halves and has[a] % 2 == 0
        amount = has[a] // 2 if half else rng.randint(1, has[a])
        lines.append(f"{a} gives {b} half." if half else rng.choice(TRANSFERS).format(a=a, b=b, n=amount))
        steps.append(_move(has, a, b, amount))
        done.append((a, b, amount))
    for at in sorted(rng.sample(range(len(done)), limits.cancelled)):
        a, b, amount = done[at]
        lines.append(f"Transfer {at + 1} was a mistake: {b} returns that amount to {a}, even if {b} then owes money.")
        steps.append(_move(has, b, a, amount))
    asked = rng.choice(names)
    ending = ENDING if level else ""
    text = " ".join(lines) if level < 2 else "\n".join([lines[0], *(f"{n}. {x}" for n, x in enumerate(lines[1:], 1))])
    prompt = f"{text}{' ' if level < 2 else chr(10)}{rng.choice(QUESTIONS).format(asked)}{ending}"
    return Problem(
        "ledger", "transfers", text + asked, (user(prompt),), number_grader(has[asked]), answer=str(has[asked]),
        steps="\n".join(steps),
    )  # fmt: skip


def _move(has: dict[str, int], a: str, b: str, amount: int) -> str:
    has[a] -= amount
    has[b] += amount
    return f"{a} {has[a] + amount} - {amount} = {has[a]}, {b} {has[b] - amount} + {amount} = {has[b]}"
