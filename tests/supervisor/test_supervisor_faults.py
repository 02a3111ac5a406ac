"""One or two supervisors with engines that are deaf, hang, drain or run out of memory; and systemd at the other end."""

import signal
import socket
import sys
import time
from pathlib import Path

from supervised import Supervised, alive

from tfglm.cli.main import main

LITTLE_MEMORY = """
import sys
from pathlib import Path
from tfglm.memory import info
real = info.read_available
info.read_available = lambda sysroot=None: real(Path(sys.argv[1]))
from tfglm.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def have(folder: Path, gib: float) -> None:
    (folder / "proc").mkdir(exist_ok=True)
    new = folder / "proc/meminfo.new"
    new.write_text(f"MemTotal: 16777216 kB\nMemAvailable: {round(gib * 2**20)} kB\n")
    new.replace(folder / "proc/meminfo")


def test_memory_below_the_guard_ends_all_ranks_and_is_named(tmp_path: Path) -> None:
    have(tmp_path, 8)
    with Supervised(tmp_path, count=2, settings={"guard_gib": 0.25}) as two:
        two.start(0)
        two.entry = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path)]
        two.start(1)
        two.until_serving(1)
        two.until(lambda: two.state(1)["low_gib"] == 8)
        have(tmp_path, 0.2)
        two.until_down()
        two.until(lambda: "rank 1 (spark1): memory ran short, 0.20 GiB at" in two.log(0), 10)
        have(tmp_path, 8)
        two.until_serving(2)
        assert two.state(1)["low_gib"] == 8  # of this start


def test_systemd_hears_when_a_rank_is_ready_and_what_it_waits_for(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(30)
    heard: list[str] = []

    def hear(start: str) -> None:
        while not any(word.startswith(start) for word in heard):
            heard.append(listener.recv(4096).decode())

    with Supervised(tmp_path, count=2) as two:
        two.environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        two.start(1)
        hear("STATUS=waiting: waiting for rank 0 (spark0), which has not been heard of")
        hear("EXTEND_TIMEOUT_USEC=")
        hear("WATCHDOG=1")
        assert "READY=1" not in heard
        two.environ = {}
        two.start(0)
        hear("READY=1")
        hear("STATUS=serving, start 1: ")
        two.signal(1, signal.SIGTERM)
        hear("STOPPING=1")
        assert two.ended(1) == 0
    listener.close()


def test_an_engine_that_hangs_in_a_forward_is_replaced(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1, limits={"step": 5}) as one:
        one.start()
        one.until_serving(1)
        health = one.checkpoint / "health.json"
        health.write_text('{"status": "ok", "generation_tokens": 9, "step_age_s": 6.5}')
        one.until(lambda: "one forward of the engine has lasted 6 s" in one.log(0), 20)
        health.unlink()
        one.until_serving(2)


def test_an_engine_that_has_failed_inside_is_replaced(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1) as one:
        one.start()
        one.until_serving(1)
        (one.checkpoint / "health.json").write_text('{"status": "failed"}')
        one.until(lambda: "the engine has failed; /health says so" in one.log(0), 20)
        (one.checkpoint / "health.json").unlink()
        one.until_serving(2)


def test_a_deaf_engine_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1, limits={"stop": 0}, settings={"drain_s": 1}) as one:
        one.behave(0, deaf=True, forks=True)
        one.start()
        one.until_serving(1)
        children = [int(word) for word in (one.checkpoint / "children").read_text().split()]
        one.signal(0, signal.SIGTERM)
        one.until(lambda: one.state(0)["phase"] == "draining", 10)
        assert one.ended(0) == 0
        assert not one.engines()
        one.until(lambda: not any(map(alive, children)), 5, "no grandchild left")


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1, limits={"stop": 0}, settings={"drain_s": 3000}) as one:
        one.behave(0, deaf=True)
        one.start()
        one.until_serving(1)
        one.signal(0, signal.SIGTERM)
        one.until(lambda: one.state(0)["phase"] == "draining", 10)
        one.signal(0, signal.SIGINT)
        assert one.ended(0) == 0


def test_a_signal_while_it_waits_ends_it_at_once(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=2) as two:
        two.start(0)
        two.until(lambda: two.state(0)["phase"] == "waiting")
        two.signal(0, signal.SIGTERM)
        assert two.ended(0) == 0
        assert two.state(0)["phase"] == "gone"


def test_a_rank_that_never_comes_ends_the_wait(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=2, limits={"peers": 1}) as two:
        two.start(0)
        assert two.ended(0) == 69
        assert "E_RANKS: waited 1 s for rank 1 (spark1), which has not been heard of" in two.log(0)


def test_a_second_supervisor_of_a_rank_leaves_the_first_alone(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1) as one:
        one.start()
        one.until_serving(1)
        first, engine = one.processes[0], one.engine(0)
        one.start()
        assert one.ended(0) == 64
        assert "has a supervisor already" in one.log(0)
        assert main(["rank", "reap", "--rank", "0", "--config", str(one.config(0))]) == 64
        assert first.poll() is None
        assert alive(engine), "the second must not touch the first one's engine"
        first.kill()
        first.wait()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1) as one, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", one.cluster["ports"]["heartbeat"]))
        one.start()
        assert one.ended(0) == 64
        assert "E_PORT: UDP port" in one.log(0)


def test_the_state_file_may_be_impossible(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1) as one:
        (tmp_path / "run0").write_text("a file where the folder should be")
        one.start()
        one.until(lambda: "start 1 serves" in one.log(0))
        assert one.log(0).count("W_STATE") == 1


def test_engines_left_by_a_killed_supervisor_are_gone_before_the_next_start(tmp_path: Path) -> None:
    with Supervised(tmp_path, count=1) as one:
        one.behave(0, forks=True)
        one.start()
        one.until_serving(1)
        children = [int(word) for word in (one.checkpoint / "children").read_text().split()]
        one.signal(0, signal.SIGKILL)
        one.until_down()
        assert all(map(alive, children))  # what systemd's control group would have ended
        one.behave(0)
        one.start()
        one.until(lambda: one.phases() == [("serving", 1)] and not any(map(alive, children)), 30)


def test_a_supervisor_is_small_and_starts_quickly(tmp_path: Path) -> None:
    """Reported, not judged: a loaded machine may take longer. The imports are judged in test_rank_command.py."""
    with Supervised(tmp_path, count=2) as two:
        began = time.monotonic()
        two.start(0)
        two.until(lambda: two.log(0), 30)
        resident = Path(f"/proc/{two.processes[0].pid}/status").read_text().split("VmRSS:")[1].split()[0]
        print(f"first line after {time.monotonic() - began:.2f} s, {int(resident) / 1024:.0f} MiB resident")
        assert int(resident) < 100 * 1024
