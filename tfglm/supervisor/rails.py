"""What a rail carries: one TCP stream from each end to the other, bound to the rail's own addresses, one at a time.

Less than RDMA would reach on the same cable, and yet enough to tell a rail that is broken, half as wide as the others
or routed elsewhere from one that is not.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfglm.supervisor.cluster import Cluster, Node, Rail

_BLOCK = bytes(1 << 20)
_CONNECT_S = 5.0
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Carried:
    """One direction of a rail. gbit_s: 0 when nothing came through, for the reason in `problem`."""

    sender: int
    receiver: int
    interface: str
    gbit_s: float
    problem: str = ""


def measure(
    cluster: Cluster, node: Node, exchange: Callable[[Sequence[int]], Sequence[Sequence[int]]], seconds: float = 1.0
) -> list[Carried]:
    """The rails that begin at this node, while the other ranks do the same for theirs, rank after rank.

    exchange: gives every rank's numbers to every rank, in rank order, and waits for all; all ranks call `measure`.
    """
    most = max(len(member.rails) for member in cluster.ranks)
    with contextlib.ExitStack() as stack:
        own = cluster.ranks[node.rank].rails
        ports = [stack.enter_context(_Sink(rail.address)).port for rail in own]
        known = exchange([*ports, *[0] * (most - len(ports))])
        found = []
        for sender in range(len(cluster.ranks)):
            for turn in range(most):
                if sender == node.rank and turn < len(node.rails):
                    rail = node.rails[turn]
                    at = [end.address for end in cluster.ranks[rail.peer].rails].index(rail.peer_address)
                    found.append(_send(node.rank, rail, known[rail.peer][at], seconds))
                exchange([0])
        return found


def _send(rank: int, rail: Rail, port: int, seconds: float) -> Carried:
    try:
        source, target = (rail.address, 0), (rail.peer_address, port)
        with socket.create_connection(target, timeout=_CONNECT_S, source_address=source) as sock:
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                sock.sendall(_BLOCK)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(_ANSWER_S)
            (arrived,) = struct.unpack("!Q", sock.recv(8, socket.MSG_WAITALL))
            taken = time.perf_counter() - began
        return Carried(rank, rail.peer, rail.interface, arrived * 8 / taken / 1e9)
    except (OSError, struct.error) as error:
        return Carried(rank, rail.peer, rail.interface, 0.0, f"{rail.address} to {rail.peer_address}: {error}")


class _Sink:
    """Takes whatever comes at one address and answers with its number of bytes."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="sink", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            with sock, contextlib.suppress(OSError):
                sock.settimeout(_ANSWER_S)
                total = 0
                while data := sock.recv(len(_BLOCK)):
                    total += len(data)
                sock.sendall(struct.pack("!Q", total))

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
