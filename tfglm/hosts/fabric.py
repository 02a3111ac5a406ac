"""Ports, RDMA devices, addresses and RoCE GIDs of a machine, from /proc and /sys; which ports of two machines belong
together. Works on any sysroot, so that a test can describe a machine, and needs no root.

A ConnectX-7 of a Spark has two cable ports, and each port has two PCIe functions ("twins"), each with a netdev and an
RDMA device of its own: names `enp1s0f0np0` and `enP2p1s0f0np0` are one cable. Names differ between firmwares, so that
ports are found by what they are, never by name alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

_TAIL = re.compile(r"f(\d+)(?:np(\d+))?$")


@dataclass(frozen=True)
class Port:
    """One netdev that may carry a cable.

    device: its RDMA device, "" for none. pci: address of its PCIe function, "" for a virtual one. addresses: IPv4 with
    prefix length, "10.0.22.1/24". gids: for each address the index of its RoCE v2 GID in the table of `device`, -1 for
    none. speed: Mbit/s, 0 where the driver does not say. up: has a carrier.
    """

    netdev: str
    device: str
    pci: str
    mac: str
    up: bool
    mtu: int
    speed: int
    addresses: tuple[str, ...] = ()
    gids: tuple[int, ...] = ()

    @property
    def cable(self) -> str:
        """The same for twins: what the name says behind the PCIe bus ("f0np0"), or the whole name."""
        tail = _TAIL.search(self.netdev)
        return tail.group(0) if tail and self.pci else self.netdev

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"cable": self.cable}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Port:
        names = cls.__dataclass_fields__
        values = {name: value for name, value in facts.items() if name in names}
        return cls(**(values | {"addresses": tuple(facts["addresses"]), "gids": tuple(facts["gids"])}))


@dataclass(frozen=True)
class Link:
    """Two ports that share a subnet: one rail between two machines. a and b are names of machines, in their order."""

    a: str
    a_port: Port
    a_address: str
    b: str
    b_port: Port
    b_address: str
    subnet: str

    @property
    def mtu(self) -> int:
        return min(self.a_port.mtu, self.b_port.mtu)


@dataclass(frozen=True)
class Fabric:
    """The ports of one machine, and beside them what decides how it is reached."""

    ports: tuple[Port, ...]
    default_netdev: str = ""
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of every interface that has one, ports or not, loopback left out."""
    netplan: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Netplan files that name one of the ports, and which they name."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ports": [port.as_json() for port in self.ports],
            "default_netdev": self.default_netdev,
            "addresses": {name: list(found) for name, found in self.addresses.items()},
            "netplan": {name: list(ports) for name, ports in self.netplan.items()},
        }


def read_fabric(sysroot: Path = Path("/"), netdevs: Sequence[str] = ()) -> Fabric:
    """The ports of this machine: every netdev with an RDMA device, or exactly `netdevs` where they are named."""
    net = sysroot / "sys/class/net"
    present = sorted(path.name for path in net.iterdir()) if net.is_dir() else []
    routes = _routes(sysroot)
    local = _local_addresses(sysroot)
    devices = _rdma_devices(sysroot)
    chosen = [name for name in present if (name in netdevs if netdevs else name in devices)]
    ports = tuple(_port(sysroot, name, devices.get(name, ""), _addresses(name, routes, local)) for name in chosen)
    default = next((netdev for netdev, subnet in routes if subnet.prefixlen == 0), "")
    every = {name: _addresses(name, routes, local) for name in present if name != "lo"}
    return Fabric(
        _in_pci_order(ports),
        default,
        {name: found for name, found in every.items() if found},
        _netplan(sysroot, [port.netdev for port in ports]),
    )


def links_between(machines: Mapping[str, Sequence[Port]]) -> list[Link]:
    """Every pair of ports of two machines whose addresses lie in one subnet, in the order of `machines`."""
    found = []
    for a, b in combinations(machines, 2):
        for a_port in machines[a]:
            for b_port in machines[b]:
                for a_address in a_port.addresses:
                    for b_address in b_port.addresses:
                        subnet = ipaddress.ip_interface(a_address).network
                        if subnet == ipaddress.ip_interface(b_address).network and a_address != b_address:
                            found.append(Link(a, a_port, a_address, b, b_port, b_address, str(subnet)))
    return found


def unlinked_pairs(machines: Iterable[str], links: Iterable[Link]) -> list[tuple[str, str]]:
    joined = {(link.a, link.b) for link in links}
    return [pair for pair in combinations(machines, 2) if pair not in joined]


def address_of(interface: str) -> str:
    """ "10.0.22.1/24" -> "10.0.22.1"."""
    return interface.partition("/")[0]


def gid_of(address: str) -> str:
    """The GID that RoCE v2 gives an IPv4 address, as the kernel writes it."""
    packed = ipaddress.IPv4Address(address_of(address)).packed.hex()
    return f"0000:0000:0000:0000:0000:ffff:{packed[:4]}:{packed[4:]}"


