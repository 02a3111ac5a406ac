"""`tfglm rank`: exit codes, what it imports, the command lines it would run, the state file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from supervised import ROOT, Supervised

from tfglm.cli.main import main
from tfglm.cli.serving import start_logging
from tfglm.settings import Settings
from tfglm.supervisor.child import MARK
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.codes import Exit
from tfglm.supervisor.facts import parse
from tfglm.supervisor.health import Rate
from tfglm.supervisor.runtime import Runtime
from tfglm.supervisor.state import StateFile, read_states, state_path


def test_a_rank_loads_neither_torch_nor_http_nor_rich() -> None:
    """Which is what makes it start in a moment, and small."""
    modules = [f"tfglm.supervisor.{path.stem}" for path in (ROOT / "tfglm/supervisor").glob("*.py")]
    modules = [name for name in modules if not name.endswith(("__init__", "playbooks", "doctor"))]
    heavy = ("torch", "numpy", "aiohttp", "rich", "pydantic")
    code = f"import sys, tfglm.cli.main, {', '.join(modules)}; sys.exit(str([n for n in {heavy} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"


def test_a_malformed_cluster_json_ends_with_code_64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Supervised(tmp_path, count=2) as two:
        two.write(0, limits={"dead": "five"})
        assert main(["rank", "run", "--rank", "0", "--config", str(two.config(0))]) == Exit.CONFIG
        assert "cluster.json: limits: dead is 'five'; it takes a number from 1 to 60" in capsys.readouterr().err
        assert main(["rank", "check", "--rank", "0", "--config", str(two.config(1))]) == Exit.CONFIG
        assert "--rank is 0; " in capsys.readouterr().err
        assert main(["rank", "run", "--rank", "0", "--config", str(tmp_path / "none")]) == 64
        assert "cluster.json does not exist" in capsys.readouterr().err


def test_check_and_command_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Supervised(tmp_path, count=2, environment={"NCCL_DEBUG": "INFO"}) as two:
        assert main(["rank", "check", "--rank", "1", "--config", str(two.config(1))]) == 0
        assert "rank 1: network, checkpoint, image and memory are as they must be" in capsys.readouterr().out
        assert main(["rank", "command", "--rank", "1", "--config", str(two.config(1))]) == 0
        line = capsys.readouterr().out
        assert f"--rank 1 --ranks 2 --leader 127.0.0.1:{two.cluster['ports']['rendezvous']}" in line
        assert f"NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=lo TFGLM_DRAIN_S=2 TFGLM_GUARD_GIB=0 TFGLM_PORT={two.port}" in line
        assert not two.engines()
        assert main(["rank", "reap", "--rank", "1", "--config", str(two.config(1))]) == 0
        assert "processes killed: 0" in capsys.readouterr().out


def test_a_line_of_the_journal_has_time_and_rank_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which names the unit tfglm-rank0 in front of each."""
    with Supervised(tmp_path, count=1) as one:
        one.start()
        one.until_serving(1)
        lines = one.log(0).splitlines()
    assert any(line.startswith("INFO start 1: ") for line in lines)
    assert not any(re.match(r"\S+ rank 0|\d", line) for line in lines)
    formats: list[str] = []
    monkeypatch.setattr("logging.basicConfig", lambda level, format: formats.append(format))
    settings = Settings(ranks=2, rank=1)
    start_logging(settings)
    monkeypatch.setenv(MARK, "sparks/1")
    start_logging(settings)
    assert formats[0] == "%(asctime)s rank 1 " + formats[1]


FACTS: dict[str, Any] = {
    "version": 1,
    "name": "sparks",
    "checkpoint": "/srv/models/glm",
    "runtime": "docker",
    "settings": {"kv": "fp4", "wire": "nccl"},
    "ranks": [{"name": "a", "control": "10.0.0.1"}, {"name": "b", "control": "10.0.0.2"}],
    "docker": {"image": "tfglm@sha256:ab", "user": "1000:1000", "memory": "12g", "volumes": ["/nvme:/spill"]},
}


def docker(rdma: str = "roce0", **changes: Any) -> Runtime:
    rails = [{"peer": 0, "interface": "p0", "address": "10.1.0.2", "peer_address": "10.1.0.1", "rdma": rdma}]
    node = {"version": 1, "rank": 1, "interface": "eth0", "rails": rails, "mount": "/srv/models"}
    ranks = [{"name": "a", "control": "10.0.0.1"}]
    ranks.append({"name": "b", "control": "10.0.0.2", "rails": [{"peer": 0, "address": "10.1.0.2"}]})  # type: ignore[dict-item]
    facts = FACTS | {"ranks": ranks} | changes
    return Runtime(parse(Cluster, facts, "cluster"), parse(Node, node, "node"))


