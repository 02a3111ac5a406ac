"""Rails of a triangle, and what is said of cables that are wrong."""

import dataclasses
import itertools

import pytest

from tfglm.errors import ConfigError
from tfglm.hosts.cabling import (
    Rail,
    adopted_rails,
    declared_cables,
    fabric_problems,
    managed_rails,
    netplan_of,
    wrong_cables,
)
from tfglm.hosts.fabric import Port

NAMES = ("spark0", "spark1", "spark2")
PORTS = ("enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1")
PCI = ("0000:01:00.0", "0002:01:00.0", "0000:01:00.1", "0002:01:00.1")


def ports(*addresses: str) -> list[Port]:
    return [
        Port(name, f"roce{i}", pci, "aa", True, 9000, 200000, (a,) if a else (), (3,) if a else ())
        for i, (name, pci, a) in enumerate(itertools.zip_longest(PORTS, PCI, addresses, fillvalue=""))
    ]


def triangle() -> dict[str, list[dict[str, str]]]:
    """Port 0 of each machine goes to port 1 of the next; both twins of a port hear both twins at the other end."""
    heard: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
    for i, name in enumerate(NAMES):
        peer = NAMES[(i + 1) % 3]
        for a, b in itertools.product(PORTS[:2], PORTS[2:]):
            heard[name].append({"port": a, "machine": peer, "peer_port": b})
            heard[peer].append({"port": b, "machine": name, "peer_port": a})
    return heard


BARE = {name: ports() for name in NAMES}


def test_a_triangle_gets_two_rails_a_pair_each_a_network_of_its_own() -> None:
    rails = managed_rails(BARE, triangle(), "10.122.0.0/16")
    assert [(r.a, r.a_port, r.b, r.b_port) for r in rails] == [
        ("spark0", "enp1s0f0np0", "spark1", "enp1s0f1np1"),
        ("spark0", "enP2p1s0f0np0", "spark1", "enP2p1s0f1np1"),
        ("spark0", "enp1s0f1np1", "spark2", "enp1s0f0np0"),
        ("spark0", "enP2p1s0f1np1", "spark2", "enP2p1s0f0np0"),
        ("spark1", "enp1s0f0np0", "spark2", "enp1s0f1np1"),
        ("spark1", "enP2p1s0f0np0", "spark2", "enP2p1s0f1np1"),
    ]
    assert (rails[0].a_address, rails[0].b_address) == ("10.122.0.1/24", "10.122.0.2/24")
    assert (rails[5].a_address, rails[5].b_address) == ("10.122.5.2/24", "10.122.5.3/24")
    subnets = {rail.a_address.rpartition(".")[0] for rail in rails}
    assert len(subnets) == 6


def test_addresses_stay_when_a_cable_moves_to_other_ports() -> None:
    heard = triangle()
    swapped = {PORTS[0]: PORTS[2], PORTS[1]: PORTS[3], PORTS[2]: PORTS[0], PORTS[3]: PORTS[1]}
    moved = {
        name: [
            {
                "port": swapped[h["port"]] if name == "spark0" else h["port"],
                "machine": h["machine"],
                "peer_port": swapped[h["peer_port"]] if h["machine"] == "spark0" else h["peer_port"],
            }
            for h in found
        ]
        for name, found in heard.items()
    }
    before, after = (managed_rails(BARE, facts, "10.122.0.0/16") for facts in (heard, moved))
    assert [(r.a_address, r.b_address) for r in before] == [(r.a_address, r.b_address) for r in after]
    assert before[0].a_port != after[0].a_port


def test_what_was_given_is_adopted_again() -> None:
    rails = managed_rails(BARE, triangle(), "10.122.0.0/16")
    machines = {}
    for name in NAMES:
        own = {rail.end(name)[0]: rail.end(name)[1] for rail in rails if rail.joins(name)}
        machines[name] = ports(*(own[port] for port in PORTS))
    assert adopted_rails(machines) == rails
    assert fabric_problems(machines, rails, 9000) == []


