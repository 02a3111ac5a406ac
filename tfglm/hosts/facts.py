"""What decides whether a machine can be a rank, read from /proc, /sys and the tools that are there. Changes nothing.
Works on any sysroot, whose usr/bin may hold stand-ins for nvidia-smi and docker.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_LARGE_ORDER = 10
"""Blocks of 2**10 pages and more: 4 MiB, what a driver asks for when it loads a model."""
_LISTENING = "0A"
_UNIT = "tfglm@"


def read_facts(sysroot: Path = Path("/"), folders: Sequence[str] = (), ports: Sequence[int] = ()) -> dict[str, Any]:
    """Facts by name, plain JSON. folders: whose disks are asked for free space; ports: that should be free."""
    return {
        "machine": _text(sysroot / "proc/sys/kernel/arch") or os.uname().machine,
        "kernel": _text(sysroot / "proc/sys/kernel/osrelease"),
        "cmdline": _text(sysroot / "proc/cmdline"),
        "boot_id": _text(sysroot / "proc/sys/kernel/random/boot_id"),
        "time": time.time(),
        "cgroup_v2": (sysroot / "sys/fs/cgroup/cgroup.controllers").exists(),
        "memlock": _memlock(sysroot),
        "swap_kib": _swap(sysroot),
        "large_blocks": large_blocks(sysroot),
        "memory_stall": _stall(sysroot),
        "disks": {folder: _disk(sysroot, folder) for folder in folders},
        "listening": _listening(sysroot, ports),
        "gpu": read_gpu(sysroot),
        "docker": read_docker(sysroot),
        "ranks": _ranks(sysroot),
    }


def large_blocks(sysroot: Path) -> int:
    """Free blocks of 4 MiB and more that a driver can have. After days of uptime there may be none although most of
    the memory is free, and loading then crawls. CMA's do not count: they cannot be pinned."""
    lines = _text(sysroot / "proc/pagetypeinfo").partition("Free pages count per migrate type")[2].splitlines()
    counts = [line.partition(" type ")[2].split() for line in lines if line.startswith("Node") and " type " in line]
    if counts:
        return sum(sum(map(int, words[1 + _LARGE_ORDER :])) for words in counts if words[0] != "CMA")
    rows = [line.split("zone")[-1].split() for line in _text(sysroot / "proc/buddyinfo").splitlines()]
    return sum(sum(map(int, words[1 + _LARGE_ORDER :])) for words in rows)


def read_gpu(sysroot: Path) -> dict[str, Any] | None:
    """The first GPU, None without a driver. GB10 answers [N/A] for memory, which it shares with the processor; what
    it does not answer is None here."""
    rows = _smi(sysroot, "name,driver_version,compute_cap")
    if not rows or len(rows[0]) < 3:
        return None
    name, driver, capability = rows[0][:3]
    clocks = (_smi(sysroot, "clocks.sm,clocks.max.sm,power.draw,temperature.gpu,utilization.gpu") or [[]])[0]
    numbers = [_figure(value) for value in clocks[:5]] + [None] * 5
    return {
        "name": name,
        "driver": driver,
        "capability": capability,
        **dict(zip(("clock", "clock_max", "power", "temperature", "busy"), numbers, strict=False)),
        "users": [_user(sysroot, row) for row in _smi(sysroot, "pid,process_name,used_memory", "compute-apps")],
    }


def read_docker(sysroot: Path) -> dict[str, Any] | None:
    """Docker's version, its runtimes and whether it knows the GPU by CDI; None where it does not run."""
    said = _run(sysroot, "docker", "info", "--format", "{{json .}}")
    try:
        info = json.loads(said or "null")
    except ValueError:
        return None
    if not isinstance(info, dict) or not info.get("ServerVersion"):
        return None
    specs = [p for d in ("etc/cdi", "var/run/cdi", "run/cdi") for p in (sysroot / d).glob("nvidia*.*")]
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    return {
        "version": info["ServerVersion"],
        "cgroup": info.get("CgroupVersion", ""),
        "root": info.get("DockerRootDir", ""),
        "runtimes": sorted(info.get("Runtimes") or {}),
        "cdi": bool(specs) or any(device.startswith("nvidia.com/gpu") for device in devices),
    }


