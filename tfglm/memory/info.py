"""How much memory a machine has to give, from /proc. Works on any sysroot, so that a test can describe a machine.

What CUDA calls free is the kernel's MemFree, to which the page cache is lost; MemAvailable is what counts where GPU and
processor share one memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes. available: Linux's own estimate, MemAvailable. parked: free pages on the per-processor lists, which are in
    no other figure; after a large process has ended they are many. unusable: what the kernel holds back as movable
    only, and yet counts as free."""

    total: int
    available: int
    parked: int = 0
    unusable: int = 0

    @property
    def budget(self) -> int:
        """What a plan may count on. A guard must not: parked pages come back with a delay."""
        return max(0, self.available + self.parked - self.unusable)


def read_memory(sysroot: Path = Path("/")) -> Memory:
    """The memory of this machine now; without Linux's /proc all physical memory counts as available."""
    meminfo = sysroot / "proc/meminfo"
    if not meminfo.exists():
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(physical, physical)
    fields = _meminfo(meminfo.read_text())
    cma_total, cma_free = fields.get("CmaTotal", 0), fields.get("CmaFree", 0)
    return Memory(
        total=fields["MemTotal"],
        available=fields["MemAvailable"],
        parked=_parked_pages(sysroot / "proc/zoneinfo") * os.sysconf("SC_PAGE_SIZE"),
        # More free than there is: pages that a kernel with kexec handover set aside, which cannot be pinned.
        unusable=cma_free if cma_free > cma_total else 0,
    )


def read_available(sysroot: Path = Path("/")) -> int:
    """Bytes available now, for who asks twice a second: zoneinfo, which the rest needs, is slow to add up."""
    meminfo = sysroot / "proc/meminfo"
    return _meminfo(meminfo.read_text())["MemAvailable"] if meminfo.exists() else read_memory(sysroot).available


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by field."""
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _parked_pages(zoneinfo: Path) -> int:
    """The pages on every processor's lists, of all zones; 0 where the kernel does not say."""
    try:
        lines = zoneinfo.read_text().splitlines()
    except OSError:
        return 0
    pages, in_sets = 0, False
    for line in lines:
        words = line.split()
        if words[:1] == ["pagesets"]:
            in_sets = True
        elif words[:1] == ["Node"]:
            in_sets = False
        elif in_sets and words[:1] == ["count:"]:
            pages += int(words[1])
    return pages
