"""`tfglm status`: beside running supervisors, beside dead ones, and where there is no cluster."""

import json
import signal
import time
from pathlib import Path

import pytest
from supervised import Supervised

from tfglm.cli.main import main
from tfglm.cli.status import merged


def test_where_no_rank_runs_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"no rank runs here: {tmp_path} holds no state" in said
    assert "--inventory" in said


def test_beside_an_inventory_it_asks_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfglm.supervisor.state.STATE_DIR", tmp_path / "run")
    monkeypatch.setattr("tfglm.cli.status.play", lambda playbook, args: asked.append(playbook) or 0)
    assert main(["status"]) == 1
    (tmp_path / "inventory.ini").touch()
    assert main(["status"]) == 0
    assert asked == ["status.yml"]


def test_it_shows_every_rank_from_any_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Supervised(tmp_path, count=2) as two:
        two.start(1)
        two.until(lambda: "has not been heard of" in two.state(1)["reason"])
        assert main(["status", "--state", str(tmp_path / "run1")]) == 1
        said = capsys.readouterr().out
        assert "rank 1 (spark1): waiting for rank 0 (spark0), which has not been heard of" in said
        assert "unknown" in said
        two.start(0)
        two.until_serving(1)
        run1 = str(tmp_path / "run1")
        two.until(lambda: main(["status", "--state", run1]) == 0, 20, "rank 1 knows that rank 0 serves")
        said = capsys.readouterr().out
        assert f"the model is served at http://127.0.0.1:{two.port}/v1" in said
        assert main(["status", "--json", "--state", run1]) == 0
        state = json.loads(capsys.readouterr().out)
        assert [(rank["name"], rank["phase"]) for rank in state["ranks"]] == [
            ("spark0", "serving"),
            ("spark1", "serving"),
        ]
        assert all(rank["low_gib"] > 0 for rank in state["ranks"])
        two.signal(1, signal.SIGTERM)
        two.ended(1)
        assert main(["status", "--state", run1]) == 1
        assert "rank 1 (spark1): stopped in order" in capsys.readouterr().out


def test_a_state_that_is_no_longer_written_is_no_life() -> None:
    rank = {"rank": 0, "name": "a", "phase": "serving"}
    state = {"rank": 0, "cluster": "c", "updated": time.time(), "ranks": [rank]}
    assert merged([state])["ranks"][0]["phase"] == "serving"
    old = merged([state | {"updated": time.time() - 60}])["ranks"][0]
    assert (old["phase"], old["stale_s"]) == ("dead", 60)
    gone = state | {"updated": time.time() - 60, "ranks": [rank | {"phase": "gone"}]}
    assert merged([gone])["ranks"][0]["phase"] == "gone"


def test_each_rank_of_a_node_speaks_for_itself() -> None:
    now = time.time()
    first = {"rank": 0, "updated": now, "ranks": [{"rank": 0, "phase": "serving"}, {"rank": 1, "phase": "unknown"}]}
    second = {
        "rank": 1,
        "updated": now - 1,
        "ranks": [{"rank": 0, "phase": "unknown"}, {"rank": 1, "phase": "waiting"}],
    }
    assert [rank["phase"] for rank in merged([second, first])["ranks"]] == ["serving", "waiting"]
