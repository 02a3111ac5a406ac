"""What a node must have before its engine starts: waits with limits, and what is said when they end."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from supervised import FAKE, FITS

from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.codes import Exit, Fatal
from tfglm.supervisor.facts import parse
from tfglm.supervisor.prepare import Preparation, is_mounted
from tfglm.supervisor.runtime import Runtime


def preparation(
    folder: Path, said: list[str], command: list[str] = FAKE, mount: str = "", **limits: float
) -> Preparation:
    waits = {"mount": 0.6, "fabric": 0.6, "memory": 0.6, "plan": 60} | limits
    facts = {"version": 1, "name": "one", "checkpoint": str(folder / "model"), "command": command, "limits": waits}
    cluster = parse(Cluster, facts | {"ranks": [{"name": "a", "control": "203.0.113.7"}]}, "cluster")
    node = parse(Node, {"version": 1, "rank": 0, "interface": "eth0", "mount": mount}, "node")
    (folder / "model").mkdir(exist_ok=True)
    return Preparation(cluster, node, Runtime(cluster, node), said.append)


def plan(folder: Path, lowest_free: int) -> None:
    (folder / "model").mkdir(exist_ok=True)
    rank = {"lowest_free": lowest_free, "need": 3 * 2**30, "available": 2 * 2**30}
    (folder / "model/plan.json").write_text(json.dumps(FITS | {"floor": 2**29, "ranks": [rank]}))


async def test_an_address_that_does_not_come(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(Fatal, match=r"E_FABRIC: address 203\.0\.113\.7 on eth0: not there after") as refused:
        await preparation(tmp_path, said).network()
    assert refused.value.exit is Exit.FABRIC
    assert said[0] == "waiting for address 203.0.113.7 on eth0"


async def test_a_checkpoint_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"E_CHECKPOINT: .*config\.json \(No such file") as refused:
        await preparation(tmp_path, []).checkpoint()
    assert refused.value.exit is Exit.WEIGHTS
    (tmp_path / "model/config.json").write_text("{}")
    await preparation(tmp_path, []).checkpoint()
    with pytest.raises(Fatal, match="the mount of /nowhere"):
        await preparation(tmp_path, [], mount="/nowhere").checkpoint()


async def test_a_mount_that_does_not_answer_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe that nobody writes to waits for ever, as a file on a dead NFS server does."""
    monkeypatch.setattr("tfglm.supervisor.prepare._TOUCH_S", 0.3)
    preparing = preparation(tmp_path, [])
    os.mkfifo(tmp_path / "model/config.json")
    began = time.monotonic()
    with pytest.raises(Fatal, match="which does not answer: its NFS server may be gone"):
        await preparing.checkpoint()
    assert time.monotonic() - began < 30
    with (tmp_path / "model/config.json").open("wb") as pipe:  # let the thread go
        pipe.write(b"{}")


async def test_a_plan_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    said: list[str] = []
    plan(tmp_path, lowest_free=-(2**30))
    with pytest.raises(Fatal) as refused:
        await preparation(tmp_path, said).memory()
    assert refused.value.exit is Exit.MEMORY
    words = "E_MEMORY: memory: rank 0 needs 3.00 GiB and 0.50 must stay free, 2.00 are available; --context 4096 fits"
    assert words in str(refused.value)
    plan(tmp_path, lowest_free=2**30)
    await preparation(tmp_path, said).memory()


@pytest.mark.parametrize(
    ("script", "exit_code", "words"),
    [
        ("print('no JSON')", Exit.WEIGHTS, "there is no memory plan: code 0"),
        (
            "import sys; sys.exit('tfglm: E_CONFIG: --kv is 3')",
            Exit.CONFIG,
            "there is no memory plan: tfglm: E_CONFIG: ",
        ),
        (
            "import sys; sys.exit('docker: no such image.\\n\\nRun docker run --help for more')",
            Exit.RUNTIME,
            "E_WORKER: no memory plan can be made: docker: no such image.",
        ),
        ("print('{\"ranks\": []}')", Exit.WEIGHTS, "there is no memory plan"),
        ("import time; time.sleep(60)", Exit.WEIGHTS, "the memory plan was not there after 1 s"),
    ],
)
async def test_a_plan_that_breaks_is_no_refusal(tmp_path: Path, script: str, exit_code: Exit, words: str) -> None:
    command = [sys.executable, "-c", script]
    with pytest.raises(Fatal) as broken:
        await preparation(tmp_path, [], command, plan=1 if "sleep" in script else 60).memory()
    assert broken.value.exit is exit_code
    assert words in str(broken.value)


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"E_WORKER: /nowhere/tfglm cannot be run: No such file") as broken:
        await preparation(tmp_path, [], ["/nowhere/tfglm"]).memory()
    assert broken.value.exit is Exit.RUNTIME


def test_an_automount_that_waits_is_no_mount(tmp_path: Path) -> None:
    table = tmp_path / "proc/self/mountinfo"
    table.parent.mkdir(parents=True)
    trigger = "36 35 0:40 / /srv/models rw,relatime shared:1 - autofs systemd-1 rw,fd=50\n"
    table.write_text("35 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + trigger)
    assert not is_mounted("/srv/models", tmp_path)
    table.write_text(trigger + "37 36 0:41 / /srv/models ro,relatime - nfs4 10.0.22.1:/srv/models ro,vers=4.2\n")
    assert is_mounted("/srv/models/", tmp_path)
