"""Three ranks in network namespaces, cabled as a triangle like three Sparks: a cut cable ends all of them in time."""

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from rank_processes import Toy, Toys, record

PAIRS = [(0, 1), (0, 2), (1, 2)]


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=True)


class Triangle:
    """A namespace a rank; rank r is 10.77.9.<r + 1>, and reaches each of the others over a cable of their own."""

    def __init__(self) -> None:
        self.names = [f"tfglm{os.getpid()}r{rank}" for rank in range(3)]
        for rank, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{self.host(rank)}/32", "dev", "lo")
        for a, b in PAIRS:
            ip("-n", self.names[a], "link", "add", f"to{b}", "type", "veth", "peer", f"to{a}", "netns", self.names[b])
            for here, there in ((a, b), (b, a)):
                name = self.names[here]
                ip("-n", name, "addr", "add", f"10.77.{a}{b}.{here + 1}/24", "dev", f"to{there}")
                ip("-n", name, "link", "set", f"to{there}", "up")
                via = f"10.77.{a}{b}.{there + 1}"
                ip("-n", name, "route", "add", f"{self.host(there)}/32", "via", via, "src", self.host(here))

    def host(self, rank: int) -> str:
        return f"10.77.9.{rank + 1}"

    def cut(self, a: int, b: int) -> None:
        ip("-n", self.names[a], "link", "set", f"to{b}", "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def triangle() -> Iterator[Triangle]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        made = Triangle()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    yield made
    made.remove()


def start(toys: Toys, triangle: Triangle, phase: str) -> list[Toy]:
    plan = {"port": 29500, "ranks": 3, "host": triangle.host(0), "wire": "gloo", "phase": phase}
    ranks = [
        toys.start(
            {**plan, "rank": rank, "source": triangle.host(rank), "network": f"/run/netns/{triangle.names[rank]}"}
        )
        for rank in range(3)
    ]
    for toy in ranks:
        toy.wait_for("sum", 3)
    return ranks


def seconds_to_the_end(ranks: list[Toy], began: float) -> dict[int, float]:
    took = {toy.rank: toy.wait_end(within_s=30) - began for toy in ranks}
    record(took)
    return took


@pytest.mark.parametrize("phase", ["busy", "idle"])
def test_a_rank_whose_cables_are_both_cut(toys: Toys, triangle: Triangle, phase: str) -> None:
    ranks = start(toys, triangle, phase)
    began = time.monotonic()
    triangle.cut(0, 2)
    triangle.cut(1, 2)
    took = seconds_to_the_end(ranks, began)
    assert max(took.values()) < 10, took
    for rank in (0, 1):
        assert "rank 2 (10.77.9.3:" in ranks[rank].error()["message"], ranks[rank].story()
    assert "rank 0 (10.77.9.1:" in ranks[2].error()["message"]


def test_rank_0_is_cut_off(toys: Toys, triangle: Triangle) -> None:
    ranks = start(toys, triangle, "busy")
    began = time.monotonic()
    triangle.cut(0, 1)
    triangle.cut(0, 2)
    took = seconds_to_the_end(ranks, began)
    assert max(took.values()) < 10, took
    for rank in (1, 2):
        assert "rank 0 (10.77.9.1:" in ranks[rank].error()["message"], ranks[rank].story()


def test_the_cable_between_two_followers_is_cut(toys: Toys, triangle: Triangle) -> None:
    """No beat runs over it: it is found by a gather that all ranks have come to and that does not end."""
    ranks = start(toys, triangle, "busy")
    began = time.monotonic()
    triangle.cut(1, 2)
    took = seconds_to_the_end(ranks, began)
    assert max(took.values()) < 10, took
    for toy in ranks:
        message = toy.error()["message"]
        assert "after all ranks have come to it: what carries it between them is broken" in message, toy.story()
