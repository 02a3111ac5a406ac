"""Runs Python that a model wrote, in a process that can compute and nothing else (see sandbox_child)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfglm.checks.errors import CheckError

CPU_S = 5
WALL_S = 30.0
"""Waiting and a busy machine count as well."""
MEMORY = 512 << 20
OUTPUT = 1 << 20
"""Bytes of results that are read at most."""

_CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxError(CheckError):
    """Code cannot be run safely on this machine; says why."""


@dataclass(frozen=True)
class Ran:
    """One value a call, or why there is none."""

    values: tuple[Any, ...] = ()
    error: str = ""


def run(
    source: str, function: str, calls: Sequence[Sequence[Any]], *, cpu_s: int = CPU_S, wall_s: float = WALL_S
) -> Ran:
    """Define `source` and call `function` with each of the arguments, all JSON. Raises SandboxError."""
    job = {"source": source, "function": function, "calls": list(calls), "cpu_s": cpu_s, "memory": MEMORY}
    with tempfile.TemporaryDirectory(prefix="tfglm-check-") as folder:
        asked = Path(folder, "job")
        asked.write_text(json.dumps(job))
        with asked.open("rb") as stdin:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_CHILD)],
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=folder, env={"PYTHONHASHSEED": "0"}, start_new_session=True,
            )  # fmt: skip
        try:
            output, fault = _output(process, wall_s)
        finally:
            # Before the process is waited for, so that its group cannot be anybody else's by now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
    return Ran(error=fault) if fault else _result(output, len(calls), cpu_s)


def _output(process: subprocess.Popen[bytes], wall_s: float) -> tuple[bytes, str]:
    """What the process wrote until it closed its end, and what stopped it."""
    assert process.stdout is not None
    deadline = time.monotonic() + wall_s
    output = bytearray()
    with process.stdout, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.select(left):
                return b"", f"no result within {wall_s:g} s"
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return bytes(output), ""
            output += piece
            if len(output) > OUTPUT:
                return b"", f"results of more than {OUTPUT >> 20} MiB"


def _result(output: bytes, calls: int, cpu_s: int) -> Ran:
    try:
        found = json.loads(output)
        if "unsafe" in found:
            raise SandboxError(
                f"Python answers cannot be run safely here: {found['unsafe']}. Leave them out with --only, which names "
                "the categories to ask"
            )
        if "error" in found:
            return Ran(error=f"{found['error']} ({found['at']})")
        values = found["values"]
        if isinstance(values, list) and len(values) == calls:
            return Ran(values=tuple(values))
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return Ran(error=f"the code ended its process, or took more than {cpu_s} s of processor time")