def test_the_containers_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFGLM_API_KEY", "secret")
    runtime = docker()
    argv = runtime.engine(7, {"NCCL_IB_HCA": "roce0"})
    text = " ".join(argv)
    assert argv[:5] == ["docker", "run", "--rm", "--name", "tfglm-sparks-1"]
    for words in (
        "--label=tfglm.cluster=sparks --label=tfglm.rank=1 --label=tfglm.generation=7 --label=tfglm.settings=",
        "--network host --ipc host --log-driver none --ulimit stack=67108864",
        "--user 1000:1000 --device nvidia.com/gpu=all --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 ",
        "--memory 12g",
        "--volume /srv/models:/srv/models:ro --volume /var/cache/tfglm:/cache --volume /nvme:/spill",
        "--env TFGLM_API_KEY --env",
        "--env GLM_SUPERVISED=sparks/1",
        "--env NCCL_IB_HCA=roce0",
        "--env TFGLM_KV=fp4 --env TFGLM_WIRE=nccl",
    ):
        assert words in text, words
    engine = "engine /srv/models/glm --rank 1 --ranks 2 --leader 10.0.0.1:29561"
    assert text.endswith(f"--entrypoint tfglm tfglm@sha256:ab {engine}")
    assert "secret" not in text
    assert "--privileged" not in text
    assert runtime.environment({})["TFGLM_API_KEY"] == "secret"
    assert "--gpus all" in " ".join(docker(docker=FACTS["docker"] | {"gpus": "legacy"}).engine(1, {}))
    without = docker(docker=FACTS["docker"] | {"gpus": "none"}, rdma="").engine(1, {})
    assert not {"--gpus", "nvidia.com/gpu=all", "/dev/infiniband", "memlock=-1"} & set(without), "no GPU, no RDMA"
    assert "--memory 3g --entrypoint tfglm --volume /srv/models:/srv/models:ro --volume /nvme:/spill" in " ".join(
        runtime.plan()
    ), "a drafter may lie in a volume"


def test_a_trial_of_the_network_is_a_container_beside_the_engines() -> None:
    text = " ".join(docker().trial(Path("/etc/tfglm"), {"NCCL_IB_HCA": "roce0"}))
    assert "--name tfglm-sparks-1-trial --label=tfglm.cluster=sparks --label=tfglm.rank=1" in text
    assert "--volume /etc/tfglm:/etc/tfglm:ro" in text
    assert "--env NCCL_IB_HCA=roce0" in text
    assert text.endswith("tfglm@sha256:ab doctor --rank 1 --config /etc/tfglm")


def test_docker_is_asked_for_labelled_containers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub that records what it is asked and answers as docker does."""
    stub = tmp_path / "docker"
    stub.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$1" in ps) cat {tmp_path}/there;; image) echo 1234;;\n'
        f"rm) : > {tmp_path}/there; echo removal is already in progress >&2; exit 1;; esac\n"
    )
    (tmp_path / "there").write_text("abc\ndef\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert docker().remove() == ["abc", "def"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "ps --all --quiet --filter=label=tfglm.cluster=sparks --filter=label=tfglm.rank=1"
    assert asked[1] == "rm --force abc def"
    assert asked[2:] == asked[:1], "gone, although docker was removing them already"
    (tmp_path / "there").write_text("abc\n")
    monkeypatch.setattr("tfglm.supervisor.runtime._DOCKER_S", 1.0)
    stub.write_text(stub.read_text().replace(f": > {tmp_path}/there;", ""))
    with pytest.raises(TimeoutError, match="docker has not removed abc within 1 s: removal is already in progress"):
        docker().remove()
    assert docker().image_problem() == ""
    assert "hash 1234; cluster.json says 99" in docker(docker=FACTS["docker"] | {"image_hash": "99"}).image_problem()
    stub.write_text("#!/bin/sh\necho 'No such image' >&2; exit 1\n")
    assert docker().image_problem() == (
        "image tfglm@sha256:ab is not on this node, or docker does not answer: No such image"
    )


def test_the_key_comes_from_systemds_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "api_key").write_text("from-systemd\n")
    environ = docker(runtime="venv").environment({"TFGLM_KV": "fp4"})
    assert (environ["TFGLM_API_KEY"], environ["TFGLM_KV"]) == ("from-systemd", "fp4")


def test_a_state_is_whole_or_absent(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "run" / "rank0.json")
    file.write({"phase": "serving", "rank": 0})
    file.write({"phase": "gone", "rank": 0})
    (tmp_path / "run/rank1.json").write_text('{"phase": "ser')
    (tmp_path / "run/rank2.json").write_text("[]")
    assert read_states(tmp_path / "run") == [{"phase": "gone", "rank": 0}]


def test_a_full_disk_costs_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(tmp_path / "rank0.json")
    (tmp_path / "rank0.json.new").symlink_to("/dev/full")
    for _ in range(3):
        file.write({"phase": "serving"})
    assert [record.message.split(":")[0] for record in caplog.records] == ["W_STATE"]
    assert "No space left on device" in caplog.text
    (tmp_path / "rank0.json.new").unlink()
    file.write({"phase": "serving"})
    assert json.loads((tmp_path / "rank0.json").read_text()) == {"phase": "serving"}


def test_systemd_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/tfglm-2:/run/other")
    assert state_path(2) == Path("/run/tfglm-2/rank2.json")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    assert state_path(2) == Path("/run/tfglm/rank2.json")


def test_a_rate_forgets_another_processes_counter() -> None:
    rate = Rate(span_s=10)
    for second in range(31):
        rate.add(5.0 * second, now=float(second))
    assert rate.a_second == pytest.approx(5.0)
    for second in range(31, 51):
        rate.add(150.0, now=float(second))
    assert rate.a_second == 0.0
    rate.add(3.0, now=52.0)
    assert rate.a_second == 0.0
    rate.add(13.0, now=54.0)
    assert rate.a_second == pytest.approx(5.0)
