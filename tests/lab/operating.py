"""What somebody does with a cluster that serves, by the commands for it; what they say is held against the guests."""

from __future__ import annotations

import re
import tarfile
import time
from pathlib import Path
from typing import Any

from cluster import Lab
from host import LabError
from playbook import PORTS

Figures = dict[str, Any]


def operate(lab: Lab) -> Figures:
    """status, doctor, logs, verify and restart, from where Ansible runs and on a Spark itself."""
    figures: Figures = {}

    def look(name: str, said: str, began: float, *wanted: str) -> None:
        figures[f"{name}_s"] = round(time.monotonic() - began, 1)
        says(f"tfglm {name}", said, *wanted)

    began = time.monotonic()
    look("status", lab.playbooks.tfglm("status"), began, *(rf"rank {n} on spark{n}: serving" for n in range(3)))
    began = time.monotonic()
    on_spark = lab.guests[1].sh("COLUMNS=160 tfglm status")
    look("status_on_spark", on_spark, began, *(rf"{n} \S spark{n} \S serving" for n in range(3)), "is served at")
    began = time.monotonic()
    ways = [rf"rank {a} to {b}, {PORTS[(b - a) % 3 == 2]}\S* \S [\d.]+ Gbit/s" for a, b in _ways()]
    look("doctor", lab.playbooks.tfglm("doctor"), began, "3 ranks over gloo, every value right", *ways)
    began = time.monotonic()
    look("logs", _logs(lab), began, "start 1 serves")
    began = time.monotonic()
    look("verify", lab.playbooks.run("verify").said, began, r"tiny serves at \S+ after")
    pids = [lab.state(guest)["pid"] for guest in lab.guests]
    began = time.monotonic()
    look("restart", lab.playbooks.run("restart").said, began, r"tiny serves at \S+ after")
    if set(pids) & {lab.state(guest)["pid"] for guest in lab.guests}:
        raise LabError(f"restart.yml did not restart every engine: {pids}")
    lab.same_reply()
    return figures


def says(name: str, said: str, *wanted: str) -> None:
    """Raise LabError unless every pattern is found; white space counts as one blank, for a terminal breaks lines."""
    flat = " ".join(said.split())
    missing = [pattern for pattern in wanted if not re.search(pattern, flat)]
    if missing:
        raise LabError(f"{name} does not say {missing}: {said[-2000:]}")


def _ways() -> list[tuple[int, int]]:
    return [(a, b) for a in range(3) for b in range(3) if a != b]


def _logs(lab: Lab) -> str:
    """What the service of rank 0 said, out of the archive that `tfglm logs` makes."""
    folder = lab.folder / "collected"
    said = " ".join(lab.playbooks.tfglm("logs", f"--ansible=-e tfglm_logs={folder}").split())
    named = re.search(r"(\S+/sparks-[\d-]+\.tar\.gz)", said)
    if named is None or not Path(named[1]).exists():
        raise LabError(f"tfglm logs names no archive that is there: {said[-1500:]}")
    with tarfile.open(named[1]) as archive:
        texts = {Path(name).name: archive.extractfile(name) for name in archive.getnames() if name.endswith(".log")}
        kinds = [f"rank{rank}-{kind}.log" for rank in range(3) for kind in ("service", "kernel")]
        if sorted(texts) != sorted(kinds):
            raise LabError(f"the archive has {sorted(texts)}, not {kinds}")
        service = texts["rank0-service.log"]
        return service.read().decode() if service else ""
