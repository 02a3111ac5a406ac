"""Two network namespaces joined by a control cable and a rail, both real: a rail that is cut, dead or too narrow."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _possible() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tfglm{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "name", "a0", "mtu", "9000", "type", "veth", "peer", "name", "b0")
        finally:
            ip("netns", "delete", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


pytestmark = pytest.mark.skipif(not _possible(), reason="network namespaces need root and iproute2")


class Cables:
    """Namespaces of ranks 0 and 1. In each: `ctl` (10.99.0.x) and `rail` (10.99.1.x, jumbo packets)."""

    def __init__(self) -> None:
        self.names = [f"tfglm{secrets.token_hex(3)}" for _ in range(2)]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for cable, subnet in (("ctl", 0), ("rail", 1)):
            ends = [["name", cable, "netns", name] for name in self.names]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for rank, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"10.99.{subnet}.{rank + 1}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "mtu", "9000" if cable == "rail" else "1500", "up")

    def rail(self, rank: int, *words: str) -> None:
        ip("-n", self.names[rank], "link", "set", "rail", *words)

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "delete", name)


@pytest.fixture
def cables() -> Iterator[Cables]:
    cables = Cables()
    yield cables
    cables.remove()


@pytest.fixture
def two(cables: Cables, tmp_path: Path) -> Iterator[Supervised]:
    ranks = [
        {
            "name": f"spark{rank}",
            "control": f"10.99.0.{rank + 1}",
            "rails": [{"peer": 1 - rank, "address": f"10.99.1.{rank + 1}"}],
        }
        for rank in (0, 1)
    ]
    with Supervised(tmp_path, count=2, ranks=ranks) as two:
        two.namespaces = cables.names
        for rank in (0, 1):
            rail = {"peer": 1 - rank, "interface": "rail", "mtu": 9000, "rdma": ""}
            rail |= {"address": f"10.99.1.{rank + 1}", "peer_address": f"10.99.1.{2 - rank}"}
            two.nodes[rank] = {"interface": "ctl", "rails": [rail]}
            two.write(rank)
        yield two


def test_a_cut_cable_ends_all_ranks_and_a_mended_one_brings_them_back(cables: Cables, two: Supervised) -> None:
    two.start()
    two.until_serving(1)
    assert [link[0] for link in two.state(0)["rails"]] == ["rail"]
    cables.rail(1, "down")
    two.until_down(10)
    two.until(lambda: two.state(0)["reason"].startswith("waiting for carrier on rail (rail to rank 1)"), 20)
    assert "E_FABRIC: " in two.log(0)
    cables.rail(1, "up")
    ip("-n", cables.names[1], "address", "replace", "10.99.1.2/24", "dev", "rail")
    two.until_serving(2)


def test_a_port_with_a_smaller_mtu_holds_the_start(cables: Cables, two: Supervised) -> None:
    """Each port is what its own rank.json says; full packets of one are dropped by the other, short ones go through."""
    cables.rail(1, "mtu", "1500")
    two.nodes[1]["rails"][0]["mtu"] = 1500
    two.write(1)
    two.start()
    words = "rail rail (10.99.1.2): no full packet comes from 10.99.1.1 of rank 0"
    two.until(lambda: words in two.state(1)["reason"], 30)
    two.until(lambda: "rank 1 (spark1), which has lost rail rail" in two.state(0)["reason"], 30)
    assert not two.engines()
    cables.rail(1, "mtu", "9000")
    two.until_serving(1)
