"""Three supervisors, real sockets and processes: whatever dies, all end within ten seconds and start again together."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Supervised]:
    with Supervised(tmp_path) as cluster:
        yield cluster


def test_they_start_together_and_stop_in_order(three: Supervised) -> None:
    three.start(2, 1)
    three.until(lambda: "rank 0 (spark0), which has not been heard of" in three.state(2)["reason"])
    assert not three.engines()
    three.start(0)
    three.until_serving(1)
    three.until(lambda: len(three.engines()) == 3, 10, "three engines")
    three.signal(0, signal.SIGTERM)
    assert three.ended(0) == 0
    three.until_down()
    three.until(lambda: "rank 0 (spark0), which has stopped" in three.state(1)["reason"])
    assert three.state(0)["phase"] == "gone"
    three.start(0)
    three.until_serving(2)


def test_a_killed_engine_ends_all_and_all_start_again(three: Supervised) -> None:
    three.start()
    three.until_serving(1)
    before = three.engines()
    os.kill(three.engine(1), signal.SIGKILL)
    three.until(lambda: not set(three.engines()) & set(before), 10, "the first engines are gone")
    three.until_serving(2)
    assert "rank 1 (spark1): the engine was killed by SIGKILL" in three.log(0)
    assert "rank 1 (spark1): the engine was killed by SIGKILL" in three.log(2)


def test_a_killed_supervisor_takes_its_engine_along_and_ends_all(three: Supervised) -> None:
    three.start()
    three.until_serving(1)
    three.signal(2, signal.SIGKILL)
    three.until_down()
    assert "rank 2 (spark2) has been silent" in three.log(0)
    three.start(2)
    three.until_serving(2)


def test_a_stopped_supervisor_is_silent_and_its_engine_is_replaced_when_it_goes_on(three: Supervised) -> None:
    three.start()
    three.until_serving(1)
    old = three.engine(1)
    three.signal(1, signal.SIGSTOP)
    three.until(lambda: three.engines() == [old], 10, "the others are down")
    three.signal(1, signal.SIGCONT)
    three.until_serving(2)
    assert old not in three.engines()


def test_rank_0_killed_and_back(three: Supervised) -> None:
    three.start()
    three.until_serving(1)
    three.signal(0, signal.SIGKILL)
    three.until_down()
    three.start(0)
    three.until_serving(2)


def test_a_supervisor_restarted_at_once_does_not_slip_into_the_running_start(three: Supervised) -> None:
    three.start()
    three.until_serving(1)
    three.signal(1, signal.SIGKILL)
    three.start(1)
    three.until_serving(2)
    three.until(lambda: len(three.engines()) == 3, 10, "three engines")


def test_another_rank_that_stops_lets_replies_finish_first(three: Supervised) -> None:
    three.behave(0, drains=1.0)
    three.start()
    three.until_serving(1)
    three.signal(1, signal.SIGTERM)
    three.until(lambda: three.state(0)["phase"] == "draining")
    assert three.ended(1) == 0
    three.until_down()
    assert "start 1 is over: rank 1 (spark1) stops" in three.log(0)
    assert "ERROR" not in three.log(0)
    three.start(1)
    three.until_serving(2)


def test_other_settings_on_one_rank_are_named(three: Supervised) -> None:
    three.write(2, settings=three.cluster["settings"] | {"context": 8192})
    three.start()
    three.until(lambda: "settings.context is nothing on rank 0 and 8192 on rank 2" in three.state(0)["reason"])
    assert not three.engines()


def test_a_start_limit_ends_what_cannot_work(tmp_path: Path) -> None:
    with Supervised(tmp_path, limits={"attempts": 3}) as three:
        three.behave(1, exits=1, says="E_CHECKPOINT: shard 7 is broken")
        three.start()
        assert three.ended(0, 60) == 71
        assert "3 starts in a row have failed" in three.log(0)
        assert "shard 7 is broken" in three.log(0)
        starts = (three.checkpoint / "starts").read_text().splitlines()
        assert sum(line.startswith("1 ") for line in starts) == 3
        three.until(lambda: "rank 0 (spark0), which has stopped: E_CHECKPOINT" in three.state(1)["reason"])
        assert "shard 7 is broken" in "".join(three.state(1)["tail"])


def test_memory_below_the_guard_ends_all_and_the_plan_holds_the_next_start(tmp_path: Path) -> None:
    with Supervised(tmp_path, limits={"memory": 60}, settings={"guard_gib": 0.2, "floor_gib": 0.5}) as three:
        three.start()
        three.until_serving(1)
        three.plan(lowest_free=0)
        os.kill(three.engine(2), signal.SIGKILL)
        three.until(lambda: "waiting for memory: rank 1 needs 1.00 GiB" in three.state(1)["reason"])
        three.plan()
        three.until_serving(2)