def _smi(sysroot: Path, fields: str, what: str = "gpu") -> list[list[str]]:
    said = _run(sysroot, "nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits")
    rows = csv.reader(io.StringIO(said or ""), skipinitialspace=True)
    return [[value.strip() for value in row] for row in rows if row]


def _user(sysroot: Path, row: Sequence[str]) -> dict[str, Any]:
    pid = row[0] if row[0].isdigit() else ""
    return {
        "pid": int(pid or 0),
        "name": row[1] if len(row) > 1 else "",
        "mib": _figure(row[2]) if len(row) > 2 else None,
        "ours": bool(pid) and _is_ours(sysroot, pid),
    }


def _run(sysroot: Path, *command: str) -> str | None:
    """What a command says, None if it is not there, fails or takes too long."""
    path = shutil.which(command[0]) if sysroot == Path("/") else str(sysroot / "usr/bin" / command[0])
    if path is None or not Path(path).exists():
        return None
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _listening(sysroot: Path, ports: Sequence[int]) -> list[dict[str, Any]]:
    """Who has which of `ports`, TCP in the state of listening or UDP."""
    taken: list[tuple[int, str, str]] = []
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text(sysroot / "proc/net" / protocol).splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            if port in ports and (protocol.startswith("udp") or words[3] == _LISTENING):
                taken.append((port, protocol, words[9]))
    owners = _owners(sysroot, {inode for _, _, inode in taken}) if taken else {}
    return [
        {"port": port, "protocol": protocol, **_process(sysroot, owners.get(inode, ""))}
        for port, protocol, inode in taken
    ]


def _owners(sysroot: Path, inodes: Iterable[str]) -> dict[str, str]:
    """Process by socket; those of others are seen by root alone."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found = {}
    for entry in (sysroot / "proc").glob("[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target in wanted:
            found[wanted[target]] = entry.parent.parent.name
    return found


def _process(sysroot: Path, pid: str) -> dict[str, Any]:
    command = _text(sysroot / "proc" / pid / "cmdline").replace("\0", " ").strip() if pid else ""
    return {"pid": int(pid or 0), "command": command[:120], "ours": bool(pid) and _is_ours(sysroot, pid)}


def _is_ours(sysroot: Path, pid: str) -> bool:
    return _UNIT in _text(sysroot / "proc" / pid / "cgroup")


def _ranks(sysroot: Path) -> list[int]:
    """Ranks whose service runs here, by their control groups."""
    folders = (sysroot / "sys/fs/cgroup/system.slice").glob(f"**/{_UNIT}*.service")
    return sorted({int(m[1]) for path in folders if (m := re.search(r"tfglm@(\d+)\.service$", path.name))})


def _disk(sysroot: Path, folder: str) -> dict[str, Any]:
    """Free space where `folder` is or will be. device tells whether two folders share a disk."""
    path = sysroot / folder.lstrip("/")
    while not path.exists() and path != path.parent:
        path = path.parent
    stats = os.statvfs(path)
    return {
        "free": stats.f_bavail * stats.f_frsize,
        "total": stats.f_blocks * stats.f_frsize,
        "device": path.stat().st_dev,
    }


def _memlock(sysroot: Path) -> int:
    """Bytes that services may lock at most, -1 without a limit: what PID 1 passes on."""
    line = re.search(r"^Max locked memory\s+(\S+)\s+(\S+)", _text(sysroot / "proc/1/limits"), re.MULTILINE)
    return -1 if line is None or line[2] == "unlimited" else int(line[2])


def _swap(sysroot: Path) -> int:
    return sum(int(line.split()[2]) for line in _text(sysroot / "proc/swaps").splitlines()[1:])


def _stall(sysroot: Path) -> float:
    """Share of the last ten seconds, in percent, in which everything waited for memory."""
    full = re.search(r"^full avg10=([\d.]+)", _text(sysroot / "proc/pressure/memory"), re.MULTILINE)
    return float(full[1]) if full else 0.0


def _figure(value: str) -> float | None:
    try:
        return float(value.split()[0])
    except (ValueError, IndexError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
