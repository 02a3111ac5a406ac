"""What this node's ports are like right now: carrier, MTU, addresses, RoCE v2 GIDs, bytes moved. Read from sysfs alone.

A GID's index changes with boots and addresses and may differ between nodes, so it is found by the address it stands for
at every start. Everything takes a sysroot, so that a test can describe a machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfglm.hosts.fabric import gid_holds, gid_index
from tfglm.supervisor.cluster import Node, Rail

_SYSFS_BYTES = 4096
"""No file of sysfs is longer."""
_LANE_BYTES = 4
"""RDMA port counters count in 32-bit words."""


@dataclass(frozen=True)
class RailState:
    """A rail that works on this side. gid: index of the RoCE v2 GID of its address; -1 without an RDMA device."""

    rail: Rail
    gid: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rail has received and sent since the port came up, RDMA's included; mbit: its speed, 0 unknown."""

    received: int
    sent: int
    mbit: int


def address_is_here(address: str) -> bool:
    """Whether some interface of this node has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def missing(
    node: Node,
    control: str,
    sysroot: Path = Path("/"),
    here: Callable[[str], bool] = address_is_here,
    gids: dict[str, int] | None = None,
) -> str:
    """What the node's network still lacks, as the end of "waiting for ..."; empty when it is complete.

    gids: where each rail's GID was last time, kept by who asks again and again: a table has hundreds of entries.
    """
    gids = {} if gids is None else gids
    if not here(control):
        return f"address {control} on {node.interface}"
    for rail in node.rails:
        found = _missing(rail, sysroot, here, gids)
        if found:
            return f"{found} (rail to rank {rail.peer})"
    return ""


def resolve(node: Node, sysroot: Path = Path("/")) -> tuple[RailState, ...]:
    """The rails with their GIDs, once nothing is `missing`."""
    return tuple(RailState(rail, _gid(rail, sysroot) if rail.rdma else -1) for rail in node.rails)


def _missing(rail: Rail, sysroot: Path, here: Callable[[str], bool], gids: dict[str, int]) -> str:
    port = sysroot / "sys/class/net" / rail.interface
    if _number(port / "carrier") != 1:
        if not port.exists():
            return f"interface {rail.interface}, which is gone: on a Spark that means its cable is not plugged in"
        return f"carrier on {rail.interface}"
    mtu = _number(port / "mtu")
    if mtu < rail.mtu:
        return f"MTU {rail.mtu} on {rail.interface}, which has {mtu}"
    if not here(rail.address):
        return f"address {rail.address} on {rail.interface}"
    if rail.rdma and not gid_holds(sysroot, rail.rdma, gids.get(rail.address, -1), rail.address, rail.interface):
        gids[rail.address] = _gid(rail, sysroot)
        if gids[rail.address] < 0:
            return f"a RoCE v2 GID for {rail.address} on {rail.rdma}"
    return ""


def _gid(rail: Rail, sysroot: Path) -> int:
    return gid_index(sysroot, rail.rdma, rail.address, rail.interface)


def traffic(rail: Rail, sysroot: Path = Path("/")) -> Traffic:
    """Counters of one rail now: of its RDMA device where it has one, else of the interface."""
    port = sysroot / "sys/class/net" / rail.interface
    mbit = max(0, _number(port / "speed"))
    if rail.rdma:
        counters = sysroot / "sys/class/infiniband" / rail.rdma / "ports/1/counters"
        received, sent = (_number(counters / name) * _LANE_BYTES for name in ("port_rcv_data", "port_xmit_data"))
    else:
        received, sent = (_number(port / "statistics" / name) for name in ("rx_bytes", "tx_bytes"))
    return Traffic(max(0, received), max(0, sent), mbit)


def engine_environment(node: Node, rails: tuple[RailState, ...], ranks: int) -> Mapping[str, str]:
    """What NCCL and gloo need to take these ports and no others.

    With RDMA on a triangle, port 0 of one node is cabled to port 1 of the next, hence the crossing and the routing by
    subnet; the index of the GID is given only where one holds for all devices, since NCCL takes a single number.
    """
    names = {"NCCL_SOCKET_IFNAME": node.interface, "GLOO_SOCKET_IFNAME": node.interface}
    devices = [state for state in rails if state.gid >= 0]
    if not devices:
        return names
    names["NCCL_IB_HCA"] = ",".join(state.rail.rdma for state in devices)
    indexes = {state.gid for state in devices}
    if len(indexes) == 1:
        names["NCCL_IB_GID_INDEX"] = str(indexes.pop())
    names |= {"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"}
    if ranks > 2:
        names |= {"NCCL_CROSS_NIC": "1", "NCCL_IB_SUBNET_AWARE_ROUTING": "1"}
    return names


def _text(path: Path) -> str:
    """A file of sysfs; empty where it is not there or, as an unused GID's type, cannot be read. With as few calls
    of the kernel as that takes: it is done for every rail twice a second."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, _SYSFS_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(file)


def _number(path: Path) -> int:
    """-1 where there is none; a port that is down refuses to tell its carrier and speed."""
    try:
        return int(_text(path))
    except ValueError:
        return -1
