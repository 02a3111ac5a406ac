"""Three Sparks with both PCIe twins of every cable, as trees of files: from what they show to what their ranks run."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from spark import CABLE_PORTS, gids, make_spark, netdev, smi, write

from tfglm.hosts.cabling import adopted_rails, as_json, fabric_problems, managed_rails, netplan_of
from tfglm.hosts.fabric import read_fabric
from tfglm.hosts.facts import read_facts, read_gpu
from tfglm.hosts.preflight import Wanted, judge
from tfglm.supervisor import fabric, provision
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.facts import parse

NAMES = ("spark0", "spark1", "spark2")
FIRST, SECOND = list(CABLE_PORTS)[:2], list(CABLE_PORTS)[2:]
"""The twins of each of the two cable ports."""


def heard() -> dict[str, list[dict[str, str]]]:
    """Port 0 of each machine goes to port 1 of the next; a broadcast reaches both twins at the other end."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
    for name, peer in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True):
        for a, b in itertools.product(FIRST, SECOND):
            found[name].append({"port": a, "machine": peer, "peer_port": b})
            found[peer].append({"port": b, "machine": name, "peer_port": a})
    return found


class Sparks:
    """Managed as the fabric role does it: rails from the cables, addresses from netplan, then read again."""

    def __init__(self, folder: Path) -> None:
        self.roots = {name: make_spark(folder / name) for name in NAMES}
        bare = {name: read_fabric(root).ports for name, root in self.roots.items()}
        self.rails = managed_rails(bare, heard(), "10.122.0.0/16")
        for i, (name, root) in enumerate(self.roots.items()):
            plan = netplan_of(name, self.rails, 9000)["network"]["ethernets"]
            ports = {port: entry["addresses"] for port, entry in plan.items()}
            make_spark(root, {**ports, "enP7s7": [f"192.168.1.2{i}/24"]})

    def machines(self) -> dict[str, Sequence[Any]]:
        return {name: read_fabric(root).ports for name, root in self.roots.items()}

    def documents(self, name: str) -> tuple[Cluster, Node, Mapping[str, Any]]:
        """cluster.json and rank.json of a machine as its rank reads them, and what the machine shows."""
        members = []
        for i, (machine, root) in enumerate(self.roots.items()):
            own = read_fabric(root)
            members.append(provision.member(machine, own.addresses, own.default_netdev, [f"192.168.1.2{i}"]))
        rails = as_json(self.rails)
        cluster = provision.cluster_document("sparks", "/m", members, rails, {}, {"runtime": "venv"})
        ports = read_fabric(self.roots[name]).as_json()["ports"]
        node = provision.node_document(cluster, name, members, rails, ports, "")
        line = provision.command_line(cluster, node, ports)
        return parse(Cluster, cluster, "cluster"), parse(Node, node, "node"), {"line": line}


@pytest.fixture
def sparks(tmp_path: Path) -> Sparks:
    return Sparks(tmp_path)


def here(address: str) -> bool:
    return True


def test_both_twins_of_every_cable_become_rails_with_their_own_devices(sparks: Sparks) -> None:
    assert fabric_problems(sparks.machines(), sparks.rails, 9000) == []
    _, node, shown = sparks.documents("spark1")
    assert [(rail.peer, rail.interface, rail.rdma) for rail in node.rails] == [
        (0, "enp1s0f1np1", "rocep1s0f1"),
        (0, "enP2p1s0f1np1", "roceP2p1s0f1"),
        (2, "enp1s0f0np0", "rocep1s0f0"),
        (2, "enP2p1s0f0np0", "roceP2p1s0f0"),
    ]
    assert len({rail.address.rpartition(".")[0] for rail in node.rails}) == 4, "each in a subnet of its own"
    assert "NCCL_IB_HCA=rocep1s0f1,roceP2p1s0f1,rocep1s0f0,roceP2p1s0f0" in shown["line"]
    assert "NCCL_CROSS_NIC=1" in shown["line"]


