"""Rails of a cluster out of what its machines read and heard, and what is wrong with them. Runs where Ansible does."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from tfglm.errors import ConfigError
from tfglm.hosts.fabric import Port, address_of, links_between

LEAST_MTU = 1280
"""Of a rail: every heartbeat fits, and RoCE still takes packets of 1024 bytes."""
RAILS = 2
"""Rails of a pair that are used: both twins of one cable reach all that a machine's PCIe links carry."""


@dataclass(frozen=True)
class Rail:
    """One PCIe link of one cable. Addresses with prefix length."""

    a: str
    a_port: str
    a_address: str
    b: str
    b_port: str
    b_address: str

    def end(self, machine: str) -> tuple[str, str, str, str]:
        """(own port, own address, peer, peer's address), as `machine` sees it."""
        if machine == self.a:
            return self.a_port, self.a_address, self.b, self.b_address
        return self.b_port, self.b_address, self.a, self.a_address

    def joins(self, machine: str) -> bool:
        return machine in (self.a, self.b)


Machines = Mapping[str, Sequence[Port]]
"""Ports of every machine by name, in order of rank."""
HeardBy = Mapping[str, Sequence[Mapping[str, str]]]
"""By machine, what each of its ports heard: {port, machine, peer_port}."""


def adopted_rails(machines: Machines) -> list[Rail]:
    """The rails that the addresses of today make: ports of two machines in one subnet, no port twice for a pair."""
    rails = []
    for a, b in combinations(machines, 2):
        taken: set[str] = set()
        chosen: list[Rail] = []
        for link in links_between({a: machines[a], b: machines[b]}):
            if len(chosen) == RAILS or link.a_port.netdev in taken or link.b_port.netdev in taken:
                continue
            taken |= {link.a_port.netdev, link.b_port.netdev}
            chosen.append(Rail(a, link.a_port.netdev, link.a_address, b, link.b_port.netdev, link.b_address))
        rails += chosen
    return rails


def managed_rails(machines: Machines, heard: HeardBy, network: str) -> list[Rail]:
    """The rails that the cables make, with an address for each end: every rail is a /24 of its own, in the order of
    ranks, so that the same cables get the same addresses whichever ports they are in."""
    try:
        subnets = list(ipaddress.IPv4Network(network).subnets(new_prefix=24))
    except ValueError:
        raise ConfigError(f"tfglm_fabric_network is {network!r}; it takes an IPv4 network of /16 to /18") from None
    names = list(machines)
    needed = len(names) * (len(names) - 1) // 2 * RAILS
    if needed > len(subnets):
        raise ConfigError(
            f"tfglm_fabric_network is {network}, room for {len(subnets)} rails; {len(names)} machines have {needed}"
        )
    rails = []
    for i, (a, b) in enumerate(combinations(names, 2)):
        for k, (a_port, b_port) in enumerate(_cable(machines, heard, a, b)):
            subnet = subnets[RAILS * i + k]
            a_address, b_address = (f"{subnet[1 + names.index(name)]}/24" for name in (a, b))
            rails.append(Rail(a, a_port, a_address, b, b_port, b_address))
    return rails


def _cable(machines: Machines, heard: HeardBy, a: str, b: str) -> list[tuple[str, str]]:
    """The rails of the first cable that joins a and b: twins pair in the order of their PCIe addresses."""
    pairs = {(h["port"], h["peer_port"]) for h in heard.get(a, ()) if h["machine"] == b}
    pairs |= {(h["peer_port"], h["port"]) for h in heard.get(b, ()) if h["machine"] == a}
    cables = {port.netdev: port.cable for port in machines[a]}
    first = next((port.cable for port in machines[a] if any(p == port.netdev for p, _ in pairs)), None)
    if first is None:
        return []
    theirs = {q for p, q in pairs if cables.get(p) == first}
    a_ports = [port.netdev for port in machines[a] if port.cable == first]
    b_ports = [port.netdev for port in machines[b] if port.netdev in theirs]
    return [(p, q) for p, q in zip(a_ports, b_ports, strict=False) if (p, q) in pairs][:RAILS]


def wrong_cables(expected: Iterable[tuple[str, str, str]], heard: HeardBy) -> list[str]:
    """Every (machine, port, peer it should reach) that reaches another machine, or none."""
    messages = []
    for machine, port, peer in expected:
        reached = sorted({h["machine"] for h in heard.get(machine, ()) if h["port"] == port})
        if peer not in reached:
            what = f"but reaches {' and '.join(reached)}" if reached else "but reaches no machine of this cluster"
            messages.append(f"{machine} {port} should reach {peer} {what}")
    return messages


