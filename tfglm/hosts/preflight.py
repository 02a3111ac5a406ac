"""What is wrong with a machine that is to be a rank: every refusal with a code, its figures and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
_OLDEST_CAPABILITY = (8, 9)
_GB10 = (12, 1)
_SLOW_CLOCK_MHZ = 1000
_BUSY_PERCENT = 50


@dataclass(frozen=True)
class Wanted:
    """What the inventory asks of every machine. gpu: gb10, any (NVIDIA, capability 8.9 or later), none. ports: that
    the service needs. disks: bytes that must be free, by folder. skew_s: largest difference between clocks."""

    arch: str = "aarch64"
    gpu: str = "gb10"
    runtime: str = "docker"
    driver: int = 580
    kernels_denied: Sequence[str] = ()
    ports: Sequence[int] = ()
    disks: Mapping[str, int] | None = None
    memory_bytes: int = 0
    large_blocks: int = 0
    skew_s: float = 5.0


@dataclass(frozen=True)
class Finding:
    """code: E_ refuses, W_ is only said."""

    code: str
    machine: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: {self.machine}: {self.what}. {self.remedy}"


def judge(
    machine: str, facts: Mapping[str, Any], wanted: Wanted, read_between: tuple[float, float] | None = None
) -> list[Finding]:
    """What `facts` of one machine lack. read_between: when they were read, by the clock of the judging machine."""
    parts = [check(facts, wanted) for check in (_system, _gpu, _docker, _disks, _memory, _ports)]
    if read_between is not None:
        parts.append(_clock(facts, wanted, read_between))
    return [Finding(code, machine, what, remedy) for part in parts for code, what, remedy in part]


_Said = Iterator[tuple[str, str, str]]


def _system(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    if wanted.arch != "any" and facts["machine"] != wanted.arch:
        yield "E_WORKER", f"its processor is {facts['machine']}, not {wanted.arch}", "tfglm_arch takes another one"
    denied = [name for name in wanted.kernels_denied if name in facts["kernel"]]
    if denied:
        remedy = "Boot another kernel, or take it off tfglm_kernels_denied if you know it to work"
        yield "E_WORKER", f"kernel {facts['kernel']} is known not to work ({denied[0]})", remedy
    if not facts["cgroup_v2"]:
        yield "E_WORKER", "control groups are version 1", "Boot with systemd.unified_cgroup_hierarchy=1"
    if facts["memlock"] >= 0:
        limit = f"services may lock {facts['memlock'] / 2**20:.0f} MiB at most"
        yield (
            "W_WORKER",
            limit,
            "Unless the unit may raise it, RDMA fails: set DefaultLimitMEMLOCK=infinity for systemd",
        )


def _gpu(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    if wanted.gpu == "none":
        return
    gpu = facts["gpu"]
    if gpu is None:
        yield (
            "E_WORKER",
            "nvidia-smi is not there or finds no GPU",
            "Install the driver, or set tfglm_gpu=none for a CPU",
        )
        return
    words = gpu["capability"].split(".")
    capability = (int(words[0]), int(words[1])) if len(words) == 2 and all(w.isdigit() for w in words) else (0, 0)
    if wanted.gpu == "gb10" and capability != _GB10:
        what = f"{gpu['name']} has compute capability {gpu['capability']}; a Spark's GB10 has 12.1"
        yield "E_WORKER", what, "tfglm_gpu=any takes every NVIDIA GPU from 8.9"
    elif capability < _OLDEST_CAPABILITY:
        yield "E_WORKER", f"{gpu['name']} has compute capability {gpu['capability']}, below 8.9", "Use another GPU"
    major = re.match(r"\d+", gpu["driver"])
    if major is None or int(major[0]) < wanted.driver:
        yield "E_WORKER", f"its driver is {gpu['driver']}, older than {wanted.driver}", "Update the NVIDIA driver"
    for user in gpu["users"]:
        if not user["ours"]:
            size = "memory unknown" if user["mib"] is None else f"{user['mib'] / 1024:.1f} GiB"
            what = f"process {user['pid']} ({user['name']}) is on its GPU with {size}"
            yield "E_MEMORY", what, "Stop it: GPU and processor share one memory"
    if (gpu["busy"] or 0) > _BUSY_PERCENT and gpu["clock"] is not None and gpu["clock"] < _SLOW_CLOCK_MHZ:
        what = f"its GPU is {gpu['busy']:.0f} % busy at {gpu['clock']:.0f} MHz and {gpu['power'] or 0:.0f} W"
        yield "E_WORKER", what, "Clocks are stuck low: shut it down and unplug its power supply for a minute"


def _docker(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    if wanted.runtime != "docker":
        return
    docker = facts["docker"]
    if docker is None:
        what = "docker does not answer `docker info`"
        yield "E_WORKER", what, "Start it, or set tfglm_runtime=venv to serve without containers"
        return
    if docker["cgroup"] not in ("", "2"):
        yield (
            "E_WORKER",
            f"docker uses control groups {docker['cgroup']}",
            "Restart docker once the system has version 2",
        )
    if wanted.gpu != "none" and not docker["cdi"] and "nvidia" not in docker["runtimes"]:
        remedy = "Run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` or install the NVIDIA container runtime"
        yield "E_WORKER", f"docker has no way to the GPU (runtimes {', '.join(docker['runtimes'])}; no CDI)", remedy


def _disks(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    """Folders on one disk need their sum."""
    need: dict[Any, list[str]] = {}
    for folder in wanted.disks or {}:
        need.setdefault(facts["disks"][folder]["device"], []).append(folder)
    for folders in need.values():
        total = sum((wanted.disks or {})[folder] for folder in folders)
        free = facts["disks"][folders[0]]["free"]
        if free < total:
            what = f"{free / GIB:.1f} GiB are free for {' and '.join(folders)}; {total / GIB:.1f} GiB are needed"
            yield "E_DISK", what, "Free some, or move the folder to another disk"


def _memory(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    memory = facts["memory"]
    if memory["unusable"]:
        what = (
            f"{memory['unusable'] / GIB:.1f} GiB count as free but belong to the kernel's reserve (CmaFree > CmaTotal)"
        )
        yield "E_MEMORY", what, "Boot with kho=off: nothing can pin that memory, and RDMA fails with ENOMEM"
    if facts["ranks"]:
        return  # the service runs, and has its memory already
    if memory["budget"] < wanted.memory_bytes:
        what = (
            f"{memory['budget'] / GIB:.1f} GiB are available; {wanted.memory_bytes / GIB:.1f} GiB are needed to start"
        )
        yield "E_MEMORY", what, "See what runs there; memory of a process that just ended needs a moment"
    if facts["large_blocks"] < wanted.large_blocks:
        what = f"{facts['large_blocks']} free blocks of 4 MiB are left, fewer than {wanted.large_blocks}"
        yield "E_MEMORY", what, "Memory is in pieces, and loading would crawl: reboot it"
    if facts["memory_stall"] > 0:
        yield "W_MEMORY", f"it waited for memory {facts['memory_stall']:.0f} % of the last 10 s", "See what runs there"


def _ports(facts: Mapping[str, Any], wanted: Wanted) -> _Said:
    for taken in facts["listening"]:
        # A container's process is not in the unit's control group, so a running rank is taken at its word.
        if taken["port"] in wanted.ports and not taken["ours"] and not facts["ranks"]:
            who = f"process {taken['pid']} ({taken['command']})" if taken["pid"] else "another process"
            yield (
                "E_PORT",
                f"{taken['protocol']} port {taken['port']} is taken by {who}",
                "Stop it, or choose another port",
            )


def _clock(facts: Mapping[str, Any], wanted: Wanted, between: tuple[float, float]) -> _Said:
    early, late = between
    off = facts["time"] - (early if facts["time"] < early else late if facts["time"] > late else facts["time"])
    if abs(off) > wanted.skew_s:
        yield "E_WORKER", f"its clock is {off:+.1f} s off", "Let it follow a time server: timedatectl set-ntp true"
