"""Waiting for a cluster: an answer, or the reason why none will come."""

import json
from pathlib import Path
from typing import Any

import pytest
from spark import write

from tfglm.hosts.serving import nonsense, wait


class Clock:
    """A start of which each second shows one state; the last one stays."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *seconds: dict[str, Any]) -> None:
        self.root, self.seconds, self.now = root, seconds, 0.0
        monkeypatch.setattr("tfglm.hosts.serving.time.monotonic", lambda: self.now)
        self.sleep(0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        state = self.seconds[min(int(self.now), len(self.seconds) - 1)]
        self.health, self.unit = state.get("health", 0), state.get("unit", "activating")
        write(self.root, "run/tfglm/rank0.json", json.dumps({"ranks": state.get("ranks", [])}))

    def wait(self, seconds: float = 100, peer_seconds: float = 10) -> str:
        return wait(
            0,
            "http://x/health",
            seconds,
            peer_seconds,
            sysroot=self.root,
            unit_state=lambda rank: self.unit,
            health=lambda url: self.health,
            sleep=self.sleep,
        )


def rank(number: int, phase: str, **more: Any) -> dict[str, Any]:
    return {"rank": number, "name": f"spark{number}", "control": f"10.0.0.{number}", "phase": phase, **more}


def test_an_answer_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch, {"health": 0}, {"health": 503}, {"health": 200})
    assert clock.wait() == ""
    assert clock.now == 2


def test_a_failed_unit_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"unit": "failed", "ranks": [rank(0, "gone", reason="memory: needs 104 GiB")]}
    clock = Clock(tmp_path, monkeypatch, {}, failed)
    assert clock.wait().startswith("E_RANKS: tfglm@0 has given up (memory: needs 104 GiB)")
    assert clock.now == 1


def test_another_rank_that_gave_up_is_named_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"ranks": [rank(0, "waiting"), rank(1, "gone", code="E_CHECKPOINT", reason="no mount")]}
    assert Clock(tmp_path, monkeypatch, gone).wait() == "E_CHECKPOINT: rank 1 on spark1 has given up (no mount)"


def test_a_rank_that_is_never_heard_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch, {"ranks": [rank(0, "waiting"), rank(2, "unknown", reason="not heard of yet")]})
    assert "rank 2 on spark2 (10.0.0.2) was not heard of for 10 s" in clock.wait()


def test_the_limit_says_what_every_rank_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [rank(0, "waiting", reason="for rank 1"), rank(1, "preparing", reason="waiting for the mount of /m")]
    clock = Clock(tmp_path, monkeypatch, {"ranks": ranks})
    assert clock.wait(seconds=30).endswith(
        "rank 0 waiting (for rank 1), rank 1 preparing (waiting for the mount of /m)"
    )
    assert clock.now == 30


@pytest.mark.parametrize(
    ("reply", "expected", "said"),
    [
        ("Paris.", "(?i)paris", ""),
        ("The answer is 42", "", ""),
        ("  \n", "", "it is empty"),
        ("!!!!!!!!!!!!", "", "12 of its 12 characters are '!'"),
        ("Lyon", "(?i)paris", "it has nothing of '(?i)paris'"),
        ("aaa", "", ""),
    ],
)
def test_a_reply_must_have_sense(reply: str, expected: str, said: str) -> None:
    assert nonsense(reply, expected) == said
