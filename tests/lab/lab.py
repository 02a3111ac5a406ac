"""Three fake Sparks, provisioned by the playbooks and put through the faults of a cluster's life; `make lab` runs it.

    lab.py [--hold] [--limit SECONDS] [STEP ...]

Everything happens in a network and process namespace of its own, which ends with this program, guests and all. --hold
leaves the guests up until the program is ended; meanwhile another `lab.py STEP ...` runs steps on them.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import scenario
from cluster import Lab
from host import ROOT, LabError, Skip, absent, missing

FOLDER = ROOT / "build/lab"
HOLDER = FOLDER / "pid"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hold", action="store_true", help="leave the guests up until this is ended")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no step after so many seconds")
    parser.add_argument("--packages", action="store_true", help="name the Debian packages that are missing, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("steps", nargs="*", choices=[*scenario.STEPS, []], help="all of them, unless some are named")
    given = parser.parse_args()
    if given.packages:
        print(" ".join(absent()))
        return 0
    reason = missing()
    if reason:
        print(f"lab: skipped: {reason}")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not given.inside:
        return _enter()
    return _steps(given.steps or list(scenario.STEPS), given.hold, given.limit)


def _enter() -> int:
    """This program again, in a namespace: that of a lab which is up, or a new one that everything in it ends with."""
    again = [sys.executable, __file__, "--inside", *sys.argv[1:]]
    held = _holder()
    if held:
        return subprocess.run(["nsenter", f"--target={held}", "--net", "--pid", "--mount", *again]).returncode
    space = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen([*space, *again]) as lab:
        signal.signal(signal.SIGTERM, lambda *_: lab.terminate())
        try:
            inner = Path(f"/proc/{lab.pid}/task/{lab.pid}/children")
            deadline = time.monotonic() + 10
            while not inner.read_text().strip() and time.monotonic() < deadline:
                time.sleep(0.1)
            HOLDER.write_text(inner.read_text().strip())
            return lab.wait()
        finally:
            HOLDER.unlink(missing_ok=True)


def _holder() -> str:
    pid = HOLDER.read_text().strip() if HOLDER.exists() else ""
    return pid if pid and Path(f"/proc/{pid}").exists() else ""


def _steps(names: list[str], hold: bool, limit: float) -> int:
    """Run the steps in order, report each, and end at the first failure that leaves nothing to go on with."""
    # The first process of a namespace is not ended by a signal that it does not handle.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    lab = Lab(FOLDER)
    outcomes: dict[str, str] = {}
    figures: dict[str, object] = {}
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > limit:
            print(f"lab: {name} and what follows it skipped: {limit:.0f} s are over", flush=True)
            break
        step: Callable[[Lab], dict[str, object]] = scenario.STEPS[name]
        print(f"lab: {name} ...", flush=True)
        start = time.monotonic()
        try:
            figures[name] = {**(step(lab) or {}), "seconds": round(time.monotonic() - start, 1)}
            outcomes[name] = "passed"
            print(f"lab: {name} passed: {json.dumps(figures[name])}", flush=True)
        except Skip as reason:
            print(f"lab: skipped: {reason}")
            return 0
        except LabError as problem:
            outcomes[name] = "failed"
            print(f"lab: {name} FAILED after {time.monotonic() - start:.0f} s: {problem}", flush=True)
            lab.collect(name)
            if name in scenario.FOUNDATIONS or not lab.recovered():
                break
    (FOLDER / "report.json").write_text(json.dumps({"outcomes": outcomes, "figures": figures}, indent=2) + "\n")
    if hold:
        print("lab: holding; end this program to end the guests", flush=True)
        signal.pause()
    states = [outcomes.get(name, "skipped") for name in names]
    print(f"lab: {(time.monotonic() - began) / 60:.1f} minutes")
    print(f"{states.count('passed')} passed, {states.count('failed')} failed, {states.count('skipped')} skipped")
    return int("failed" in states)


if __name__ == "__main__":
    sys.exit(main())