def test_the_service_finds_every_twins_gid_and_names_the_one_that_is_gone(sparks: Sparks) -> None:
    cluster, node, _ = sparks.documents("spark2")
    root, control = sparks.roots["spark2"], cluster.ranks[2].control
    assert fabric.missing(node, control, root, here) == ""
    assert [state.gid for state in fabric.resolve(node, root)] == [3, 3, 3, 3]
    twin = next(rail for rail in node.rails if rail.interface == "enP2p1s0f0np0")
    gids(root, "roceP2p1s0f0", 3, "0000:" * 7 + "0000", "", "enP2p1s0f0np0")
    said = f"a RoCE v2 GID for {twin.address} on roceP2p1s0f0 (rail to rank {twin.peer})"
    assert fabric.missing(node, control, root, here) == said
    problems = fabric_problems(sparks.machines(), sparks.rails, 9000)
    assert any(p.startswith(f"E_FABRIC: spark2 roceP2p1s0f0 has no RoCE v2 GID for {twin.address}") for p in problems)


def test_gids_at_other_places_on_one_twin_leave_the_choice_to_nccl(sparks: Sparks) -> None:
    _, node, _ = sparks.documents("spark0")
    root = sparks.roots["spark0"]
    same = fabric.engine_environment(node, fabric.resolve(node, root), 3)
    assert same["NCCL_IB_GID_INDEX"] == "3"
    moved = node.rails[1]
    gids(root, moved.rdma, 3, "0000:" * 7 + "0000", "", moved.interface)
    words = "".join(f"{int(part):02x}" for part in moved.address.split("."))
    gids(root, moved.rdma, 6, f"0000:0000:0000:0000:0000:ffff:{words[:4]}:{words[4:]}", "RoCE v2", moved.interface)
    assert "NCCL_IB_GID_INDEX" not in fabric.engine_environment(node, fabric.resolve(node, root), 3)


def test_a_twin_without_an_address_is_half_a_cable(tmp_path: Path) -> None:
    """Both twins at one end alone: the second has nobody in its subnet."""
    machines = {
        "spark0": read_fabric(make_spark(tmp_path / "0", {FIRST[0]: ["10.1.0.1/24"], FIRST[1]: ["10.2.0.1/24"]})).ports,
        "spark1": read_fabric(make_spark(tmp_path / "1", {SECOND[0]: ["10.1.0.2/24"]})).ports,
    }
    rails = adopted_rails(machines)
    assert [(rail.a_port, rail.b_port) for rail in rails] == [("enp1s0f0np0", "enp1s0f1np1")]
    said = fabric_problems(machines, rails, 9000)
    assert [text.partition(":")[0] for text in said] == ["W_FABRIC"] * 2
    assert "spark0 enP2p1s0f0np0, the twin of enp1s0f0np0, has 10.2.0.1/24 and no peer" in said[0]
    assert "spark1 enP2p1s0f1np1, the twin of enp1s0f1np1, has no address and no peer" in said[1]


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "N/A"])
def test_what_a_gb10_does_not_answer_is_unknown_and_no_refusal(tmp_path: Path, word: str) -> None:
    """Memory is the processor's, and depending on the driver so are power and utilisation."""
    root = make_spark(tmp_path)
    smi(root, apps=f"4711, python3, {word}\\n", clocks=f"2418, {word}, {word}, 41, {word}")
    gpu = read_gpu(root)
    assert gpu is not None
    assert (gpu["clock"], gpu["clock_max"], gpu["power"], gpu["temperature"], gpu["busy"]) == (
        2418,
        None,
        None,
        41,
        None,
    )
    assert gpu["users"] == [{"pid": 4711, "name": "python3", "mib": None, "ours": False}]
    facts = read_facts(root) | {"memory": {"budget": 0, "unusable": 0}}
    found = [str(finding) for finding in judge("spark1", facts, Wanted())]
    assert found == [
        "E_MEMORY: spark1: process 4711 (python3) is on its GPU with memory unknown. Stop it: GPU and processor share "
        "one memory"
    ]
    write(root, "proc/4711/cgroup", "0::/system.slice/system-tfglm.slice/tfglm@1.service\n")
    facts = read_facts(root) | {"memory": {"budget": 0, "unusable": 0}}
    assert judge("spark1", facts, Wanted()) == []


def test_an_unplugged_port_takes_both_twins_away_or_their_carrier(sparks: Sparks) -> None:
    cluster, node, _ = sparks.documents("spark0")
    root = sparks.roots["spark0"]
    for name in FIRST:
        netdev(root, name, (), up=False)
    said = fabric.missing(node, cluster.ranks[0].control, root, here)
    assert said == "carrier on enp1s0f0np0 (rail to rank 1)"
    problems = [text for text in fabric_problems(sparks.machines(), sparks.rails, 9000) if "no carrier" in text]
    assert len(problems) == 2
    assert all("toward spark1" in text for text in problems)
