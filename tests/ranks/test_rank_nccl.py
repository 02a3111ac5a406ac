"""The NCCL wire, between processes with a GPU each: sums, a captured graph, and the end of a rank that dies."""

import signal
import time

import pytest
import torch
from rank_processes import Toys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks"),
]


@pytest.mark.parametrize("phase", ["done", "captured"])
def test_two_gpus_sum(toys: Toys, phase: str) -> None:
    ranks = toys.start_ranks(2, wire="nccl", device="cuda", phase=phase)
    for toy in ranks:
        toy.wait_end()
        assert toy.exit_code == 0, toy.story()
        sums = [event["value"] for event in toy.events if event["event"] == "sum"]
        assert sums == [3 * 6.0, 3 * 12.0, 3 * 18.0], toy.story()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("hurt", [0, 1])
def test_a_rank_is_lost_in_a_sum(toys: Toys, how: signal.Signals, hurt: int) -> None:
    ranks = toys.start_ranks(2, wire="nccl", device="cuda", phase="busy")
    for toy in ranks:
        toy.wait_for("sum", 5)
    began = time.monotonic()
    ranks[hurt].send(how)
    other = ranks[1 - hurt]
    assert other.wait_end(within_s=30) - began < 10.0, other.story()
    assert other.exit_code != 0
    assert f"rank {hurt} (" in other.log.read_text(), other.story()


@pytest.mark.parametrize("hurt", [0, 1])
def test_a_rank_never_enters_the_collective(toys: Toys, hurt: int) -> None:
    """It has come to the gather, by its beats; the other one's device waits in it, and its host for the device."""
    ranks = toys.start_ranks(2, wire="nccl", device="cuda", phase="busy", absent={hurt: 60.0})
    began = min(toy.wait_for("sum", 3)["at"] for toy in ranks)
    for toy in ranks:
        assert toy.wait_end(within_s=30) - began < 10.0, toy.story()
        assert toy.exit_code != 0
        assert "still wait in gather 4 " in toy.log.read_text(), toy.story()


@pytest.mark.parametrize("hurt", [0, 1])
def test_a_rank_does_not_come_to_the_collective(toys: Toys, hurt: int) -> None:
    """It works on something else and beats: that may be in order, up to the step limit."""
    ranks = toys.start_ranks(2, wire="nccl", device="cuda", phase="busy", stand={hurt: 60.0}, step_s=3.0)
    began = min(toy.wait_for("sum", 3)["at"] for toy in ranks)
    for toy in ranks:
        assert 3.0 <= toy.wait_end(within_s=30) - began < 13.0, toy.story()
        assert toy.exit_code != 0


def test_a_device_that_lags_behind_is_waited_for(toys: Toys) -> None:
    """The host of one rank launches gathers for six seconds of another's device time ahead."""
    ranks = toys.start_ranks(2, wire="nccl", device="cuda", phase="lagging")
    for toy in ranks:
        toy.wait_end()
        assert toy.exit_code == 0, toy.story()
        assert toy.wait_for("lagging", within_s=0)["sum"] == 3.0 * 60
