"""What a supervisor knows of its rank right now, as figures for heartbeats, the state file and one line of text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfglm.memory.info import read_available
from tfglm.supervisor.beats import Peer
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.fabric import traffic
from tfglm.supervisor.health import Rate

GIB = 2**30


@dataclass
class Figures:
    """Measured by `sample`, apart from the four that the supervisor sets: pid of the engine, since when the phase lasts
    (seconds since the epoch), requests running, tokens generated."""

    node: Node
    sysroot: Path = Path("/")
    pid: int = 0
    since: float = field(default_factory=time.time)
    running: int = 0
    tokens: Rate = field(default_factory=Rate)
    available: int = 0
    low: int = 0
    rails: dict[str, tuple[Rate, Rate, int]] = field(default_factory=dict)

    def sample(self) -> None:
        """Read memory and the counters of every rail."""
        self.available = read_available(self.sysroot)
        self.low = min(self.low or self.available, self.available)
        for rail in self.node.rails:
            received, sent, _ = self.rails.get(rail.interface, (Rate(), Rate(), 0))
            now = traffic(rail, self.sysroot)
            received.add(now.received)
            sent.add(now.sent)
            self.rails[rail.interface] = (received, sent, now.mbit)

    def engine_began(self, pid: int) -> None:
        """A new engine: its low-water mark and its counters begin anew."""
        self.pid, self.low, self.running, self.tokens = pid, self.available, 0, Rate()

    def as_json(self) -> dict[str, Any]:
        """Small enough for a heartbeat. rails: interface, MB received and sent a second, speed in Gbit/s."""
        return {
            "pid": self.pid,
            "since": round(self.since, 1),
            "available_gib": round(self.available / GIB, 2),
            "low_gib": round(self.low / GIB, 2),
            "tok_s": round(self.tokens.a_second, 1),
            "running": self.running,
            "rails": [
                [name, round(received.a_second / 1e6, 1), round(sent.a_second / 1e6, 1), mbit / 1000]
                for name, (received, sent, mbit) in self.rails.items()
            ],
        }


def whole_state(
    cluster: Cluster, rank: int, own: Mapping[str, Any], peers: Mapping[int, Peer], tail: Sequence[str]
) -> dict[str, Any]:
    """The state file: the own rank, what is known of every other, and the engine's last lines."""
    now = time.monotonic()
    ranks = []
    for other, member in enumerate(cluster.ranks):
        facts: dict[str, Any] = {"rank": other, "name": member.name, "control": member.control}
        peer = peers.get(other)
        if other == rank:
            facts |= dict(own)
        elif peer is None or peer.beat is None:
            facts |= {"phase": "unknown", "reason": "not heard of yet"}
        else:
            beat = peer.beat
            facts |= {"phase": beat.phase, "generation": beat.generation, "reason": beat.reason, "code": beat.code}
            facts |= {"silent_s": round(now - peer.heard, 1), **beat.figures}
        ranks.append(facts)
    settings = cluster.tfglm_settings()
    return {
        "cluster": cluster.name,
        "digest": cluster.digest,
        "rank": rank,
        "phase": own["phase"],
        "updated": round(time.time(), 1),
        "api": {"host": settings.host, "port": settings.port},
        "ranks": ranks,
        "tail": list(tail),
    }


def status_line(phase: str, generation: int, reason: str, figures: Figures) -> str:
    """What `systemctl status` shows."""
    if phase == "serving":
        return (
            f"serving, start {generation}: {figures.tokens.a_second:.1f} tok/s, {figures.available / GIB:.1f} GiB "
            f"available, {figures.low / GIB:.1f} at the lowest"
        )
    return f"{phase}: {reason}" if reason else phase
