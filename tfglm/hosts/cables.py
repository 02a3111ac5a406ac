"""What a cable really joins, and whether large packets pass it. Runs on every machine at the same time.

Each machine says on every port, in an Ethernet broadcast of its own, who it is, and listens: this needs no address and
no IP configuration, so that it finds a wrong cable before anything is configured. Needs root for the raw sockets.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ETHERTYPE = 0x88B5
"""IEEE 802's number for experiments on a local network."""
_OUTGOING = 4
_PERIOD_S = 0.2
_PING = ("ping", "-n", "-c", "2", "-i", "0.2", "-M", "do")
_IP_AND_ICMP = 28


@dataclass(frozen=True, order=True)
class Heard:
    """`port` of this machine hears `peer_port` of `machine`."""

    port: str
    machine: str
    peer_port: str


@dataclass(frozen=True)
class Ping:
    """One rail in one direction: from `port` to `address`, with packets of `mtu` bytes that must not be split."""

    port: str
    address: str
    mtu: int
    passed: bool
    said: str


def raise_ports(ports: Sequence[str], sysroot: Path = Path("/")) -> list[str]:
    """Switch on the ports that are off, which ones nobody configured are; returns them."""
    down = [p for p in ports if not int((sysroot / f"sys/class/net/{p}/flags").read_text(), 16) & 1]
    for port in down:
        subprocess.run(["ip", "link", "set", "dev", port, "up"], check=True, capture_output=True, timeout=20)
    return down


def listen(cluster: str, machine: str, ports: Sequence[str], seconds: float) -> list[Heard]:
    """Who answers on which port within `seconds`. Ports without a carrier hear nobody; so does a port that is off."""
    found: set[Heard] = set()
    sockets: dict[socket.socket, str] = {}
    try:
        for port in ports:
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE))
            sockets[opened] = port
            opened.bind((port, ETHERTYPE))
            opened.setblocking(False)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for opened, port in sockets.items():
                _say(opened, cluster, machine, port)
            while (left := now + _PERIOD_S - time.monotonic()) > 0:
                for opened in select.select(list(sockets), [], [], left)[0]:
                    heard = _hear(opened, cluster, machine, sockets[opened])
                    if heard is not None:
                        found.add(heard)
    finally:
        for opened in sockets:
            opened.close()
    return sorted(found)


def _say(opened: socket.socket, cluster: str, machine: str, port: str) -> None:
    text = json.dumps({"tfglm": cluster, "machine": machine, "port": port}).encode()
    frame = b"\xff" * 6 + opened.getsockname()[4] + ETHERTYPE.to_bytes(2, "big") + len(text).to_bytes(2, "big") + text
    with contextlib.suppress(OSError):  # no carrier, or switched off
        opened.send(frame.ljust(60, b"\0"))


def _hear(opened: socket.socket, cluster: str, machine: str, port: str) -> Heard | None:
    try:
        frame, (_, _, kind, *_) = opened.recvfrom(2048)
        length = int.from_bytes(frame[14:16], "big")
        said = json.loads(frame[16 : 16 + length])
        if kind == _OUTGOING or said["tfglm"] != cluster or said["machine"] == machine:
            return None
        return Heard(port, str(said["machine"]), str(said["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # somebody else's experiment


def ping_all(targets: Sequence[tuple[str, str, int]], seconds: int = 2) -> list[Ping]:
    """Ping every (port, address, mtu) at the same time, unsplit and as large as it may be, and from that port: to an
    address alone a packet takes whatever port the kernel likes best."""
    running = [
        subprocess.Popen(
            [*_PING, "-W", str(seconds), "-s", str(mtu - _IP_AND_ICMP), "-I", port, address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for port, address, mtu in targets
    ]
    results = []
    for (port, address, mtu), process in zip(targets, running, strict=True):
        try:
            said = process.communicate(timeout=seconds * 2 + 5)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + "\nping did not end"
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        passed = process.returncode == 0
        results.append(Ping(port, address, mtu, passed, "" if passed else "; ".join(lines[1:3] or lines)))
    return results
