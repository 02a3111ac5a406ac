import errno
import logging
import threading
import time
from pathlib import Path

import pytest

from tfglm.memory.guard import GIB, Guard, LowWater
from tfglm.memory.info import read_available


class Machine:
    """A sysroot whose available memory a test sets, in GiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "proc").mkdir()
        self.have(8)

    def have(self, gib: float) -> None:
        text = f"MemTotal: 16777216 kB\nMemAvailable: {round(gib * 2**20)} kB\n"
        new = self.path / "proc/meminfo.new"
        new.write_text(text)
        new.replace(self.path / "proc/meminfo")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def guarded(machine: Machine, acts: list[LowWater], limit: float = 2, floor: float = 4) -> Guard:
    return Guard(round(limit * GIB), round(floor * GIB), acts.append, sysroot=machine.path)


def sample(guard: Guard, machine: Machine, *gib: float) -> None:
    for amount in gib:
        machine.have(amount)
        guard.sample()


def test_acts_once_on_the_second_sample_below_the_limit_in_a_row(machine: Machine) -> None:
    acts: list[LowWater] = []
    guard = guarded(machine, acts)
    sample(guard, machine, 1.9, 2.1, 1.9, 2.0, 1.5)
    assert not acts and not guard.tripped
    sample(guard, machine, 1.25)
    assert [low.available for low in acts] == [round(1.25 * GIB)] and guard.tripped
    sample(guard, machine, 1.0, 1.0, 1.0)
    assert len(acts) == 1


def test_keeps_the_low_water_mark_and_when_it_was(machine: Machine) -> None:
    guard = guarded(machine, [])
    begun = time.time()
    sample(guard, machine, 7, 5, 6)
    assert guard.low.available == 5 * GIB
    assert begun - 1 <= guard.low.when <= time.time()
    assert str(guard.low).startswith("5.00 GiB at ")


def test_limit_0_never_acts(machine: Machine) -> None:
    acts: list[LowWater] = []
    sample(guarded(machine, acts, limit=0), machine, 0, 0, 0)
    assert not acts


def test_warns_each_time_memory_falls_below_the_floor(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sample(guarded(machine, []), machine, 3.9, 3.8, 4.0, 3.5, 3.0)
    assert caplog.text.count("W_MEMORY") == 2


def test_a_sample_that_fails_does_not_end_the_watch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    acted = threading.Event()
    guard = Guard(2 * GIB, 4 * GIB, lambda low: acted.set(), sysroot=machine.path)
    failed = threading.Event()

    def fails_once(sysroot: Path) -> int:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return read_available(sysroot)

    monkeypatch.setattr("tfglm.memory.guard.read_available", fails_once)
    machine.have(1)
    guard.start()
    assert acted.wait(30) and failed.is_set()
    guard.stop()


def test_the_thread_samples_by_itself_and_ends(machine: Machine) -> None:
    acted = threading.Event()
    guard = Guard(2 * GIB, 4 * GIB, lambda low: acted.set(), sysroot=machine.path)
    guard.start()
    machine.have(1)
    assert acted.wait(30)
    guard.stop()
    assert not guard._thread.is_alive()