def test_twins_in_one_subnet_pair_once() -> None:
    machines = {"a": ports("10.0.0.10/24", "10.0.0.11/24"), "b": ports("10.0.0.20/24", "10.0.0.21/24")}
    rails = adopted_rails(machines)
    assert [(r.a_address, r.b_address) for r in rails] == [
        ("10.0.0.10/24", "10.0.0.20/24"),
        ("10.0.0.11/24", "10.0.0.21/24"),
    ]


def test_a_wrong_cable_names_port_and_both_machines() -> None:
    heard = {"spark1": [{"port": "enp1s0f1np1", "machine": "spark0", "peer_port": "enp1s0f0np0"}], "spark2": []}
    expected = [("spark1", "enp1s0f1np1", "spark2"), ("spark2", "enp1s0f0np0", "spark1")]
    assert wrong_cables(expected, heard) == [
        "spark1 enp1s0f1np1 should reach spark2 but reaches spark0",
        "spark2 enp1s0f0np0 should reach spark1 but reaches no machine of this cluster",
    ]


def test_declared_cables_have_two_ends() -> None:
    link = {"a": "spark0", "a_port": "p0", "b": "spark1", "b_port": "p1"}
    assert declared_cables([link]) == [("spark0", "p0", "spark1"), ("spark1", "p1", "spark0")]
    with pytest.raises(ConfigError, match="without b_port"):
        declared_cables([{"a": "spark0", "a_port": "p0", "b": "spark1"}])


def test_each_fault_is_named() -> None:
    rail = Rail("spark0", PORTS[0], "10.1.0.1/24", "spark1", PORTS[2], "10.1.0.2/24")
    machines = {"spark0": ports("10.1.0.1/24"), "spark1": ports("", "", "10.1.0.2/24"), "spark2": ports()}

    def with_port(name: str, index: int, **changes: object) -> dict[str, list[Port]]:
        changed = [*machines[name]]
        changed[index] = dataclasses.replace(changed[index], **changes)  # type: ignore[arg-type]
        return machines | {name: changed}

    def said(described: dict[str, list[Port]]) -> str:
        return "\n".join(fabric_problems(described, [rail], 9000))

    assert "E_FABRIC: spark0 and spark2 share no cable: spark0 has enp1s0f0np0 10.1.0.1/24" in said(machines)
    assert "spark1 enp1s0f1np1 toward spark0 has no carrier" in said(with_port("spark1", 2, up=False))
    assert "E_FABRIC: spark0 roce0 has no RoCE v2 GID for 10.1.0.1" in said(with_port("spark0", 0, gids=(-1,)))
    assert "W_FABRIC: spark0 enp1s0f0np0 has an MTU of 1500" in said(with_port("spark0", 0, mtu=1500))
    assert "E_FABRIC: spark0 enp1s0f0np0 has an MTU of 576; a rail needs 1280" in said(with_port("spark0", 0, mtu=576))
    assert "spark0 has no port enp1s0f0np0 any more" in said(machines | {"spark0": machines["spark0"][1:]})


def test_netplan_gives_every_port_one_address_and_never_holds_up_a_boot() -> None:
    rails = managed_rails(BARE, triangle(), "10.122.0.0/16")
    found = netplan_of("spark1", rails, 9000)["network"]["ethernets"]
    assert set(found) == set(PORTS)
    assert found["enp1s0f1np1"]["addresses"] == ["10.122.0.2/24"]
    assert all(entry["optional"] and entry["mtu"] == 9000 and not entry["dhcp4"] for entry in found.values())
    assert netplan_of("elsewhere", rails, 9000)["network"]["ethernets"] == {}


@pytest.mark.parametrize(("network", "said"), [("10.1.2.3/16", "takes an IPv4 network"), ("10.0.0.0/24", "room for 1")])
def test_a_network_that_cannot_be_is_refused(network: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        managed_rails(BARE, triangle(), network)
