"""A problem, a reply, a grade; and where in a reply the answer is.

An answer is looked for in the content alone, never in the reasoning:

- a number: the last one. Thousands may have commas (1,234), decimals a point; a minus counts as a sign unless a digit
  or a letter stands right before it. `34.0` is 34.
- one of several words: the one that is named last, in any case.
- code: the last fenced block that defines the function asked for; without a fence all that begins with its `def`.
- JSON: the first `{` from which a whole object can be read. Comments, NaN and single quotes are not JSON.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

Json = dict[str, Any]
Outcome = Literal["right", "wrong", "outdated", "invalid", "cut"]
"""`outdated`: a value that a later correction replaced. `invalid`: no answer of the kind asked for (no number, no JSON,
JSON outside its schema, code that does not run, a call that the tool does not take). `cut`: the reply reached its limit
before a right answer."""


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is JSON text as it came."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Grade:
    """`score` is 0 or 1, or the share of the keys of a recall that are right."""

    outcome: Outcome
    detail: str = ""
    score: float = 0.0
    counts: tuple[tuple[str, int], ...] = ()


RIGHT = Grade("right", score=1.0)


@dataclass(frozen=True)
class Problem:
    """A conversation that ends with a question, and what to make of the reply.

    `key` names what is asked apart from its wording, for the split of seeds (tfglm.checks.suite); "" for facts of a
    closed list. `answer` and `calls` are a right reply, `steps` how it is found: what a training set needs.
    """

    category: str
    kind: str
    key: str
    messages: tuple[Json, ...]
    grade: Callable[[Reply], Grade] = field(compare=False, repr=False)
    answer: str = ""
    steps: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Json, ...] = ()
    level: int = 0
    number: int = 0

    @property
    def id(self) -> str:
        return f"{self.category}/{self.kind}/{self.level}/{self.number}"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def wrong(detail: str) -> Grade:
    return Grade("wrong", detail)


def invalid(detail: str) -> Grade:
    return Grade("invalid", detail)


def judge(problem: Problem, reply: Reply) -> Grade:
    """The problem's grade; a reply without a right answer that ended at its limit is `cut`, whatever else it is."""
    grade = problem.grade(reply)
    if grade.outcome != "right" and reply.finish == "length":
        return Grade(
            "cut", f"the reply ended at its limit of {reply.completion_tokens} tokens", grade.score, grade.counts
        )
    return grade


_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?")


def numbers(text: str) -> list[Fraction]:
    """Every number of the text, in order."""
    return [Fraction(found.replace("−", "-").replace(",", "")) for found in _NUMBER.findall(text)]


def number_grader(expected: int) -> Callable[[Reply], Grade]:
    def grade(reply: Reply) -> Grade:
        found = numbers(reply.content)
        if not found:
            return invalid(f"no number in {shown(reply.content)}")
        return RIGHT if found[-1] == expected else wrong(f"{found[-1]} instead of {expected}")

    return grade


def last_named(text: str, choices: Iterable[str]) -> str | None:
    """The choice whose last mention, as words of its own, ends last; the longest of those that end together."""
    plain = folded(text)
    best: tuple[int, int, str] | None = None
    for choice in choices:
        for match in re.finditer(rf"(?<!\w){re.escape(folded(choice))}(?!\w)", plain):
            if best is None or (match.end(), len(choice)) > best[:2]:
                best = (match.end(), len(choice), choice)
    return best[2] if best else None


def choice_grader(expected: str, choices: Sequence[str]) -> Callable[[Reply], Grade]:
    def grade(reply: Reply) -> Grade:
        found = last_named(reply.content, choices)
        if found is None:
            return invalid(f"none of the {len(choices)} possible answers in {shown(reply.content)}")
        return RIGHT if folded(found) == folded(expected) else wrong(f"{found} instead of {expected}")

    return grade


def word_grader(expected: str) -> Callable[[Reply], Grade]:
    """The last word of the reply, without punctuation and in any case."""

    def grade(reply: Reply) -> Grade:
        words = re.findall(r"\w+", folded(reply.content))
        if not words:
            return invalid("no word")
        return RIGHT if words[-1] == folded(expected) else wrong(f"{words[-1][:40]} instead of {expected}")

    return grade


_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


def code(text: str, function: str) -> str | None:
    """The source that defines `function`, or None."""
    defines = re.compile(
        rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^{re.escape(function)}[ \t]*=", re.MULTILINE
    )
    blocks = [body for _, body in _FENCE.findall(text if text.endswith("\n") else text + "\n") if defines.search(body)]
    if blocks:
        return str(blocks[-1])
    start = defines.search(text)
    return None if start is None or "```" in text else text[start.start() :]


def json_object(text: str) -> Json | None:
    """The first JSON object of the text, or None."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 2 and 2.0 are one number, true is none, text is compared in composed form (NFC)."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, str) and isinstance(b, str):
        return unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return a is None and b is None


def folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def shown(text: str) -> str:
    """The text for a table: one line, its end if it is long."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else "…" + line[-60:])


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
