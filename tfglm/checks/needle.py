"""Keys in long filler, some corrected later: what a model still knows of a text that its recent window is past.

Kinds: `single`, one key; `corrected`, one key with a later correction; `recall`, 16 keys of which some are corrected,
all asked for in one reply of lines `word: number`. The last value told is right; an earlier one is `outdated`, a
failure of its own. First values lie in the first 80 % of the text, corrections before 90 %, so the end of the
prompt has none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random

from tfglm.checks.problem import RIGHT, Grade, Outcome, Problem, Reply, folded, invalid, numbers, shown, user, wrong
from tfglm.checks.words import CITIES, COLOURS, NAMES, NOUNS

KINDS = ("single", "corrected", "recall")
RECALLED = 16
CORRECTED = 5
"""Keys of a recall that have a correction."""

VALUE = "The code for {} is {}."
CORRECTION = ("Correction: the code for {} is {}.", "The code for {} has changed to {}.", "The new code for {} is {}.")
QUESTION = ("What is the code for {}?", "Which code does {} have now?", "Give the code for {}.")
ENDING = " Reply with the code alone."
RECALL = "List the codes as they are now, one line `word: code` each, for: {}."
_FILLER = (
    "{name} walks to the market in {city}.",
    "The {colour} house in {city} belongs to {name}.",
    "In {city} it rains, and {name} stays at home.",
    "{name} paints the door {colour}.",
    "The road to {city} is long and quiet.",
    "{name} and {other} talk about the weather.",
    "A {colour} boat comes back to {city}.",
    "{other} asks {name} for some bread.",
    "Nothing much happens in {city} today.",
    "{name} reads an old book about {city}.",
)


def filler(rng: Random) -> str:
    """One sentence; no numbers, and none of the words that are keys."""
    name, other = rng.sample(NAMES, 2)
    return rng.choice(_FILLER).format(name=name, other=other, city=rng.choice(CITIES), colour=rng.choice(COLOURS))


def make(rng: Random, level: int) -> Problem:
    """For training and the quick suite: a short text, twice as long with every level."""
    sentences = rng.randint(10, 40) * 2**level
    return of_kind(rng, rng.choice(KINDS), sentences, rng.random(), level=level)


def of_kind(rng: Random, kind: str, sentences: int, depth: float, *, level: int = 0) -> Problem:
    """`sentences` of filler with the keys among them; `depth` in [0, 1]: where in the first 80 % a single one is.

    The keys, their values and the question do not depend on `sentences`. Values have three digits at level 0,
    else five.
    """
    count = RECALLED if kind == "recall" else 1
    keys = rng.sample(NOUNS, count)
    low, high = (100, 999) if level == 0 else (10_000, 99_999)
    values = rng.sample(range(low, high + 1), 2 * count)
    corrected = set(rng.sample(range(count), CORRECTED if kind == "recall" else int(kind == "corrected")))
    placed: list[tuple[float, int, str]] = []
    current: dict[str, int] = {}
    outdated: dict[str, int] = {}
    for at, key in enumerate(keys):
        where = 0.8 * (depth if count == 1 else rng.random())
        placed.append((where, 2 * at, VALUE.format(key, values[2 * at])))
        current[key] = values[2 * at]
        if at in corrected:
            outdated[key], current[key] = values[2 * at], values[2 * at + 1]
            later = where + (0.9 - where) * rng.uniform(0.2, 1.0)
            placed.append((later, 2 * at + 1, rng.choice(CORRECTION).format(key, current[key])))
    rng.shuffle(keys)
    ending = ENDING if level else ""
    asked = RECALL.format(", ".join(keys)) if kind == "recall" else rng.choice(QUESTION).format(keys[0]) + ending
    grade = _recall_grader(keys, current, outdated) if kind == "recall" else _one_grader(keys[0], current, outdated)
    answer = "\n".join(f"{key}: {current[key]}" for key in keys) if kind == "recall" else str(current[keys[0]])
    text = _woven(Random(rng.getrandbits(64)), sentences, sorted(placed))
    return Problem("needle", kind, "", (user(f"{text}\n\n{asked}"),), grade, answer=answer, level=level)


def _woven(rng: Random, sentences: int, placed: list[tuple[float, int, str]]) -> str:
    """The filler with each key before the sentence that its share of the text falls on; ten sentences a paragraph."""
    out: list[str] = []
    waiting = list(reversed(placed))
    for at in range(sentences):
        while waiting and waiting[-1][0] * sentences <= at:
            out.append(waiting.pop()[2])
        out.append(filler(rng))
    out.extend(text for _, _, text in reversed(waiting))
    return "\n\n".join(" ".join(out[at : at + 10]) for at in range(0, len(out), 10))


def _one_grader(key: str, current: dict[str, int], outdated: dict[str, int]) -> Callable[[Reply], Grade]:
    def grade(reply: Reply) -> Grade:
        found = numbers(reply.content)
        if not found:
            return invalid(f"no number in {shown(reply.content)}")
        if found[-1] == current[key]:
            return RIGHT
        if found[-1] == outdated.get(key):
            return Grade("outdated", f"{key}: {found[-1]} was corrected to {current[key]}")
        return wrong(f"{key}: {found[-1]} instead of {current[key]}")

    return grade


def _recall_grader(keys: list[str], current: dict[str, int], outdated: dict[str, int]) -> Callable[[Reply], Grade]:
    """Per key the first number behind its last mention that has one in its line; right as a whole if all are."""

    def one(key: str, lines: list[str]) -> str:
        named = [line for line in lines if re.search(rf"(?<!\w){key}(?!\w).*\d", line)]
        if not named:
            return "missing"
        value = abs(numbers(named[-1].rpartition(key)[2])[0])
        return "right" if value == current[key] else "outdated" if value == outdated.get(key) else "wrong"

    def grade(reply: Reply) -> Grade:
        lines = folded(reply.content).splitlines()
        counts = Counter(one(key, lines) for key in keys)
        if counts["right"] == len(keys):
            return Grade("right", score=1.0, counts=(("right", len(keys)),))
        told = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        outcome: Outcome = "outdated" if counts["outdated"] and not (counts["wrong"] or counts["missing"]) else "wrong"
        return Grade(outcome, f"of {len(keys)} keys {told}", counts["right"] / len(keys), tuple(sorted(counts.items())))

    return grade
