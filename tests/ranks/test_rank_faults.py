"""Three ranks as processes on real sockets: one is hurt, and the others end within ten seconds, naming it."""

import signal
import time

import pytest
from rank_processes import Toy, Toys, free_port, record

WITHIN_S = 10.0


def ends_of_the_others(ranks: list[Toy], hurt: int, since: float) -> dict[int, float]:
    """Seconds from the fault to the end of every other rank."""
    others = [toy for toy in ranks if toy.rank != hurt]
    took = {toy.rank: toy.wait_end(within_s=30) - since for toy in others}
    record(took)
    return took


def assert_all_named_it(ranks: list[Toy], hurt: int) -> None:
    for toy in ranks:
        if toy.rank != hurt:
            error = toy.error()
            assert error["message"].startswith("E_RANKS: "), error
            assert f"rank {hurt}" in error["message"], toy.story()
            assert toy.exit_code != 0


@pytest.mark.parametrize("hurt", [0, 1, 2])
@pytest.mark.parametrize(("wire", "phase"), [("gloo", "busy"), ("shared", "busy"), ("gloo", "idle")])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_is_killed_or_stopped(toys: Toys, how: signal.Signals, wire: str, phase: str, hurt: int) -> None:
    ranks = toys.start_ranks(3, wire=wire, phase=phase)
    ranks[0].wait_for("idle" if phase == "idle" else "sum", 1 if phase == "idle" else 5)
    for toy in ranks:
        toy.wait_for("sum", 3)
    began = time.monotonic()
    ranks[hurt].send(how)
    took = ends_of_the_others(ranks, hurt, began)
    assert max(took.values()) < WITHIN_S, took
    assert_all_named_it(ranks, hurt)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("hurt", [0, 1])
def test_a_rank_is_lost_while_another_has_not_come(toys: Toys, how: signal.Signals, hurt: int) -> None:
    ranks = toys.start_ranks(3, only=(0, 1))
    ranks[0].wait_for("listening")
    ranks[1].wait_for("progress")  # it has joined and waits for rank 2
    began = time.monotonic()
    ranks[hurt].send(how)
    took = ends_of_the_others(ranks, hurt, began)
    assert max(took.values()) < WITHIN_S, took
    assert_all_named_it(ranks, hurt)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("hurt", [0, 2])
def test_a_rank_is_lost_while_another_loads(toys: Toys, how: signal.Signals, hurt: int) -> None:
    ranks = toys.start_ranks(3, wire="gloo", load={1: 60.0})
    for toy in ranks:
        toy.wait_for("joined")
    time.sleep(1.0)  # by now ranks 0 and 2 wait for rank 1
    began = time.monotonic()
    ranks[hurt].send(how)
    took = ends_of_the_others(ranks, hurt, began)
    assert max(took.values()) < WITHIN_S, took
    # Rank 1 loads on and is ended for it: its log names the rank, it says nothing itself.
    for toy in ranks:
        if toy.rank != hurt:
            assert f"rank {hurt} (" in toy.log.read_text(), toy.story()


@pytest.mark.parametrize("hurt", [0, 1])
def test_a_delay_shorter_than_the_limits_is_waited_for(toys: Toys, hurt: int) -> None:
    """Standing in its own work for longer than a lost beat takes: it goes on beating, so nobody gives it up."""
    ranks = toys.start_ranks(3, wire="shared", phase="busy", stand={hurt: 6.0})
    for toy in ranks:
        toy.wait_for("sum", 5)


@pytest.mark.parametrize("wire", ["gloo", "shared"])
@pytest.mark.parametrize("hurt", [0, 1, 2])
def test_a_rank_that_beats_but_does_not_get_on(toys: Toys, wire: str, hurt: int) -> None:
    ranks = toys.start_ranks(3, wire=wire, phase="busy", stand={hurt: 60.0}, step_s=3.0)
    began = min(toy.wait_for("sum", 3)["at"] for toy in ranks)
    took = {toy.rank: toy.wait_end(within_s=30) - began for toy in ranks}
    assert min(took.values()) >= 3.0 and max(took.values()) < 3.0 + WITHIN_S, took
    # The rank that stands never comes to say anything itself: its process is ended for it.
    for toy in ranks:
        if toy.rank != hurt:
            assert toy.error()["type"] == "RanksError"


@pytest.mark.parametrize("wire", ["gloo", "shared"])
@pytest.mark.parametrize("hurt", [0, 1])
def test_a_rank_that_comes_to_a_gather_and_never_enters_it(toys: Toys, wire: str, hurt: int) -> None:
    """Whatever hangs there, a library or a driver: all have come to it, by their beats, and it does not end."""
    ranks = toys.start_ranks(3, wire=wire, phase="busy", absent={hurt: 60.0})
    began = min(toy.wait_for("sum", 3)["at"] for toy in ranks)
    took = {toy.rank: toy.wait_end(within_s=30) - began for toy in ranks}
    record(took)
    assert max(took.values()) < WITHIN_S, took
    for toy in ranks:
        if toy.rank != hurt:
            assert "still wait in gather 4 " in toy.error()["message"], toy.story()


def test_a_rank_started_with_another_settings_hash_is_found_at_the_first_message(toys: Toys) -> None:
    """The checksums begin with it, should the facts ever fail to say so."""
    port = free_port()
    plan = {"port": port, "ranks": 3, "wire": "shared"}
    ranks = [toys.start({**plan, "rank": rank, "settings": "b" if rank == 2 else "a"}) for rank in range(3)]
    for toy in ranks:
        toy.wait_end()
        message = toy.error()["message"]
        assert "message 1 (add) has checksum" in message and "on rank 0 and" in message and "on rank 2" in message