def gid_index(sysroot: Path, device: str, address: str, netdev: str = "") -> int:
    """Index of the RoCE v2 GID of `address` on a device's port 1, -1 if there is none."""
    gids = sysroot / "sys/class/infiniband" / device / "ports/1/gids"
    indexes = sorted(int(entry.name) for entry in gids.iterdir()) if gids.is_dir() else []
    return next((index for index in indexes if gid_holds(sysroot, device, index, address, netdev)), -1)


def gid_holds(sysroot: Path, device: str, index: int, address: str, netdev: str = "") -> bool:
    """Whether an entry of the table of GIDs is the RoCE v2 one of `address`. An entry of another netdev (of a bond, a
    VLAN) or of RoCE v1 does not do: connections over it die after a minute."""
    port = sysroot / "sys/class/infiniband" / device / "ports/1"
    if index < 0 or _text(port / "gids" / str(index)).lower() != gid_of(address):
        return False
    owner = _text(port / "gid_attrs/ndevs" / str(index))
    return "v2" in _text(port / "gid_attrs/types" / str(index)) and (not netdev or owner in ("", netdev))


def _port(sysroot: Path, netdev: str, device: str, addresses: tuple[str, ...]) -> Port:
    net = sysroot / "sys/class/net" / netdev
    pci = (net / "device").resolve().name if (net / "device").exists() else ""
    return Port(
        netdev=netdev,
        device=device,
        pci=pci if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", pci) else "",
        mac=_text(net / "address"),
        up=_text(net / "carrier") == "1",
        mtu=_number(net / "mtu"),
        speed=max(0, _number(net / "speed")),
        addresses=addresses,
        gids=tuple(gid_index(sysroot, device, address, netdev) for address in addresses) if device else (),
    )


def _rdma_devices(sysroot: Path) -> dict[str, str]:
    """RDMA device by netdev. The kernel links them through their PCIe function; a software device names its netdev in
    the table of GIDs alone."""
    found: dict[str, str] = {}
    net, infiniband = sysroot / "sys/class/net", sysroot / "sys/class/infiniband"
    if net.is_dir():
        for netdev in net.iterdir():
            below = netdev / "device/infiniband"
            names = sorted(path.name for path in below.iterdir()) if below.is_dir() else []
            if names:
                found[netdev.name] = names[0]
    if infiniband.is_dir():
        for device in sorted(infiniband.iterdir()):
            owners = device / "ports/1/gid_attrs/ndevs"
            if owners.is_dir() and device.name not in found.values():
                netdevs = {_text(entry) for entry in owners.iterdir()} - {""}
                found |= {netdev: device.name for netdev in netdevs if netdev not in found}
    return found


def _in_pci_order(ports: Iterable[Port]) -> tuple[Port, ...]:
    """Cable by cable, the twin on the lower PCIe domain first; so that the n-th ports of a cable's two ends are one
    rail."""
    return tuple(sorted(ports, key=lambda port: (port.cable, port.pci, port.netdev)))


def _routes(sysroot: Path) -> list[tuple[str, ipaddress.IPv4Network]]:
    """(netdev, destination) of every route without a gateway, and of default routes."""
    routes = []
    for line in _text(sysroot / "proc/net/route").splitlines()[1:]:
        netdev, destination, gateway, *_, mask = line.split()[:8]
        network = ipaddress.IPv4Network(f"{_address(destination)}/{_address(mask)}")
        if gateway == "00000000" or network.prefixlen == 0:
            routes.append((netdev, network))
    return routes


def _address(little_endian: str) -> str:
    return str(ipaddress.IPv4Address(bytes.fromhex(little_endian)[::-1]))


def _local_addresses(sysroot: Path) -> list[ipaddress.IPv4Address]:
    """Every address of this machine, from the kernel's table of local routes."""
    found: dict[ipaddress.IPv4Address, None] = {}
    leaf = ""
    for line in _text(sysroot / "proc/net/fib_trie").splitlines():
        text = line.strip()
        if text.startswith("|-- "):
            leaf = text[4:]
        elif text == "/32 host LOCAL":
            found[ipaddress.IPv4Address(leaf)] = None
    return list(found)


def _addresses(
    netdev: str, routes: Iterable[tuple[str, ipaddress.IPv4Network]], local: Iterable[ipaddress.IPv4Address]
) -> tuple[str, ...]:
    """The addresses that lie in a subnet routed to `netdev` itself."""
    subnets = [network for name, network in routes if name == netdev and 0 < network.prefixlen < 32]
    return tuple(f"{address}/{subnet.prefixlen}" for subnet in subnets for address in local if address in subnet)


def _netplan(sysroot: Path, netdevs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Netplan merges what several files say of one netdev, addresses included, so that a second one must be known."""
    folder = sysroot / "etc/netplan"
    found = {}
    for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else []:
        keys = set(re.findall(r"^\s+[\"']?([\w.-]+)[\"']?:", _text(path), re.MULTILINE))
        named = tuple(netdev for netdev in netdevs if netdev in keys)
        if named:
            found[path.name] = named
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else 0