def declared_cables(links: Iterable[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """tfglm_links as both ends of each cable: [{a: spark0, a_port: enp1s0f0np0, b: spark1, b_port: enp1s0f1np1}]."""
    ends = []
    for link in links:
        missing = {"a", "a_port", "b", "b_port"} - set(link)
        if missing:
            raise ConfigError(f"tfglm_links has an entry {dict(link)} without {', '.join(sorted(missing))}")
        ends += [(link["a"], link["a_port"], link["b"]), (link["b"], link["b_port"], link["a"])]
    return ends


def fabric_problems(machines: Machines, rails: Sequence[Rail], mtu: int) -> list[str]:
    """What keeps ranks from reaching each other over these rails, each with what to do."""
    problems = []
    joined = {(rail.a, rail.b) for rail in rails}
    for a, b in combinations(machines, 2):
        if (a, b) not in joined:
            problems.append(
                f"E_FABRIC: {a} and {b} share no cable: {a} has {_inventory(machines[a])}; {b} has "
                f"{_inventory(machines[b])}. Every two machines need a cable of their own, each end an address in one "
                f"subnet; tfglm_fabric_mode=manage gives addresses"
            )
    for rail in rails:
        for machine in (rail.a, rail.b):
            netdev, address, peer, _ = rail.end(machine)
            port = next((p for p in machines[machine] if p.netdev == netdev), None)
            if port is None:
                problems.append(f"E_FABRIC: {machine} has no port {netdev} any more: an unplugged cable takes it away")
                continue
            if not port.up:
                problems.append(f"E_FABRIC: {machine} {netdev} toward {peer} has no carrier: check both plugs")
            if port.device and address in port.addresses and port.gids[port.addresses.index(address)] < 0:
                problems.append(
                    f"E_FABRIC: {machine} {port.device} has no RoCE v2 GID for {address_of(address)} of {netdev}; see "
                    f"/sys/class/infiniband/{port.device}/ports/1/gids, and take the port down and up"
                )
            if port.mtu < LEAST_MTU:
                problems.append(
                    f"E_FABRIC: {machine} {netdev} has an MTU of {port.mtu}; a rail needs {LEAST_MTU}, and should have "
                    f"tfglm_mtu {mtu}"
                )
            elif port.mtu < mtu:
                problems.append(
                    f"W_FABRIC: {machine} {netdev} has an MTU of {port.mtu}, below tfglm_mtu {mtu}; both ends should "
                    f"have the same"
                )
    return problems + _half_cables(machines, rails)


def _half_cables(machines: Machines, rails: Sequence[Rail]) -> list[str]:
    """Cables of which one twin alone is a rail: each twin has its own PCIe link, half of what the cable carries."""
    used = {(machine, rail.end(machine)[0]) for rail in rails for machine in (rail.a, rail.b)}
    problems = []
    for machine, (netdev, _, peer, _) in ((name, rail.end(name)) for rail in rails for name in (rail.a, rail.b)):
        cable = next((port.cable for port in machines[machine] if port.netdev == netdev), "")
        for twin in machines[machine]:
            if twin.cable == cable and (machine, twin.netdev) not in used:
                problems.append(
                    f"W_FABRIC: {machine} {twin.netdev}, the twin of {netdev}, has "
                    f"{', '.join(twin.addresses) or 'no address'} and no peer in its subnet: the cable to {peer} "
                    f"carries half of what it could. Give both twins of both ends addresses, or set "
                    f"tfglm_fabric_mode=manage"
                )
    return problems


def _inventory(ports: Sequence[Port]) -> str:
    parts = (f"{p.netdev} {' '.join(p.addresses) or 'without address'}{'' if p.up else ' (no carrier)'}" for p in ports)
    return ", ".join(parts) or "no port with RDMA"


def netplan_of(machine: str, rails: Iterable[Rail], mtu: int) -> dict[str, Any]:
    """The netplan file of a machine's ports. No route, no DHCP, and nothing that a boot waits for: an unplugged
    cable must not hold up the machine."""
    ports: dict[str, Any] = {}
    for rail in rails:
        if rail.joins(machine):
            netdev, address, _, _ = rail.end(machine)
            entry = ports.setdefault(netdev, {"dhcp4": False, "dhcp6": False, "accept-ra": False, "optional": True})
            entry |= {"mtu": mtu, "link-local": []}
            entry.setdefault("addresses", []).append(address)
    return {"network": {"version": 2, "ethernets": ports}}


def subnet_of(interface: str) -> str:
    """ "10.0.22.1/24" -> "10.0.22.0/24"."""
    return str(ipaddress.ip_interface(interface).network)


def as_json(rails: Iterable[Rail]) -> list[dict[str, str]]:
    return [asdict(rail) for rail in rails]
