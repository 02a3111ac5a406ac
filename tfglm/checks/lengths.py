"""Needles whose prompts have a chosen number of tokens, as the server counts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tfglm.checks import needle
from tfglm.checks.client import Server
from tfglm.checks.errors import CheckError
from tfglm.checks.problem import Problem

_SHORT, _LONG = 40, 240
"""Sentences of the two texts that show how many tokens a sentence has."""
_LEAST = 20
"""Sentences below which keys and corrections lie side by side."""


@dataclass(frozen=True)
class Placed:
    """A needle problem with the length asked for, and where its key is (None for a recall, whose keys are all over)."""

    problem: Problem
    length: int
    depth: float | None


async def needles(server: Server, lengths: list[int], count: int, seed: int, level: int) -> list[Placed]:
    """`count` problems a length and kind, their depths evenly spread. Raises CheckError or ServerError."""
    found: list[Placed] = []
    for kind in needle.KINDS:
        slope, start, tokenizes = await _tokens_a_sentence(server, kind, seed, level)
        for length in lengths:
            sentences = int((length - start) / slope)
            if tokenizes and sentences > _LEAST:
                sentences += int((length - await _count(server, _make(kind, sentences, 0.5, seed, level))) / slope)
            if sentences < _LEAST:
                least = int(start + (_LEAST + 1) * slope)
                raise CheckError(f"a {kind} needle of {length} tokens has no room for its keys; the least is {least}")
            for at in range(count):
                depth = at / max(1, count - 1)
                problem = _make(kind, sentences, depth, seed * 1000 + at, level)
                found.append(Placed(replace(problem, number=len(found)), length, None if kind == "recall" else depth))
    return found


def _make(kind: str, sentences: int, depth: float, number: int, level: int) -> Problem:
    return needle.of_kind(Random(f"needle {kind} {level} {number}"), kind, sentences, depth, level=level)


async def _tokens_a_sentence(server: Server, kind: str, seed: int, level: int) -> tuple[float, float, bool]:
    """Tokens a sentence, tokens of a text without any, and whether the server has /tokenize."""
    short, long = (_make(kind, sentences, 0.5, seed, level) for sentences in (_SHORT, _LONG))
    few = await server.prompt_tokens(short)
    tokenizes = few is not None
    few = few if few is not None else await server.prompt_usage(short)
    many = await (_count(server, long) if tokenizes else server.prompt_usage(long))
    if many <= few:
        raise CheckError(
            f"{server.url} counts {few} and {many} prompt tokens for texts of {_SHORT} and {_LONG} sentences, so that "
            "no length can be chosen: it needs /tokenize or usage.prompt_tokens"
        )
    slope = (many - few) / (_LONG - _SHORT)
    return slope, few - _SHORT * slope, tokenizes


async def _count(server: Server, problem: Problem) -> int:
    return await server.prompt_tokens(problem) or 0


def parsed(text: str) -> list[int]:
    """`2k,8k,64k` as tokens; k is 1024, m is 1024². Raises ValueError."""
    found = []
    for part in text.lower().split(","):
        unit = {"k": 1 << 10, "m": 1 << 20}.get(part.strip()[-1:], 1)
        found.append(int(part.strip().rstrip("km")) * unit)
    if min(found) <= 0:
        raise ValueError("a length is a positive number of tokens")
    return found
