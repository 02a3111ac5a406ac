"""A wire between devices, whose gathers the host does not wait for: which of them hang is told by marks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfglm.ranks.arrivals import Arrivals
from tfglm.ranks.control import Timing, controls_in_process
from tfglm.ranks.group import RankGroup
from tfglm.ranks.inprocess import InProcessWire, in_process_wires

QUICK = Timing(beat_s=0.05, lost_s=5.0, step_s=60.0, gather_s=1.0)


class Device:
    """Does what was launched on it, one after the other, as far as the test says."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0

    def mark(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._place = 0

    def record(self) -> None:
        self._device.launched += 1
        self._place = self._device.launched

    def query(self) -> bool:
        return self._device.done >= self._place


class EarlyWire:
    """Gives what it gathers at once; when it would have come is the device's matter."""

    capturable = True

    def __init__(self, wire: InProcessWire, device: Device) -> None:
        self.rank, self.ranks = wire.rank, wire.ranks
        self.arrivals = Arrivals(device.mark)
        self.gather, self.abort, self.close = wire.gather, wire.abort, wire.close


class Graph:
    def replay(self) -> None:
        """What it launches is not seen by the host."""


@contextmanager
def three() -> Iterator[tuple[list[RankGroup], list[Device]]]:
    devices = [Device() for _ in range(3)]
    wires = [EarlyWire(wire, device) for wire, device in zip(in_process_wires(3), devices, strict=True)]
    groups = [RankGroup(*ends) for ends in zip(wires, controls_in_process(3, QUICK), strict=True)]
    yield groups, devices
    for group in groups:
        group.close()


def launch(groups: list[RankGroup], gathers: int) -> None:
    def run(group: RankGroup) -> None:
        for _ in range(gathers):
            group.gather(torch.ones(2))
        group.replay(Graph())  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_gather_that_hangs_on_the_devices_ends_all_ranks() -> None:
    with three() as (groups, devices):
        launch(groups, 5)
        for device, done in zip(devices, (2, 6, 2), strict=True):
            device.done = done
        for group in groups:
            error = group.control.failure(10)
            assert error is not None and error.message.startswith("ranks 0, 2 still wait in gather 3 ")


def test_a_graph_that_hangs_is_a_gather_that_does() -> None:
    with three() as (groups, devices):
        launch(groups, 5)
        for device in devices:
            device.done = 5
        error = groups[1].control.failure(10)
        assert error is not None and error.message.startswith("ranks 0, 1, 2 still wait in gather 6 ")


def test_devices_that_lag_behind_and_get_on_are_waited_for() -> None:
    with three() as (groups, devices):
        launch(groups, 9)
        assert [device.launched for device in devices] == [10, 10, 10]
        for done in range(1, 11):  # in all more than twice as long as one gather may take
            for device in devices:
                device.done = done
            time.sleep(0.25)
        time.sleep(2 * QUICK.gather_s)
        for group in groups:
            group.check()


def test_marks_are_used_again() -> None:
    device = Device()
    arrivals = Arrivals(device.mark)
    made: list[Mark] = []
    arrivals._new = lambda: made.append(device.mark()) or made[-1]
    for number in range(1, 100):
        arrivals.launched(number)
        device.done = device.launched
    assert arrivals.last() == 99 and len(made) == 1
