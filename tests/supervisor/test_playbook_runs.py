"""Playbooks through ansible-runner: its events as steps, where playbooks are found, and a real run if it is there."""

import importlib.util
import io
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tfglm.cli.main import main
from tfglm.cli.playbooks import View, failure, not_reached, summarise
from tfglm.supervisor.playbooks import Step, Summary, find_playbooks, run_playbook, step_of

ROOT = Path(__file__).resolve().parents[2]


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"task": "Do it", "host": "spark1", **data}}


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ({"event": "playbook_on_play_start", "event_data": {"play": "Prepare"}}, Step("play", "Prepare")),
        ({"event": "playbook_on_task_start", "event_data": {"task": "Do it"}}, Step("task", "Do it")),
        ({"event": "verbose"}, None),
        (event("runner_on_ok", res={"changed": False}), Step("ok", "Do it", "spark1")),
        (event("runner_on_ok", res={"changed": True}), Step("changed", "Do it", "spark1")),
        (event("runner_on_skipped"), Step("skipped", "Do it", "spark1")),
        (
            event("runner_on_ok", task_action="ansible.builtin.debug", res={"msg": ["one", "two"]}),
            Step("ok", "Do it", "spark1", "one\ntwo"),
        ),
        (
            event("runner_on_failed", res={"msg": "non-zero return code", "stderr": "no such file"}),
            Step("failed", "Do it", "spark1", "non-zero return code: no such file"),
        ),
        (
            event(
                "runner_on_failed", res={"msg": "All items completed", "results": [{"failed": True, "msg": "E_X: y"}]}
            ),
            Step("failed", "Do it", "spark1", "E_X: y"),
        ),
        (
            event(
                "runner_on_unreachable",
                res={
                    "msg": "All items completed",
                    "results": [{"unreachable": True, "msg": "failed via ssh: ssh: refused"}],
                },
            ),
            Step("unreachable", "Do it", "spark1", "ssh: refused"),
        ),
        (
            event("runner_on_failed", res={"msg": "Validation failed:\nx", "argument_errors": ["x must be y", "z"]}),
            Step("failed", "Do it", "spark1", "E_CONFIG: x must be y; z"),
        ),
        (event("runner_on_failed", ignore_errors=True, res={"msg": "x"}), Step("ok", "Do it", "spark1")),
        (event("runner_on_unreachable", res={"msg": "timed out"}), Step("unreachable", "Do it", "spark1", "timed out")),
    ],
)
def test_what_ansible_reports_is_read(given: dict[str, Any], step: Step | None) -> None:
    assert step_of(given) == step


def test_what_a_user_sees() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    with console.status("site.yml") as status:
        view = View(console, status)
        for step in (
            Step("play", "Prepare [every] machine"),
            Step("task", "Install"),
            Step("ok", "Install", "spark0"),
            Step("changed", "Install", "spark1"),
            Step("ok", "Say", "spark0", "rank 0: fits"),
            Step("failed", "Check", "spark2", "E_MEMORY: 3 GiB too few"),
            Step("play", "Start what nobody is left for"),
        ):
            view.show(step)
    counts = {"spark0": {"ok": 2}, "spark1": {"changed": 1}, "spark2": {"failed": 1}}
    summarise(console, Summary("site.yml", 12.3, 2, counts))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == [
        "Prepare [every] machine",
        "  spark1: changed: Install",
        "  spark0: rank 0: fits",
        "  spark2: failed: Check",
        "E_MEMORY: 3 GiB too few",
        "spark0: ok 2",
        "spark1: changed 1",
        "spark2: failed 1",
        "site.yml failed after 12 s, changed: 1",
    ]


def test_a_failure_keeps_the_code_it_has() -> None:
    coded = failure("site.yml", Step("failed", "Check", "spark2", "E_MEMORY: 3 GiB too few"))
    assert str(coded) == "E_MEMORY: site.yml failed on spark2 at 'Check': 3 GiB too few"
    assert str(failure("site.yml", Step("failed", "Copy", says="no room"))).startswith("E_WORKER: site.yml failed at")


