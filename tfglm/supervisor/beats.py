"""Heartbeats: twice a second every supervisor tells every other one its whole state in a datagram.

State, not events: a lost datagram costs half a second and nothing else. Beats go over the control network, and over
every rail too, filled up to the rail's full packet and not to be split: a cable in the wrong port, or one that carries
short packets only, is a rail that is not heard. Datagrams from other addresses than the cluster's are dropped; like the
rendezvous of the engines, this trusts the networks that the ranks share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfglm.supervisor.cluster import Cluster, Node, Rail
from tfglm.supervisor.facts import flat, plain

log = logging.getLogger(__name__)

PERIOD_S = 0.5
LONGEST_REASON = 300
"""Bytes, as JSON writes them: a beat without its figures must fit LEAST_MTU, or its rail would seem dead."""
_IP_HEADERS = 28
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2  # linux/in.h; the socket module has no names for them


@dataclass(frozen=True)
class Beat:
    """What a supervisor says of its rank.

    boot: when it started, in ns, so that a restarted one is told from the one before; sequence: counts its beats.
    generation: the newest start of all ranks that it took part in; ended: the newest that it knows to be over. boots:
    on rank 0, the boots of those that belong to the generation. lost: a rail it does not hear, in words.
    """

    rank: int
    boot: int
    sequence: int
    digest: str
    release: str
    phase: str
    generation: int = 0
    ended: int = 0
    boots: tuple[int, ...] = ()
    reason: str = ""
    code: str = ""
    lost: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """For `tfglm status`: pid, since, memory, traffic, tokens a second."""

    def encode(self, cluster: str, config: Mapping[str, str] | None = None) -> bytes:
        facts = dataclasses.asdict(self) | {"reason": _short(self.reason)}
        return json.dumps({"cluster": cluster, "beat": facts, "config": config}, separators=(",", ":")).encode()


def _short(text: str) -> str:
    text = text[:LONGEST_REASON]
    while len(json.dumps(text)) - 2 > LONGEST_REASON:
        text = text[:-1]
    return text


_FIELDS = frozenset(f.name for f in dataclasses.fields(Beat))


def decode(data: bytes, cluster: str) -> tuple[Beat, Mapping[str, str] | None] | None:
    """A beat of this cluster and, if it came along, its sender's configuration; None for anything else."""
    try:
        message = json.loads(data)
        if message["cluster"] != cluster:
            return None
        facts = {name: value for name, value in message["beat"].items() if name in _FIELDS}  # a newer release has more
        beat = Beat(**(facts | {"boots": tuple(facts["boots"])}))
        whole = (beat.rank, beat.boot, beat.sequence, beat.generation, beat.ended, *beat.boots)
        words = (beat.digest, beat.release, beat.phase, beat.reason, beat.code, beat.lost)
        if not all(type(value) is int for value in whole) or not all(type(value) is str for value in words):
            return None
        return beat, message.get("config")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass
class Peer:
    """What is known of another rank. heard: monotonic time of its last beat on any path; rails: on each rail."""

    beat: Beat | None = None
    heard: float = float("-inf")
    rails: dict[str, float] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)


class Beats:
    """The sockets of one supervisor and its view of all others. Lives in one event loop."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.peers = {rank: Peer() for rank in range(len(cluster.ranks)) if rank != node.rank}
        self._cluster, self._node = cluster, node
        self._config = flat(plain(cluster))
        self._control: asyncio.DatagramTransport | None = None
        self._rails: dict[Rail, asyncio.DatagramTransport] = {}
        self._sources = {
            address: rank
            for rank, member in enumerate(cluster.ranks)
            for address in (member.control, *(rail.address for rail in member.rails))
        }

    async def open(self) -> None:
        """Listen on the control address and on every rail. Raises OSError; call it when all addresses are there."""
        if self._control is None:
            self._control = await self._listen(self._cluster.ranks[self._node.rank].control, None)
        for rail in self._node.rails:
            if rail not in self._rails:
                self._rails[rail] = await self._listen(rail.address, rail)

    async def _listen(self, address: str, rail: Rail | None) -> asyncio.DatagramTransport:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            if rail is not None and ":" not in address:
                sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            sock.bind((address, self._cluster.ports.heartbeat))
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(lambda: _Receiver(self, rail), sock=sock)
        except OSError:
            sock.close()
            raise
        return transport

    def close(self) -> None:
        for transport in (self._control, *self._rails.values()):
            if transport is not None:
                transport.close()

    def send(self, beat: Beat) -> None:
        """To every peer, over the control network and every rail. What cannot be sent is silence to the peer."""
        port = self._cluster.ports.heartbeat
        data = beat.encode(self._cluster.name)
        if self._control is not None:
            for rank, peer in self.peers.items():
                differs = peer.beat is not None and peer.beat.digest != beat.digest
                whole = beat.encode(self._cluster.name, self._config) if differs else data
                self._control.sendto(whole, (self._cluster.ranks[rank].control, port))
        lean = dataclasses.replace(beat, figures={}).encode(self._cluster.name)
        for rail, transport in self._rails.items():
            size = rail.mtu - _IP_HEADERS
            # What does not fit is not sent: with many ranks and rails, figures go over the control network alone.
            transport.sendto((data if len(data) <= size else lean).ljust(size), (rail.peer_address, port))

    def take(self, data: bytes, source: str, rail: Rail | None) -> None:
        """A datagram has come."""
        found = decode(data, self._cluster.name)
        if found is None or self._sources.get(source) != found[0].rank or found[0].rank not in self.peers:
            return
        beat, config = found
        peer, now = self.peers[beat.rank], time.monotonic()
        if rail is not None:
            peer.rails[rail.address] = now
        last = peer.beat
        if last and (beat.boot, beat.sequence) == (last.boot, last.sequence) and not last.figures:
            peer.beat = beat  # a rail's copy without figures was quicker
        # An older one overtook a newer one on the other path; a clock set back may make a new supervisor look older.
        if last and (beat.boot, beat.sequence) <= (last.boot, last.sequence) and now - peer.heard < PERIOD_S * 4:
            return
        peer.beat, peer.heard = beat, now
        if config:
            peer.config = config

    def silent_rail(self, limit: float) -> str:
        """A rail whose peer lives and yet has not been heard over it for `limit` seconds, in words; empty if none."""
        now = time.monotonic()
        for rail in self._node.rails:
            peer = self.peers[rail.peer]
            if now - peer.heard < limit and now - peer.rails.get(rail.address, float("-inf")) > limit:
                return (
                    f"rail {rail.interface} ({rail.address}): no full packet comes from {rail.peer_address} of rank "
                    f"{rail.peer}: wrong port, broken cable, or different MTUs"
                )
        return ""

    def difference(self, rank: int) -> str:
        """The first field of cluster.json in which a peer differs, with both values; empty while unknown."""
        theirs = self.peers[rank].config
        for path in sorted(self._config.keys() | theirs.keys()) if theirs else ():
            mine, other = self._config.get(path, "nothing"), theirs.get(path, "nothing")
            if mine != other:
                return f"{path} is {mine} on rank {self._node.rank} and {other} on rank {rank}"
        return ""


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, beats: Beats, rail: Rail | None) -> None:
        self._beats, self._rail = beats, rail

    def datagram_received(self, data: bytes, source: tuple[Any, ...]) -> None:
        self._beats.take(data, source[0], self._rail)

    def error_received(self, error: Exception) -> None:
        """A network that is down, or a peer without a supervisor: its silence says so."""
