"""Three fake Sparks, provisioned by the playbooks and put through the faults of a cluster's life; `make lab` runs it.

    lab.py [--hold] [--limit SECONDS] [STEP ...]

Everything but the making of the image happens in a network and process namespace of its own, which ends with this
program, guests and all. --hold leaves the guests up until the program is ended; meanwhile another `lab.py STEP ...`
runs steps on them. --limit bounds the whole: what is not done by then, also a step half done, counts as skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import scenario
from cluster import Lab
from host import MASTERS, NAMESPACE, ROOT, LabError, Over, Skip, absent, at_most, missing
from image import image

FOLDER = ROOT / "build/lab"
HOLDER = FOLDER / "pid"
STUCK_S = 120.0
"""After the limit, a lab that has not ended by itself is killed: something in it waits for the kernel."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hold", action="store_true", help="leave the guests up until this is ended")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all of it")
    parser.add_argument("--packages", action="store_true", help="name the Debian packages that are missing, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("steps", nargs="*", choices=[*scenario.STEPS, []], help="all of them, unless some are named")
    given = parser.parse_args()
    if given.packages:
        print(" ".join(absent()))
        return 0
    report = Report(given.steps or list(scenario.STEPS))
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.inside:
        return _inside(report, given.hold, given.limit)
    held = _holder()
    if held and not given.steps:
        parser.error("guests are held already: name the steps to run on them")
    if held:
        here = ["nsenter", f"--target={held}", "--net", "--pid", "--mount"]
        return subprocess.run([*here, *_again(report.names, given.hold, given.limit)]).returncode
    try:
        with at_most(given.limit):
            reason = missing()
            if reason:
                raise Skip(reason)
            image()
    except Skip as problem:
        return report.end(f"skipped: {problem}")
    except Over:
        return report.end(f"skipped: {given.limit:.0f} s are over, and the image of the guests is not made yet")
    except LabError as problem:
        report.outcomes[report.names[0]] = "failed"
        return report.end(f"the image of the guests cannot be made: {problem}")
    return _enter(report, given.hold, given.limit - report.seconds)


class Report:
    """What came of the steps. An outcome is passed, failed, or not there: skipped."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.outcomes: dict[str, str] = {}
        self.figures: dict[str, object] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def write(self) -> None:
        states = {name: self.outcomes.get(name, "skipped") for name in self.names}
        (FOLDER / "report.json").write_text(json.dumps({"outcomes": states, "figures": self.figures}, indent=2) + "\n")

    def end(self, why: str = "") -> int:
        """Print the closing line; the exit code."""
        if why:
            print(f"lab: {why}")
        states = [self.outcomes.get(name, "skipped") for name in self.names]
        print(f"lab: {self.seconds / 60:.1f} minutes")
        counts = (f"{states.count(state)} {state}" for state in ("passed", "failed", "skipped"))
        print(", ".join(counts), flush=True)
        return int("failed" in states)


def _again(names: list[str], hold: bool, limit: float) -> list[str]:
    """This program, inside."""
    options = [*(["--hold"] if hold else []), f"--limit={limit}"]
    return [sys.executable, __file__, "--inside", *options, *names]


def _enter(report: Report, hold: bool, limit: float) -> int:
    """The lab in a new namespace, which everything in it ends with."""
    with subprocess.Popen([*NAMESPACE, *_again(report.names, hold, limit)]) as lab:
        try:
            inner = Path(f"/proc/{lab.pid}/task/{lab.pid}/children")
            deadline = time.monotonic() + 10
            while not inner.read_text().strip() and time.monotonic() < deadline:
                time.sleep(0.1)
            first = inner.read_text().strip()
            HOLDER.write_text(first)
            # unshare itself ignores SIGTERM: the first process inside ends everything.
            signal.signal(signal.SIGTERM, lambda *_: os.kill(int(first), signal.SIGTERM))
            return lab.wait(None if hold or math.isinf(limit) else limit + STUCK_S)
        except subprocess.TimeoutExpired:
            lab.kill()
            print(f"lab: killed: it did not end within {STUCK_S:.0f} s of its limit", flush=True)
            return 1
        finally:
            HOLDER.unlink(missing_ok=True)


def _holder() -> str:
    pid = HOLDER.read_text().strip() if HOLDER.exists() else ""
    return pid if pid and Path(f"/proc/{pid}").exists() else ""


def _inside(report: Report, hold: bool, limit: float) -> int:
    # The first process of a namespace is not ended by a signal that it does not handle.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    MASTERS.mkdir(parents=True, exist_ok=True)
    why = ""
    try:
        with at_most(limit):
            _steps(report, Lab(FOLDER))
    except Skip as problem:
        why = f"skipped: {problem}"
    except Over:
        left = [name for name in report.names if name not in report.outcomes]
        why = f"the time is over; not done: {', '.join(left)}"
    report.write()
    if hold:
        print("lab: holding; end this program to end the guests", flush=True)
        signal.pause()
    return report.end(why)


def _steps(report: Report, lab: Lab) -> None:
    """Run the steps in order, report each, and end at the first failure that leaves nothing to go on with."""
    for name in report.names:
        step: Callable[[Lab], dict[str, object]] = scenario.STEPS[name]
        print(f"lab: {name} ...", flush=True)
        start = time.monotonic()
        try:
            report.figures[name] = {**(step(lab) or {}), "seconds": round(time.monotonic() - start, 1)}
            report.outcomes[name] = "passed"
            print(f"lab: {name} passed: {json.dumps(report.figures[name])}", flush=True)
        except LabError as problem:
            report.outcomes[name] = "failed"
            print(f"lab: {name} FAILED after {time.monotonic() - start:.0f} s: {problem}", flush=True)
            lab.collect(name)
            if name in scenario.FOUNDATIONS or not lab.recovered():
                return


if __name__ == "__main__":
    sys.exit(main())
