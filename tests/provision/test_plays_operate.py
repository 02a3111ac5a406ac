"""start, restart, status, logs, verify, doctor and stop on three prepared machines: what they do, in which order, and
that what only asks changes nothing."""

import json
import tarfile
from pathlib import Path

import pytest
from fake_machines import FakeMachines, needs_ansible, recap, task

pytestmark = needs_ansible

RANKS = [(f"spark{i}", f"tfglm@{i}.service") for i in range(3)]
UNCHANGED = {name: (0, 0) for name, _ in RANKS}


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_check_of_start_starts_nothing_and_waits_for_nothing(prepared: FakeMachines) -> None:
    prepared.forget()
    done = prepared.play("start", "--check", "--diff")
    assert done.returncode == 0, done.stdout[-3000:]
    assert prepared.asked("start") == []


def test_start_begins_all_ranks_and_asks_the_model(prepared: FakeMachines) -> None:
    prepared.forget()
    with prepared.serving("It is Paris."):
        first = prepared.play("start")
        second = prepared.play("start")
    assert first.returncode == 0, first.stdout[-3000:]
    assert "tiny serves at http://127.0.0.1:18999/v1 after" in words(first.stdout)
    assert 'and says "It is Paris."' in words(first.stdout)
    assert sorted(prepared.asked("start")) == RANKS
    log = (prepared.root("spark2") / "var/lib/stub-systemd/log").read_text()
    assert "--no-block start tfglm@2.service" in log, "a rank is ready only once all others are"
    assert second.returncode == 0
    assert recap(second.stdout) == UNCHANGED


def test_an_answer_without_sense_is_no_start(prepared: FakeMachines) -> None:
    with prepared.serving("!!!!!!!!!!!!"):
        done = prepared.play("start")
    assert done.returncode != 0
    assert "12 of its 12 characters are '!'" in words(done.stdout)


def test_a_start_without_an_answer_ends_with_its_limit(prepared: FakeMachines) -> None:
    done = prepared.play("start", tfglm_wait_s=1)
    assert "E_RANKS: http://127.0.0.1:18999/health did not answer within 1 s" in words(done.stdout)


@pytest.mark.parametrize("how", [[], ["--check", "--diff"]])
def test_status_says_how_every_rank_is(prepared: FakeMachines, how: list[str]) -> None:
    figures = {"available_gib": 9.5, "low_gib": 8.0, "tok_s": 31.3}
    ranks = [{"rank": i, "name": f"spark{i}", "phase": "serving", "reason": "", **figures} for i in range(3)]
    state = prepared.root("spark0") / "run/tfglm/rank0.json"
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps({"ranks": ranks}))
    done = prepared.play("status", *how)
    assert done.returncode == 0, done.stdout[-3000:]
    assert recap(done.stdout) == UNCHANGED
    for i in range(3):
        assert f"rank {i}: Id=tfglm@{i}.service, LoadState=loaded, ActiveState=active" in words(done.stdout)
        assert f"rank {i} on spark{i}: serving, 9.5 GiB available, 8.0 at the lowest, 31.3 tok/s" in words(done.stdout)


