"""What one start learned the next one knows, and no file can harm it."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tfglm.drafts.base import Draft
from tfglm.drafts.calibration import Calibration
from tfglm.drafts.costs import THREE_SPARKS
from tfglm.drafts.learned import FILE, Learned
from tfglm.drafts.policy import Policy, Record
from tfglm.drafts.speculator import Speculator
from tfglm.engine.drafting import Drafting

SURE = Draft((1, 2, 3), (0.9, 0.9, 0.9), "dspark")
COPY = Draft((1, 2), (0.6, 0.6), "copy-prompt", 9)


def taught(policy: Policy, rounds: int = 60) -> Policy:
    dice, record = random.Random(1), Record()
    for _ in range(rounds):
        for draft in (SURE, COPY):
            targets = [token if dice.random() < 0.4 else 9 for token in draft.tokens]
            policy.settle(draft, targets, record)
    return policy


def survivals(policy: Policy) -> list[float]:
    return [*policy.survivals(SURE, Record()), *policy.survivals(COPY, Record())]


def test_the_next_start_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    policy = taught(Policy(THREE_SPARKS, Learned(tmp_path / "new", "a")))
    drafting = Drafting(Speculator(None, policy, copy=True, vocab_size=10))
    drafting.end()
    again = Policy(THREE_SPARKS, Learned(tmp_path / "new", "a"))
    assert survivals(again) == survivals(policy) != survivals(Policy(THREE_SPARKS))
    assert survivals(taught(again)) == survivals(taught(policy)), "variances too"
    other = Policy(THREE_SPARKS, Learned(tmp_path / "new", "b"))
    assert survivals(other) == survivals(Policy(THREE_SPARKS))


def test_models_and_drafters_do_not_forget_each_other(tmp_path: Path) -> None:
    first = taught(Policy(THREE_SPARKS, Learned(tmp_path, "first")))
    first.end()
    for number in range(31):
        Policy(THREE_SPARKS, Learned(tmp_path, str(number))).end()
    assert survivals(Policy(THREE_SPARKS, Learned(tmp_path, "first"))) == survivals(first)
    Policy(THREE_SPARKS, Learned(tmp_path, "31")).end()
    assert survivals(Policy(THREE_SPARKS, Learned(tmp_path, "first"))) == survivals(Policy(THREE_SPARKS))


GOOD = ["mtp", 0, False, [0.0, 1.0, 0.0, 0.0], [0.5, 0.05, 0.5, 0.05]]


def bad(at: int, value: Any) -> list[Any]:
    return [value if i == at else one for i, one in enumerate(GOOD)]


@pytest.mark.parametrize(
    "content",
    [
        "{", "", "[]", "\x00", "[" * 100_000, '{"a": 3}', '{"a": null}', '{"a": {"b": 1}}', '{"a": [1]}', '{"a": [[]]}',
        *(
            json.dumps({"a": [bad(at, value)]})
            for at, value in [
                (0, 5), (1, "x"), (2, 0), (3, [0.0]), (3, [0.0, 1.0, 0.0, float("nan")]), (3, ["a", 1, 2, 3]), (3, 7),
                (3, [1e9, 0, 0, 0]), (3, [10**400, 0, 0, 0]), (4, [0.5, 0.05, 0.5, -1.0]), (4, [0.5] * 5),
                (4, [float("inf")] * 4), (4, None), (3, [[], 0, 0, 0]),
            ]
        ),
    ],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_learned_anew(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(content)
    with caplog.at_level(logging.WARNING):
        policy = Policy(THREE_SPARKS, Learned(tmp_path, "a"))
    assert survivals(policy) == survivals(Policy(THREE_SPARKS))
    assert content in ("[]", '{"a": null}') or "W_CALIBRATION" in caplog.text
    taught(policy).end()
    assert survivals(Policy(THREE_SPARKS, Learned(tmp_path, "a"))) == survivals(policy)


def test_a_good_file_is_taken() -> None:
    assert Calibration.from_facts([GOOD]).facts() == [GOOD]


def test_a_folder_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        taught(Policy(THREE_SPARKS, Learned(tmp_path / "file", "a"))).end()
    assert "cannot be written" in caplog.text
