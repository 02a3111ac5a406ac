"""Code that a model wrote computes, and can do nothing else."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tfglm.checks import sandbox
from tfglm.checks.problem import Reply, judge
from tfglm.checks.python import grader
from tfglm.checks.sandbox import run
from tfglm.checks.sandbox_child import SYSCALLS, program
from tfglm.checks.suite import LEVELS, problem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's seccomp")


def error(body: str, setup: str = "") -> str:
    """What is said of a function with this body."""
    ran = run(
        f"{setup}\ndef f():\n" + "\n".join(f"    {line}" for line in body.splitlines()), "f", [[]], cpu_s=1, wall_s=20
    )
    assert ran.values == ()
    return ran.error


def test_results_come_back_as_json() -> None:
    ran = run("def f(a, b=2):\n    return [a, b], {'é': None, 1: a > 1}", "f", [[1], [3, "ü"]])
    assert ran.values == ([[1, 2], {"é": None, "1": False}], [[3, "ü"], {"é": None, "1": True}])


def test_usual_modules_can_be_used() -> None:
    modules = (
        "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math "
        "operator random re statistics string textwrap typing"
    )
    source = "\n".join(f"import {name}" for name in modules.split())
    late = "def f(x):\n    import numbers, queue\n    return round(statistics.mean([x, math.pi]), 2)"
    assert run(f"{source}\n{late}", "f", [[1]]).values == (2.07,)


def test_an_endless_loop_ends() -> None:
    begun = time.monotonic()
    assert "more than 1 s of processor time" in error("while True: pass")
    assert "more than 1 s of processor time" in error("return 1", "while True: pass")
    assert time.monotonic() - begun < 60


def test_waiting_ends() -> None:
    ran = run("import time\ndef f():\n    time.sleep(1000)", "f", [[]], wall_s=1)
    assert ran.error == "no result within 1 s"


def test_no_process_can_be_started() -> None:
    assert "PermissionError" in error("while True: os.fork()", "import os")
    assert "PermissionError" in error("subprocess.run(['true'])", "import subprocess")
    assert "PermissionError" in error("os.execv('/bin/true', ['true'])", "import os")
    assert "PermissionError" in error("os.posix_spawn('/bin/true', ['true'], {})", "import os")


def test_a_swarm_of_threads_ends() -> None:
    assert error("while True: threading.Thread(target=time.sleep, args=(99,)).start()", "import threading, time")


def test_memory_is_limited() -> None:
    assert "MemoryError" in error("return len(b'x' * (1 << 32))")
    assert error("x = []\nwhile True: x.append(bytearray(1 << 20))")


def test_no_file_is_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("as it was")
    for body in (
        f"open({str(mine)!r}, 'w').write('gone')",
        f"open({str(mine)!r}, 'r+').write('gone')",
        f"os.truncate({str(mine)!r}, 0)",
        f"os.unlink({str(mine)!r})",
        f"os.rename({str(mine)!r}, {str(tmp_path / 'other')!r})",
        f"os.chmod({str(mine)!r}, 0)",
        f"os.utime({str(mine)!r}, (0, 0))",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        f"os.symlink('/', {str(tmp_path / 'link')!r})",
        "open('here', 'w')",
    ):
        assert "PermissionError" in error(body, "import os"), body
    assert mine.read_text() == "as it was" and mine.stat().st_mode & 0o777 and list(tmp_path.iterdir()) == [mine]


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        assert "PermissionError" in error(f"socket.create_connection(('127.0.0.1', {port}))", "import socket")
        assert "PermissionError" in error("socket.socketpair()", "import socket")
        with pytest.raises(TimeoutError):
            listener.accept()


def test_no_signal_reaches_anybody() -> None:
    assert "PermissionError" in error("os.kill(os.getppid(), 9)", "import os")
    assert "PermissionError" in error("os.killpg(0, 9)", "import os")
    assert "PermissionError" in error("os.setsid()", "import os")


def test_limits_cannot_be_raised() -> None:
    assert error("resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "import resource")
    raw = "libc = ctypes.CDLL(None, use_errno=True)\nreturn [libc.syscall({}, *[0] * 6), ctypes.get_errno()]"
    if os.uname().machine == "x86_64":
        for number in (
            41,
            57,
            101,
            160,
            165,
            302,
            321,
            425,
        ):  # socket fork ptrace setrlimit mount prlimit64 bpf io_uring
            ran = run("import ctypes\ndef f():\n    " + raw.format(number).replace("\n", "\n    "), "f", [[]])
            assert ran.values == ([-1, 1],), number
        # The other numbering of x86-64 has a bit of its own, and must not be a way round.
        ran = run("import ctypes\ndef f():\n    " + raw.format(0x40000000 + 41).replace("\n", "\n    "), "f", [[]])
        assert ran.values == ([-1, 1],)


def test_floods_end() -> None:
    assert "more than 1 s of processor time" in error("while True: print('x' * 100000)")
    assert error("return 'x' * (1 << 24)") == "results of more than 1 MiB"
    everywhere = (
        "while True:\n    for n in range(3, 32):\n        try: os.write(n, b'x' * 9999)\n        except OSError: pass"
    )
    assert error(everywhere, "import os") == "results of more than 1 MiB"


def test_ending_the_process_is_no_result() -> None:
    assert error("os._exit(0)", "import os").startswith("the code ended its process")
    assert "SystemExit" in error("raise SystemExit")
    assert "KeyboardInterrupt" in error("raise KeyboardInterrupt")
    assert "RecursionError" in error("return f()")
    assert "SyntaxError" in error("return )")
    assert "KeyError" in run("x = 1", "f", [[]]).error
    assert "not JSON" in error("return {1, 2}") and "ValueError" in error("return float('nan')")


def test_what_the_code_writes_to_the_results_is_no_answer() -> None:
    """It does not know what is expected; and junk beside the result is none."""
    junk = "for n in range(3, 32):\n    try: os.write(n, b'[')\n    except OSError: pass\nreturn 1"
    assert error(junk, "import os")


def test_many_at_once_do_not_disturb_each_other() -> None:
    found: dict[int, object] = {}

    def work(n: int) -> None:
        found[n] = run(f"def f(x):\n    return x + {n}", "f", [[1]]).values

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: (n + 1,) for n in range(8)}


def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = set(children())
    error("while True: pass")
    assert set(children()) <= before


def children() -> list[int]:
    path = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in path.read_text().split()]


def test_a_machine_without_a_filter_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_output", lambda process, wall_s: (json.dumps({"unsafe": "no filter"}).encode(), ""))
    with pytest.raises(
        sandbox.SandboxError, match=r"cannot be run safely here: no filter\. Leave them out with --only"
    ):
        run("def f(): pass", "f", [[]])


def test_filters_of_both_machines_jump_within_their_program() -> None:
    for machine in SYSCALLS:
        steps = program(machine)
        for at, (operation, yes, no, _) in enumerate(steps):
            assert operation == 0x06 or at + 1 + max(yes, no) < len(steps)
        assert steps[-1][0] == 0x06 and len(steps) < 4096


def test_no_constant_passes_hidden_tests() -> None:
    for level in range(LEVELS):
        for number in range(100, 103):
            found = problem("python", number, level)
            head = found.answer.splitlines()[1]
            for constant in (
                "[]",
                "0",
                "False",
                "True",
                "None",
                "''",
                head.partition("(")[2].partition(",")[0].rstrip("):"),
            ):
                said = Reply(f"```python\n{head}\n    return {constant}\n```")
                assert judge(found, said).outcome == "wrong", (found.messages, constant)


def test_hidden_tests_tell_right_from_nearly_right() -> None:
    grade = grader("def f(x):\n    return x + 3", "f", [[n] for n in range(-5, 6)])
    for body, outcome in (("return 3 + x", "right"), ("return x + 4", "wrong"), ("return abs(x) + 3", "wrong"),
                          ("x + 3", "wrong"), ("return str(x + 3)", "wrong"), ("return y", "invalid")):  # fmt: skip
        assert grade(Reply(f"```python\ndef f(x):\n    {body}\n```")).outcome == outcome, body
    assert grade(Reply("```python\nf = lambda x: x + 3\n```")).outcome == "right"
    assert grade(Reply("x + 3")).outcome == "invalid"