def test_logs_are_of_every_rank_in_one_archive(prepared: FakeMachines, tmp_path: Path) -> None:
    checked = prepared.play("logs", "--check", "--diff", tfglm_logs=str(tmp_path))
    assert checked.returncode == 0, checked.stdout[-3000:]
    assert list(tmp_path.iterdir()) == []
    done = prepared.play("logs", tfglm_logs=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    (archive,) = tmp_path.glob("sparks-*.tar.gz")
    assert f"{archive} has the logs of spark0, spark1, spark2" in words(done.stdout)
    with tarfile.open(archive) as tar:
        found = {Path(entry.name).name: tar.extractfile(entry) for entry in tar if entry.isfile()}
        texts = {name: file.read().decode() for name, file in found.items() if file is not None}
    assert sorted(texts) == sorted(f"rank{i}-{kind}.log" for i in range(3) for kind in ("kernel", "service"))
    for i in range(3):
        assert f"--unit=tfglm@{i} " in texts[f"rank{i}-service.log"]
        assert f"--no-block start tfglm@{i}.service" in texts[f"rank{i}-service.log"]
        assert "--dmesg" in texts[f"rank{i}-kernel.log"]


@pytest.mark.parametrize("how", [[], ["--check", "--diff"]])
def test_verify_reads_everything_and_changes_nothing(prepared: FakeMachines, how: list[str]) -> None:
    with prepared.serving("Paris"):
        done = prepared.play("verify", *how)
    assert done.returncode == 0, done.stdout[-3000:]
    assert recap(done.stdout) == UNCHANGED
    assert "every two machines have a cable" in words(done.stdout)
    assert 'and says "Paris"' in words(done.stdout)


def test_verify_of_ranks_that_run_shows_their_commands(prepared: FakeMachines) -> None:
    """Their memory is theirs already, so that a plan against what is left would say nothing."""
    with prepared.serving("Paris"):
        done = prepared.play("verify")
    checked = words(task(done.stdout, "Refuse a rank that could not start"))
    assert "tfglm engine /srv/models/tiny --rank 1 --ranks 3" in checked


def test_restart_ends_rank_0_first_and_starts_all(prepared: FakeMachines) -> None:
    prepared.forget()
    with prepared.serving("Paris"):
        done = prepared.play("restart")
    assert done.returncode == 0, done.stdout[-3000:]
    stops = prepared.asked("stop")
    assert stops[0] == RANKS[0]
    assert sorted(stops) == sorted(prepared.asked("start")) == RANKS
    assert all(changed == 2 for changed, _ in recap(done.stdout).values()), "stopped and started, and nothing else"


def test_a_check_of_stop_stops_nothing(prepared: FakeMachines) -> None:
    prepared.forget()
    done = prepared.play("stop", "--check", "--diff")
    assert prepared.asked("stop") == []
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_head_that_is_away_leaves_the_others_to_be_stopped(prepared: FakeMachines) -> None:
    prepared.forget()
    shell = prepared.folder / "spark0.sh"
    kept = shell.read_text()
    shell.write_text("#!/bin/sh\nexit 255\n")
    try:
        done = prepared.play("stop")
    finally:
        shell.write_text(kept)
    assert done.returncode != 0
    assert sorted(prepared.asked("stop")) == RANKS[1:]


def test_stop_ends_what_runs_and_a_second_one_has_nothing_to_do(prepared: FakeMachines) -> None:
    with prepared.serving("Paris"):
        assert prepared.play("start").returncode == 0
    prepared.forget()
    first = prepared.play("stop")
    assert first.returncode == 0, first.stdout[-3000:]
    assert prepared.asked("stop")[0] == RANKS[0]
    assert sorted(prepared.asked("stop")) == RANKS
    assert "spark1 has" in words(first.stdout)
    assert "GiB available" in words(first.stdout)
    second = prepared.play("stop")
    assert second.returncode == 0
    assert recap(second.stdout) == UNCHANGED


def test_verify_of_ranks_that_are_down_checks_what_a_start_would(prepared: FakeMachines) -> None:
    node = prepared.root("spark2") / "etc/tfglm/rank.json"
    kept = node.read_text()
    down = prepared.play("verify", tfglm_wait_s=1)
    node.write_text(kept.replace('"rank": 2', '"rank": 7'))
    broken = prepared.play("verify", tfglm_wait_s=1)
    node.write_text(kept)
    said = words(task(down.stdout, "Refuse a rank that could not start"))
    assert said.count("network, checkpoint, image and memory are as they must be") == 3, down.stdout[-3000:]
    assert "E_RANKS: http://127.0.0.1:18999/health did not answer within 1 s" in words(down.stdout)
    assert "E_CONFIG: /etc/tfglm/rank.json: rank is 7; cluster.json has ranks 0 to 2" in words(broken.stdout)


def test_doctor_fills_every_cable_and_judges_it(prepared: FakeMachines) -> None:
    done = prepared.play("doctor")
    assert done.returncode == 0, done.stdout[-3000:]
    assert recap(done.stdout) == UNCHANGED
    said = words(task(done.stdout, "Say what came of it"))
    assert "3 ranks over gloo, every value right" in said
    for sender in range(3):
        for receiver in {0, 1, 2} - {sender}:
            assert f"rank {sender} to {receiver}, p" in said, "every rail, in both directions"


def test_doctor_names_a_cable_that_is_cut(prepared: FakeMachines) -> None:
    prepared.run("spark1", "ip link set p0 down")
    try:
        done = prepared.play("doctor")
    finally:
        prepared.run("spark1", "ip link set p0 up")
    assert done.returncode != 0
    said = words(done.stdout)
    assert "E_FABRIC: spark1 and spark2 share no cable: spark1 has p0 without address (no carrier)" in said
    assert "Gather tensors over all ranks" not in said, "the trial waits for no rank that cannot come"
