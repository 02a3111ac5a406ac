"""How far every rank is, and whether the gather that all are in gets on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_SLOWEST_BYTES_S = 20e6  # a wire that carries less is no use to anybody


@dataclass(slots=True)
class Progress:
    """How far a rank is: the last message it has finished, the gathers it has come to, those of them that have brought
    their data, and the bytes of the largest of the others. Between GPUs a rank comes to the next ones before that."""

    done: int = 0
    came: int = 0
    left: int = 0
    bytes: int = 0

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Progress:
        """What `facts` gave. Raises ValueError for what is no number."""
        return cls(*(int(facts.get(field.name, 0)) for field in fields(cls)))


class GatherWatch:
    """Since when each rank is in a gather that all have come to. limit_s: how long it may be, beside the time that the
    gather's bytes may take."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._inside: dict[int, tuple[int, float]] = {}

    def forget(self) -> None:
        """A rank stands still; once it is heard again all have their time to go on."""
        self._inside = {}

    def broken(self, progress: Mapping[int, Progress], now: float) -> str | None:
        """What to say if one does not get on: then it is the wire that is broken, say a cable between two followers,
        which no beat runs over."""
        came = min(one.came for one in progress.values())
        inside = {}
        for rank, one in progress.items():
            if one.left < came:
                before, since = self._inside.get(rank, (-1, now))
                inside[rank] = (one.left, since if one.left == before else now)
        self._inside = inside
        limit = self._limit_s + max(one.bytes for one in progress.values()) / _SLOWEST_BYTES_S
        late = [(left, now - since) for left, since in inside.values() if now - since > limit]
        if not late:
            return None
        gather, waited = min(left for left, _ in late) + 1, max(waited for _, waited in late)
        names = ", ".join(str(rank) for rank, (left, _) in sorted(inside.items()) if left < gather)
        what = f"still wait in gather {gather} {waited:.1f} s after all ranks have come to it"
        return f"ranks {names} {what}: what carries it between them is broken"
