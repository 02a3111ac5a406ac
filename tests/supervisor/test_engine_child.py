"""Engines that misbehave: whatever they do, they end, and what they have started ends with them."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from supervised import FAKE, alive

from tfglm.supervisor.child import MARK, TAIL_LINES, Child, kill_marked


def start(folder: Path, how: str, rank: int = 1, mark: str = "test/1") -> Child:
    (folder / f"rank{rank}.json").write_text(how)
    environ = dict(os.environ) | {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1"}
    return Child.start([*FAKE, "engine", str(folder), "--rank", str(rank)], environ, f"{mark}-{os.getpid()}")


async def started(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not (folder / "starts").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_an_engine_that_exits_leaves_its_code_and_its_last_error(tmp_path: Path) -> None:
    child = start(tmp_path, '{"exits": 7, "says": "E_RANKS: rank 2 is gone"}')
    assert await child.wait(30)
    await child.stop(0.1)
    assert (child.code, child.error) == (7, ("E_RANKS", "rank 2 is gone"))
    assert child.ending == "the engine ended with code 7: rank 2 is gone"


@pytest.mark.parametrize(
    ("says", "ending"),
    [
        ("docker: no such image.\\n\\nRun 'docker run --help'", "docker: no such image."),
        ("Traceback\\nTypeError: None", "TypeError: None"),
    ],
)
async def test_what_an_engine_without_a_code_said_last_is_its_reason(tmp_path: Path, says: str, ending: str) -> None:
    child = start(tmp_path, f'{{"exits": 125, "says": "\\n{says}"}}')
    assert await child.wait(30)
    await child.stop(0.1)
    assert child.ending == f"the engine ended with code 125: {ending}"


async def test_a_deaf_engine_is_killed(tmp_path: Path) -> None:
    child = start(tmp_path, '{"deaf": true}')
    await started(tmp_path)
    await asyncio.sleep(0.3)
    await child.stop(0.3)
    assert not child.running
    assert child.code == -signal.SIGKILL
    assert "SIGKILL" in child.ending


async def test_an_engine_that_hears_ends_in_order(tmp_path: Path) -> None:
    child = start(tmp_path, "{}")
    await started(tmp_path)
    await asyncio.sleep(0.3)
    await child.stop(20)
    assert child.code == 0


async def test_a_stopped_engine_is_killed_too(tmp_path: Path) -> None:
    child = start(tmp_path, "{}")
    await started(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    await child.stop(0.2)
    assert child.code == -signal.SIGKILL


@pytest.mark.parametrize("how", ['{"forks": true}', '{"forks": true, "exits": 1}', '{"forks": true, "deaf": true}'])
async def test_what_an_engine_has_forked_ends_with_it(tmp_path: Path, how: str) -> None:
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)", env={MARK: "test/2"}, start_new_session=True
    )
    child = start(tmp_path, how)
    children = tmp_path / "children"
    deadline = time.monotonic() + 30
    while not children.exists() or len(children.read_text().split()) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    pids = [int(word) for word in children.read_text().split()]
    await child.stop(0.2)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert other.returncode is None  # of another rank: not ours to end
    other.kill()
    await other.wait()


async def test_garbage_is_passed_on_and_hurts_nobody(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    child = start(tmp_path, '{"garbage": true, "exits": 1, "says": "nothing"}')
    assert await child.wait(30)
    await child.stop(0.1)
    assert child.error == ("E_CHECKPOINT", "looks � broken")
    assert len(child.tail) <= TAIL_LINES
    assert max(map(len, child.tail)) <= 4096


async def test_variables_for_the_supervisor_are_not_the_engines(tmp_path: Path) -> None:
    child = start(tmp_path, "{}")
    await started(tmp_path)
    environ = Path(f"/proc/{child.pid}/environ").read_bytes()
    score = Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip()
    await child.stop(0.1)
    assert b"NOTIFY_SOCKET" not in environ
    assert b"WATCHDOG" not in environ
    assert f"{MARK}=test/1-{os.getpid()}".encode() in environ.split(b"\0")
    assert score == "500"


def test_only_marked_processes_are_reaped(tmp_path: Path) -> None:
    assert kill_marked(f"nobody/{os.getpid()}") == []
