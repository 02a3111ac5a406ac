"""The problems of `tfglm check`: right answers by other means, the split of seeds, where answers are looked for."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from tfglm.checks import needle, tools
from tfglm.checks.compare import mcnemar, pairs
from tfglm.checks.lengths import parsed
from tfglm.checks.problem import RIGHT, Call, Problem, Reply, code, json_object, judge, last_named, numbers, same
from tfglm.checks.run import Result
from tfglm.checks.schema import broken
from tfglm.checks.suite import (
    CATEGORIES,
    LEVELS,
    TEST_NUMBERS,
    held_out,
    problem,
    suite,
    tool_calls,
    training_needle,
)  # fmt: skip
from tfglm.checks.words import NOUNS


def some(category: str, numbers_of: range, levels: range = range(LEVELS)) -> Iterator[Problem]:
    return (problem(category, number, level) for level in levels for number in numbers_of)


def text(found: Problem) -> str:
    return str(found.messages[-1]["content"])


# --- right answers


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_answer_is_right_and_nothing_else_is(category: str) -> None:
    for found in some(category, range(12)):
        assert judge(found, Reply(found.answer, calls=found.calls)) == RIGHT, found.id
        if found.kind != "none":
            assert judge(found, Reply("I do not know.")).outcome in ("wrong", "invalid"), found.id
        assert judge(found, Reply("")).outcome in ("wrong", "invalid"), found.id


def test_arithmetic_by_python() -> None:
    for found in some("arithmetic", range(200)):
        asked = re.search(r"[-(\d][-+*() \d]*[\d)]", text(found))
        assert asked is not None and eval(asked[0]) == int(found.answer), text(found)
        assert found.steps.splitlines()[-1].endswith(f"= {found.answer}")
        for line in found.steps.splitlines():
            left, right = line.split(" = ")
            assert eval(left) == int(right)
        if found.level == 0:
            values = [int(x) for x in re.findall(r"\d+", asked[0])]
            assert 2 <= len(values) <= 4 and max(values) < 100 and int(found.answer) >= 0
        assert found.level < 2 or "*" in asked[0]


def test_ledgers_by_reading_them() -> None:
    for found in some("ledger", range(60)):
        has = {name: int(n) for name, n in re.findall(r"(\w+) has (\d+)", text(found))}
        done: list[tuple[str, str, int]] = []
        moves = r"(\w+) (?:gives|pays) (\w+) (\d+|half)\.|(\w+) gets (\d+) from (\w+)\.|Transfer (\d+) was a mistake"
        for a, b, n, other, m, source, undone in re.findall(moves, text(found)):
            if undone:
                b, a, amount = done[int(undone) - 1]
            else:
                a, b = (a, b) if a else (source, other)
                amount = has[a] // 2 if n == "half" else int(n or m)
                assert 0 < amount <= has[a]
                done.append((a, b, amount))
            has[a] -= amount
            has[b] += amount
        [asked] = [name for name in has if re.search(rf"(?:does|has) {name} (?:have|got)", text(found))]
        assert has[asked] == int(found.answer), text(found)
        if found.level == 0:
            assert len(has) == 3 and 3 <= len(done) <= 6


def test_choices_hold_the_answer_once() -> None:
    for found in some("questions", range(80)):
        if found.kind == "choice":
            assert judge(found, Reply(f"**{found.answer.upper()}**.")) == RIGHT


def test_needles_keep_keys_out_of_the_end_and_their_order() -> None:
    for number in range(60):
        for kind in needle.KINDS:
            found = needle.of_kind(Random(number), kind, 300, number / 59)
            told = [
                (match.start(), match[1])
                for match in re.finditer(r"code for (\w+) (?:is|has changed to) \d", text(found))
            ]
            assert len(told) == {"single": 1, "corrected": 2, "recall": 21}[kind]
            assert max(at for at, _ in told) < 0.92 * len(text(found))
            assert judge(found, Reply(found.answer)).outcome == "right"
            if kind == "single":
                assert abs(told[0][0] / len(text(found)) - 0.8 * number / 59) < 0.05


def test_filler_has_neither_numbers_nor_keys() -> None:
    words = {word for n in range(3000) for word in re.findall(r"\w+", needle.filler(Random(n)).lower())}
    assert not any(key in other for key in NOUNS for other in NOUNS if key != other)
    assert not words & set(NOUNS) and not any(word.isdigit() for word in words) and len(words) > 60


def test_a_recall_is_graded_key_by_key() -> None:
    found = needle.of_kind(Random(5), "recall", 60, 0.0)
    lines = found.answer.splitlines()
    told = dict(re.findall(r"code for (\w+) is (\d+)\.", re.sub(r"Correction:.*?\.|The new .*?\.", "", text(found))))
    stale = next(n for n, line in enumerate(lines) if line.split(": ")[1] != told[line.split(": ")[0]])
    lines[stale] = f"{lines[stale].split(': ')[0]}: {told[lines[stale].split(': ')[0]]}"
    assert judge(found, Reply("\n".join(lines))).outcome == "outdated"
    other = next(n for n in range(16) if n != stale)
    del lines[other]
    grade = judge(found, Reply("\n".join(lines)))
    assert grade.outcome == "wrong" and grade.score == 14 / 16
    assert dict(grade.counts) == {"missing": 1, "outdated": 1, "right": 14}
    assert judge(found, Reply("\n".join(lines), finish="length")).outcome == "cut"
    numbered = enumerate(found.answer.splitlines(), 1)
    listed = "\n".join(f"{n}. **{line.replace(': ', '** – ')} (was 7)" for n, line in numbered)
    assert judge(found, Reply(listed)) == judge(found, Reply(found.answer))


# --- seeds


PRINT = """
import hashlib, json
from tfglm.checks.suite import CATEGORIES, suite, tool_calls, training_needle
found = [*suite(list(CATEGORIES), range(5), 5, 3), *tool_calls([0, 4], 3, 3), training_needle(2_000_000, 1)]
told = json.dumps([[p.id, p.messages, p.tools, p.answer, p.steps, [c.arguments for c in p.calls]] for p in found])
print(hashlib.sha256(told.encode()).hexdigest())
"""


def test_another_process_makes_the_same_bytes() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PRINT], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_published_problems_stay_as_they_are() -> None:
    """Figures of different days compare only while this holds: a changed suite needs other numbers here, and a word."""
    found = [text(problem(category, 0, 0)) for category in CATEGORIES]
    assert found == PUBLISHED


PUBLISHED = [
    "The parrot is grey, the pepper is black, the meadow is brown. What colour is the parrot? "
    "Answer with the word only.",
    "3 - 3 = ?",
    "Dan has 28, Will has 13, Olga has 23. Will pays Olga 9. Will gives Dan 2. Dan gives Will 8. "
    "What does Dan have at the end?",
    "Python: f(s) returns s repeated 5 times.",
    "Tina lives in Cairo. Give name and city as JSON.",
    "Which is larger, 24 or 92? Use no tool.",
]


@pytest.mark.parametrize("category", CATEGORIES)
def test_training_asks_nothing_of_the_test_set(category: str) -> None:
    tested = {found.key for found in some(category, range(300), range(2))} - {""}
    trained = {found.key for found in some(category, range(TEST_NUMBERS, TEST_NUMBERS + 1500), range(2))} - {""}
    assert tested and trained and not tested & trained
    assert all(map(held_out, tested)) and not any(map(held_out, trained))


def test_suites_of_two_seeds_differ_and_no_suite_asks_twice() -> None:
    suites = [[json.dumps(found.messages) + json.dumps(found.tools) for found in suite(list(CATEGORIES), [0], 40, seed)]
              for seed in (0, 1)]  # fmt: skip
    assert len(set(suites[0])) == len(suites[0]) == 240 and len(set(suites[0]) & set(suites[1])) < 60
    assert len({found.id for found in tool_calls([0, 1], 5, 0)}) == len(tools.KINDS) * 10


def test_a_few_problems_have_no_end() -> None:
    """A seed whose numbers ask no more gives fewer, instead of going on for ever."""
    assert 10 < len(list(suite(["python"], [4], 500, 0))) < 50


# --- where answers are looked for


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("The answer is 34.", 34),
        ("17 + 25 - 8 = **34**", 34),
        ("It is -5", -5),
        ("It is −5", -5),
        ("10-5", 5),
        ("\\boxed{1,234,567}", 1234567),
        ("34.0", 34),
        ("3.50", Fraction(7, 2)),
        ("1,2", 2),
        ("x = -12,345.5.", Fraction(-24691, 2)),
        ("١٢ is 12", 12),
    ],
)
def test_the_last_number(said: str, last: int) -> None:
    assert numbers(said)[-1] == last


def test_the_last_word_of_several() -> None:
    assert last_named("Not Monday; it is **tuesday**, as on Mondays.", ["Monday", "Tuesday"]) == "Tuesday"
    assert last_named("Paul", ["Pau", "Paul"]) == "Paul"
    assert last_named("in São Paulo (SÃO PAULO)", ["São Paulo", "Paulo"]) == "São Paulo"
    assert last_named("none", ["Monday"]) is None


def test_code_is_found() -> None:
    assert (
        code("Here:\n```python\ndef f(x):\n    return 1\n```\nUse:\n```\nf(2)\n```", "f") == "def f(x):\n    return 1\n"
    )
    assert code("```\ndef f(): return 1\n```\nBetter:\n~~~py\ndef f(): return 2\n~~~", "f") == "def f(): return 2\n"
    assert code("def f(x):\n    return x", "f") == "def f(x):\n    return x"
    assert code("Sure. \nf = lambda x: x", "f") == "f = lambda x: x"
    assert code("````md\n```\n````\n\n```\ndef g(): pass\n```", "f") is None
    assert code("```python\ndef f(x):\n    return", "f") is None


def test_json_is_found() -> None:
    assert json_object('Here {it} is: ```json\n{"a": {"b": [1]}}\n``` and {"c": 2}') == {"a": {"b": [1]}}
    assert json_object('{"a": NaN} {"a": 1}') == {"a": 1}
    for nothing in ("", "[1]", "{'a': 1}", '{"a": 1', "{" * 50_000):
        assert json_object(nothing) is None


def test_json_values_are_compared_with_their_types() -> None:
    assert same({"a": [1, None, "é"]}, {"a": [1.0, None, "e\u0301"]})
    for a, b in ((True, 1), (0, False), ("1", 1), (None, 0), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}), ([], {})):
        assert not same(a, b) and not same(b, a)


def test_schemas_as_a_validator_sees_them() -> None:
    """Every schema of the suites, with right values and values with one thing broken."""
    rng = Random(3)
    seen = {True: 0, False: 0}
    for level in range(LEVELS):
        for number in range(25):
            for found in (tools.of_kind(Random(number), level, kind) for kind in tools.KINDS):
                schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in found.tools}
                for call in found.calls:
                    schema, value = schemas[call.name], json.loads(call.arguments)
                    for candidate in (value, *(damaged(rng, value) for _ in range(6))):
                        valid = jsonschema_rs.is_valid(schema, candidate)
                        assert (broken(candidate, schema) is None) == valid, (candidate, schema)
                        seen[valid] += 1
    assert min(seen.values()) > 300


def damaged(rng: Random, value: Any) -> Any:
    """A copy with one field dropped, added or changed, anywhere."""
    value = json.loads(json.dumps(value))
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        at = rng.choice(keys)
        if isinstance(place[at], dict | list) and place[at] and rng.random() < 0.7:
            place = place[at]
            continue
        if rng.random() < 0.3:
            del place[at]
        else:
            place[at] = rng.choice([None, True, 1.5, 7, -3, 2.0, "text", [], {}, 0])
        return value


def test_calls_are_compared_in_any_order_and_count() -> None:
    found = tools.of_kind(Random(1), 3, "parallel")
    assert judge(found, Reply("", calls=found.calls[::-1])) == RIGHT
    assert "is not called" in judge(found, Reply("", calls=found.calls[1:])).detail
    assert judge(found, Reply("", calls=(*found.calls, found.calls[0]))).outcome == "wrong"
    first = found.calls[0]
    for broken_call in (Call(first.name, first.arguments[:-1]), Call("delete_all", "{}"), Call(first.name, "[]")):
        assert judge(found, Reply("", calls=(broken_call, *found.calls[1:]))).outcome == "invalid"
    spaced = Call(first.name, json.dumps(json.loads(first.arguments), indent=2, sort_keys=True))
    assert judge(found, Reply("", calls=(spaced, *found.calls[1:]))) == RIGHT


# --- comparison


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 5, 1.0),
        (0, 6, 0.03125),  # 2 / 64
        (1, 9, 0.021484375),  # 2 (1 + 10) / 1024
        (10, 2, 0.03857421875),  # 2 (1 + 12 + 66) / 4096
        (7, 12, 2 * 94184 / 2**19),  # 1+19+171+969+3876+11628+27132+50388 = 94184
    ],
)
def test_mcnemar_by_hand(a: int, b: int, p: float) -> None:
    assert mcnemar(a, b) == mcnemar(b, a) == p


def test_mcnemar_of_many_pairs_follows_the_normal_distribution() -> None:
    """With the continuity correction z = (|a - b| - 1) / sqrt(a + b)."""
    a, b = 5200, 4800
    z = (a - b - 1) / math.sqrt(a + b)
    assert math.isclose(mcnemar(a, b), math.erfc(z / math.sqrt(2)), rel_tol=3e-3)


def test_pairs_leave_out_what_one_side_did_not_answer() -> None:
    asked = [problem("arithmetic", number, 0) for number in range(5)]
    right = lambda p: Result(p, RIGHT)  # noqa: E731
    wrong = lambda p: Result(p, judge(p, Reply("")))  # noqa: E731
    none = lambda p: Result(p, None)  # noqa: E731
    a = [make(p) for make, p in zip((right, right, wrong, none, right), asked, strict=True)]
    b = [make(p) for make, p in zip((right, wrong, right, right, none), asked, strict=True)]
    found = pairs(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither, found.left_out) == (1, 1, 1, 0, 2)
    with pytest.raises(ValueError, match="same problems"):
        pairs(a, b[::-1])


def test_lengths() -> None:
    assert parsed("2k, 8K,1m,500") == [2048, 8192, 1 << 20, 500]
    for bad in ("", "2x", "0", "-1k", "k"):
        with pytest.raises(ValueError):
            parsed(bad)


def test_training_needles_are_short_and_have_all_kinds() -> None:
    made = [training_needle(TEST_NUMBERS + n, 0) for n in range(60)]
    assert {found.kind for found in made} == set(needle.KINDS)
    assert max(len(text(found).split()) for found in made) < 700
    assert len({hashlib.sha256(text(found).encode()).digest() for found in made}) == 60
