from pathlib import Path

import pytest

from tfglm.memory.info import read_available, read_memory

KIB, PAGE_BYTES = 1024, 4096

ZONEINFO = """Node 0, zone      DMA
  pages free     2816
        boost    0
      nr_free_pages 2816
  pagesets
    cpu: 0
              count: 7
              high:  14
              batch: 1
  vm stats threshold: 10
    cpu: 1
              count: 3
              high:  14
  start_pfn:           1
Node 0, zone   Normal
  pages free     999
        count:  123456
  pagesets
    cpu: 0
              count: 90
"""


@pytest.fixture
def sysroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": PAGE_BYTES, "SC_PHYS_PAGES": 50}[name])
    (tmp_path / "proc").mkdir()
    return tmp_path


def describe(sysroot: Path, *lines: str) -> None:
    fields = ("MemTotal:  1000 kB", "MemFree:  10 kB", "MemAvailable:  700 kB", "HugePages_Total:  3", *lines)
    (sysroot / "proc/meminfo").write_text("\n".join(fields) + "\n")


def test_available_is_linux_own_estimate(sysroot: Path) -> None:
    describe(sysroot)
    memory = read_memory(sysroot)
    assert (memory.total, memory.available, memory.budget) == (1000 * KIB, 700 * KIB, 700 * KIB)
    assert read_available(sysroot) == 700 * KIB


def test_parked_pages_are_part_of_the_budget_only(sysroot: Path) -> None:
    describe(sysroot)
    (sysroot / "proc/zoneinfo").write_text(ZONEINFO)
    memory = read_memory(sysroot)
    assert memory.parked == 100 * PAGE_BYTES
    assert (memory.available, memory.budget) == (700 * KIB, 700 * KIB + 100 * PAGE_BYTES)


@pytest.mark.parametrize(("total", "free", "lost"), [(64, 60, 0), (64, 90, 90), (0, 90, 90)])
def test_pages_set_aside_that_look_free_are_taken_off(sysroot: Path, total: int, free: int, lost: int) -> None:
    describe(sysroot, f"CmaTotal: {total} kB", f"CmaFree: {free} kB")
    assert read_memory(sysroot).budget == (700 - lost) * KIB


def test_without_proc_all_physical_memory_counts(sysroot: Path) -> None:
    assert read_memory(sysroot).budget == 50 * PAGE_BYTES


def test_this_machine() -> None:
    memory = read_memory()
    assert 2**24 < memory.available <= memory.total
