"""One question and its reply, as every subject makes them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Exchange:
    """thinking: what is thought before `answer`. aloud: the whole reply where thinking is off, "" for `answer`."""

    prompt: str
    thinking: str
    answer: str
    aloud: str = ""


def pick(rng: Random, *choices: str) -> str:
    return choices[rng.randrange(len(choices))]


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