def test_arguments_for_ansible_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--ansible", "'-e x"]) == 1
    assert 'E_CONFIG: --ansible is "\'-e x": no closing quotation' in capsys.readouterr().err


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--playbooks", str(tmp_path)]) == 1
    assert f"there is no site.yml in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/site.yml").write_text("[]")
    assert find_playbooks(None) == tmp_path / "playbooks"
    assert main(["down"]) == 1
    assert "inventory.ini does not exist; copy inventory.example.ini" in capsys.readouterr().err
    (tmp_path / "inventory.ini").write_text("")
    monkeypatch.setitem(sys.modules, "ansible_runner", None)
    for command in (["up"], ["down"], ["logs"], ["plan", "--cluster"], ["doctor"], ["status", "-i", "inventory.ini"]):
        assert main(command) == 1
        assert "`.venv/bin/pip install -e '.[provision]'` in tfglm's checkout brings it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("playbook", "instead"),
    [
        ("stop.yml", "systemctl stop 'tfglm@*'"),
        ("status.yml", "`tfglm status`"),
        ("logs.yml", "journalctl -u 'tfglm@*'"),
        ("site.yml", "must work from here"),
    ],
)
def test_a_machine_that_is_away_is_named_with_what_to_do(playbook: str, instead: str) -> None:
    away = [Step("unreachable", "Do it", name, f"{name}'s cause.") for name in ("spark1", "spark2")]
    said = not_reached(playbook, away)
    assert said.startswith(
        f"{playbook} did not reach spark1: spark1's cause; spark2: spark2's cause. `ssh USER@HOST true`"
    )
    assert instead in said


PLAYBOOK = """
- name: Try it
  hosts: all
  gather_facts: false
  tasks:
    - name: Say something
      ansible.builtin.debug: {msg: "hello from {{ inventory_hostname }}"}
    - name: Write something
      ansible.builtin.copy: {content: "x", dest: "{{ folder }}/written"}
    - name: Refuse the second
      ansible.builtin.assert: {that: "inventory_hostname != 'b'", fail_msg: "E_FABRIC: b has no cable"}
"""


needs_ansible = pytest.mark.skipif(
    importlib.util.find_spec("ansible_runner") is None, reason="ansible-runner is not installed; make provision-check"
)


@needs_ansible
def test_a_real_playbook(tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text(PLAYBOOK)
    (tmp_path / "ansible.cfg").write_text("[defaults]\nretry_files_enabled = false\n")
    inventory = tmp_path / "inventory.ini"
    local = "ansible_connection=local ansible_python_interpreter=" + sys.executable
    inventory.write_text(f"[all:vars]\nfolder={tmp_path}\n[sparks]\na {local}\nb {local}\n")
    steps: list[Step] = []
    summary = run_playbook("site.yml", tmp_path, inventory, "", steps.append)
    assert summary.code == 2
    assert [(step.host, step.says) for step in summary.failures] == [("b", "E_FABRIC: b has no cable")]
    assert Step("ok", "Say something", "a", "hello from a") in steps
    assert summary.counts["a"].get("failed") is None
    assert summary.changed == 1
    assert (tmp_path / "written").read_text() == "x"
    broken = run_playbook("nothing.yml", tmp_path, inventory, "", steps.append)
    assert broken.code != 0
    assert "nothing.yml" in broken.failures[0].says


@needs_ansible
@pytest.mark.parametrize("inventory", ["[sparks]\n", "[sprks]\nspark0 ansible_connection=local\n", "garbage [[\n"])
def test_an_inventory_without_a_machine_is_no_success(
    inventory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "inventory.ini"
    file.write_text(inventory)
    assert main(["up", "-i", str(file), "--playbooks", str(ROOT / "playbooks")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"tfglm: E_CONFIG: site.yml found no machine: {file} must list them")
    assert "is done" not in said.out


@needs_ansible
@pytest.mark.parametrize(
    ("command", "playbook"), [("down", "stop.yml"), ("status", "status.yml"), ("logs", "logs.yml")]
)
def test_ssh_that_fails_is_said_in_its_own_words(
    command: str, playbook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two machines, at both of which nobody listens: the second is asked although the first is away."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inventory = tmp_path / "inventory.ini"
    where = f"ansible_host=127.0.0.1 ansible_port={port} ansible_python_interpreter={sys.executable}"
    pins = "tfglm_checkpoint=/srv/models/tiny\ntfglm_user=root"
    inventory.write_text(f"[sparks]\nspark0 {where}\nspark1 {where}\n[sparks:vars]\n{pins}\n")
    assert main([command, "-i", str(inventory), "--playbooks", str(ROOT / "playbooks")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"tfglm: E_WORKER: {playbook} did not reach spark0: ssh: connect to host 127.0.0.1 port {port}"
    )
    assert said.count("Connection refused") == 2
    assert "; spark1: ssh: connect to host" in said
