"""When a generation may begin and when it is over, as functions of what is known. No sockets, no clocks, no processes.

A generation is one start of all ranks together. Rank 0 declares it once every rank waits with everything prepared, so
no engine of an earlier one is left anywhere; it names the supervisors that belong to it, so one that was restarted
meanwhile cannot slip in. It ends for all as soon as one rank says so, falls silent or comes back as another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfglm.supervisor.beats import Beat

RUNNING = ("starting", "serving", "draining", "leaving")


@dataclass(frozen=True)
class Seen:
    """A peer as far as decisions go. beat: None before the first; silent_s: since the last."""

    rank: int
    name: str
    beat: Beat | None
    silent_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class End:
    """Why a generation is over. in_order: somebody asked for it, so that it is no failed attempt."""

    code: str
    reason: str
    in_order: bool = False


def waits_for(seen: Sequence[Seen], own: Beat, dead_s: float, difference: str = "") -> str:
    """What still keeps rank `own` from a start of all ranks, in words; empty when nothing does.

    difference: the field of cluster.json in which a peer is known to differ.
    """
    for peer in seen:
        if peer.beat is None:
            return f"{peer}, which has not been heard of"
        if peer.beat.phase == "gone":
            why = f": {peer.beat.code + ': ' if peer.beat.code else ''}{peer.beat.reason}" if peer.beat.reason else ""
            return f"{peer}, which has stopped{why}"
        if peer.silent_s > dead_s:
            return f"{peer}, silent for {peer.silent_s:.0f} s"
        if peer.beat.release != own.release:
            return f"{peer} to get the same release: it has tfglm {peer.beat.release}, this rank {own.release}"
        if peer.beat.digest != own.digest:
            return f"{peer} to get the same cluster.json: {difference or 'it has another one'}"
        if peer.beat.phase != "waiting":
            why = f": {peer.beat.reason}" if peer.beat.reason else ""
            return f"{peer}, which is {peer.beat.phase}{why}"
        if peer.beat.lost:
            return f"{peer}, which has lost {peer.beat.lost}"
    return own.lost


def next_generation(seen: Sequence[Seen], own: Beat) -> int:
    """A number that no rank has taken part in."""
    beats = [own, *(peer.beat for peer in seen if peer.beat is not None)]
    return 1 + max(max(beat.generation, beat.ended) for beat in beats)


def declared(leader: Seen, own: Beat, dead_s: float) -> int:
    """The generation that rank 0 has declared and this rank is to join; 0 while there is none."""
    beat = leader.beat
    if beat is None or leader.silent_s > dead_s or beat.phase not in RUNNING or beat.digest != own.digest:
        return 0
    mine = own.rank < len(beat.boots) and beat.boots[own.rank] == own.boot
    return beat.generation if mine and beat.generation > max(own.ended, beat.ended) else 0


def over(
    seen: Sequence[Seen], own: Beat, boots: Sequence[int], age_s: float, dead_s: float, join_s: float
) -> End | None:
    """Why own.generation, `age_s` old and made of the supervisors `boots`, is over; None while it is not."""
    generation = own.generation
    for peer in seen:
        beat = peer.beat
        if beat is not None and beat.ended >= generation:
            if beat.phase == "gone" and not beat.code:
                return End("", f"{peer} has stopped", in_order=True)
            text = beat.reason or "has ended"
            return End(beat.code, text if text.startswith("rank ") else f"{peer}: {text}", in_order=not beat.code)
        if beat is None or peer.silent_s > dead_s:
            return End("E_RANKS", f"{peer} has been silent for more than {dead_s:g} s")
        if beat.boot != boots[peer.rank]:
            return End("E_RANKS", f"the supervisor of {peer} was started again")
        if beat.generation != generation and age_s > join_s:
            return End("E_RANKS", f"{peer} has not started its engine within {join_s:g} s: it is {beat.phase}")
    if own.lost:
        return End("E_FABRIC", f"lost {own.lost}")
    return None


def leaving(seen: Sequence[Seen]) -> Seen | None:
    """A peer that asks to stop in order: rank 0 then lets its replies finish."""
    return next((peer for peer in seen if peer.beat is not None and peer.beat.phase == "leaving"), None)
