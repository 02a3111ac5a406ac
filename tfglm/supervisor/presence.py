"""How one rank shows itself: heartbeats to the others, systemd's notifications, the state file. And what it sees."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from pathlib import Path

from tfglm import __version__
from tfglm.supervisor import fabric
from tfglm.supervisor.beats import PERIOD_S, Beat, Beats
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.codes import Exit, Fatal
from tfglm.supervisor.decide import Seen
from tfglm.supervisor.notify import Notifier
from tfglm.supervisor.report import Figures, status_line, whole_state
from tfglm.supervisor.state import StateFile, state_path

TICK_S = 0.1
START_LIMIT_S = 120.0
"""systemd's start limit is moved this far ahead for as long as the rank says what it waits for."""
_STATE_S = 2.0


class Presence:
    """phase, reason and code: what the rank does, why or for what it waits, and the code of what went wrong last.
    generation, ended, boots: as in `Beat`. tail: the engine's last lines. All are changed by the supervisor alone.
    """

    def __init__(self, cluster: Cluster, node: Node, notifier: Notifier, state_dir: Path | None, sysroot: Path) -> None:
        self.cluster, self.node, self.notifier, self.sysroot = cluster, node, notifier, sysroot
        self.limits = cluster.limits
        self.beats = Beats(cluster, node)
        self.figures = Figures(node, sysroot)
        self.phase, self.reason, self.code, self.lost = "preparing", "", "", ""
        self.generation, self.ended, self.failed_starts = 0, 0, 0
        self.boots: tuple[int, ...] = ()
        self.tail: Sequence[str] = ()
        self.boot, self._sequence = time.time_ns(), 0
        self._file = StateFile(state_path(node.rank, state_dir))
        self._wrote = float("-inf")
        self._ready = False
        self._gids: dict[str, int] = {}

    async def tick(self) -> None:
        """For as long as the supervisor lives, in its event loop: a loop that hangs neither beats nor pings."""
        beat_at = more_at = float("-inf")
        while True:
            now = time.monotonic()
            self.notifier.ping()
            if not self._ready and now - more_at > START_LIMIT_S / 4:
                more_at = now
                self.notifier.more_time(START_LIMIT_S)
            if now - beat_at >= PERIOD_S:
                beat_at = now
                await self._open()
                control = self.cluster.ranks[self.node.rank].control
                gone = fabric.missing(self.node, control, self.sysroot, gids=self._gids)
                self.lost = gone or self.beats.silent_rail(self.limits.dead)
                self.figures.sample()
                self.beat()
                self._write(now - self._wrote >= _STATE_S)
            await asyncio.sleep(TICK_S)

    def serving(self) -> None:
        """The rank serves; systemd hears of the first time."""
        self.enter("serving")
        if not self._ready:
            self._ready = True
            self.notifier.ready()

    async def _open(self) -> None:
        """Sockets on addresses that are there; the others get theirs when they come. Raises Fatal for a port in use."""
        try:
            await self.beats.open()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                port = self.cluster.ports.heartbeat
                text = f"UDP port {port} is in use: another supervisor of this rank may be running"
                raise Fatal(Exit.CONFIG, "E_PORT", f"{text}; the port is ports.heartbeat of cluster.json") from None

    def own_beat(self) -> Beat:
        return Beat(
            rank=self.node.rank,
            boot=self.boot,
            sequence=self._sequence,
            digest=self.cluster.digest,
            release=__version__,
            phase=self.phase,
            generation=self.generation,
            ended=self.ended,
            boots=self.boots,
            reason=self.reason,
            code=self.code,
            lost=self.lost,
            figures=self.figures.as_json(),
        )

    def beat(self) -> None:
        self._sequence += 1
        self.beats.send(self.own_beat())

    def seen(self) -> list[Seen]:
        """All other ranks, in order."""
        now = time.monotonic()
        return [
            Seen(rank, self.cluster.ranks[rank].name, peer.beat, now - peer.heard)
            for rank, peer in self.beats.peers.items()
        ]

    def difference(self) -> str:
        digest = self.cluster.digest
        other = (rank for rank, peer in self.beats.peers.items() if peer.beat and peer.beat.digest != digest)
        return next((self.beats.difference(rank) for rank in other), "")

    def because(self, reason: str) -> None:
        self.reason = reason
        self.notifier.status(status_line(self.phase, self.generation, reason, self.figures))

    def enter(self, phase: str, reason: str = "", code: str = "") -> None:
        if phase != self.phase:
            self.figures.since = time.time()
        self.phase, self.reason, self.code = phase, reason, code
        self._write(True)

    def _write(self, file: bool) -> None:
        self.notifier.status(status_line(self.phase, self.generation, self.reason, self.figures))
        if file:
            self._wrote = time.monotonic()
            own = {"phase": self.phase, "generation": self.generation, "reason": self.reason, "code": self.code}
            own |= {"lost": self.lost, "failed_starts": self.failed_starts, **self.figures.as_json()}
            self._file.write(whole_state(self.cluster, self.node.rank, own, self.beats.peers, self.tail))
