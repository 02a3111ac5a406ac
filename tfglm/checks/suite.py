"""All problems by (category, number, level), and which numbers are for measuring and which for training.

A problem is a function of category, level and number alone: the same bytes in every process and on every machine.
Numbers below 1,000,000 are the test set, the others are free for training. Since two numbers may ask the same (chains
of two small terms do), what is asked is split as well: a hash of the problem's `key`, which leaves out its wording,
decides whether it may have a test number, and a generator draws until it finds one that may. Without a key, and so on
both sides, are facts of closed lists (capitals, the day after Monday), Python tasks that differ in one small number
only (level 1, and those of levels 3 and 4 that are no list of steps), and needles, which are drawn from too many to
meet again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from tfglm.checks import arithmetic, ledger, needle, python, questions, structured, tools
from tfglm.checks.problem import Problem, dumps

Generator = Callable[[Random, int], Problem]

CATEGORIES: dict[str, Generator] = {
    "questions": questions.make,
    "arithmetic": arithmetic.make,
    "ledger": ledger.make,
    "python": python.make,
    "json": structured.make,
    "tools": tools.make,
}
LEVELS = 5
TEST_NUMBERS = 1_000_000
A_SEED = 1_000
"""Numbers a seed of the command line has: seed 3 asks numbers 3000, 3001, ..."""
SEEDS = TEST_NUMBERS // A_SEED
HELD_OUT = 1 / 8
"""Share of what can be asked that only test numbers ask."""


def problem(category: str, number: int, level: int) -> Problem:
    """Raises KeyError for a category or IndexError for a level that there is not."""
    return draw(category, CATEGORIES[category], number, level)


def draw(name: str, make: Generator, number: int, level: int) -> Problem:
    """The first problem of the number's generator that is on the number's side of the split."""
    rng = Random(f"{name} {level} {number}")
    while True:
        found = make(rng, level)
        if not found.key or held_out(found.key) == (number < TEST_NUMBERS):
            return replace(found, level=level, number=number)


def held_out(key: str) -> bool:
    """Whether only test numbers ask this."""
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return first < HELD_OUT * 2**64


def suite(categories: Sequence[str], levels: Sequence[int], count: int, seed: int) -> Iterator[Problem]:
    """`count` different problems a category and level, from the test set; fewer where a seed's numbers ask no more."""
    for category in categories:
        for level in levels:
            asked: set[str] = set()
            for at in range(A_SEED):
                found = problem(category, seed * A_SEED + at, level)
                text = dumps([found.messages, found.tools])
                if text not in asked:
                    asked.add(text)
                    yield found
                if len(asked) == count:
                    break


def training_needle(number: int, level: int) -> Problem:
    """A needle in a short text (see needle.make); its length doubles with every level."""
    return draw("needle", needle.make, number, level)


def tool_calls(levels: Sequence[int], count: int, seed: int) -> Iterator[Problem]:
    """`count` problems a kind of tool call and level, from the test set."""
    for kind in tools.KINDS:
        for level in levels:
            for at in range(count):
                number = seed * A_SEED + at
                yield draw(f"tools {kind}", partial(tools.of_kind, kind=kind), number, level)
