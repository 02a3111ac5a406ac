"""How the ranks find each other: rank 0 listens, the others dial, both compare what they were started with.

A follower says hello with its rank and its facts (version, code, settings, checkpoint, layout, kernels, ...). Rank 0
compares them with its own, field by field; where they differ both sides end, naming the field and both values. When
all have come, everybody is welcomed and the connections become the control channel (control.py). Whoever connects
without saying a proper hello is sent away and disturbs nobody. Ranks trust the network they meet on: there is no
secret, so the address to listen on should be one of the cluster's own.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfglm.errors import PortError, RankMismatch, RankNeverCame, RanksError
from tfglm.ranks.control import Control, Timing, error_of, failed_frame
from tfglm.ranks.link import Link, address_text
from tfglm.ranks.messages import PROTOCOL, RANK, Frame, FrameError, encode

log = logging.getLogger(__name__)

Facts = Mapping[str, Any]  # JSON values; a mapping of mappings is compared leaf by leaf
Address = tuple[str, int]

PROGRESS_S = 5.0
_HELLO_S = 5.0  # for a connection to say who it is
_MAX_UNKNOWN = 32  # connections that have not said hello
_RETRY_S = 0.25
_CONNECT_S = 2.0
_NOTHING = "nothing"


def differences(mine: Facts, theirs: Facts, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The fields, "settings.kv" for nested ones, whose values differ, with both; a missing one counts as "nothing"."""
    found: list[tuple[str, Any, Any]] = []
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        left, right = mine.get(name, _NOTHING), theirs.get(name, _NOTHING)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append((prefix + name, left, right))
    return found


class Gathering:
    """Rank 0 while it waits for the others. Used by `lead`."""

    def __init__(
        self, listener: socket.socket, ranks: int, facts: Facts, expected: Mapping[int, str], timing: Timing
    ) -> None:
        self.ranks = ranks
        self.facts = facts
        self.expected = expected
        self.timing = timing
        self.joined: dict[int, Link] = {}
        self._listener = listener
        self._unknown: dict[Link, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._next_beat = time.monotonic()

    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.ranks) if rank not in self.joined]

    def step(self) -> None:
        """Take what comes in 0.2 s. Raises RanksError when a rank that had joined is lost or differs."""
        for key, _ in self._selector.select(0.2):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        for link in [link for link, since in self._unknown.items() if now - since > _HELLO_S]:
            self._send_away(link, f"it said nothing of use within {_HELLO_S:g} s")
        if now >= self._next_beat:
            self._next_beat = now + self.timing.beat_s
            for link in self.joined.values():
                link.beat({})
        for rank, link in self.joined.items():
            if now - link.heard > self.timing.lost_s:
                raise RanksError(
                    f"rank {rank} ({link.peer}) joined and then was not heard of for {now - link.heard:.1f} s"
                )

    def end(self, error: RanksError | None) -> None:
        """Let go of all who have no part in it; with an error, tell it to those who have joined."""
        for link in self._unknown:
            link.close()
        self._unknown = {}
        if error is not None:
            for link in self.joined.values():
                link.send_now(failed_frame(error))
                link.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left before it was let in
        try:
            link = Link(sock)
        except OSError:
            sock.close()
            return
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._send_away(next(iter(self._unknown)), "too many strangers wait at once")
        self._unknown[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, link)

    def _send_away(self, link: Link, why: str) -> None:
        log.warning("a connection from %s is none of the ranks: %s", link.peer, why)
        self._drop(link)

    def _drop(self, link: Link) -> None:
        self._unknown.pop(link, None)
        self._selector.unregister(link)
        link.close()

    def _read(self, link: Link) -> None:
        rank = next((rank for rank, known in self.joined.items() if known is link), None)
        if rank is None and link not in self._unknown:
            return  # sent away a moment ago
        try:
            frames = link.read()
        except (EOFError, OSError, FrameError) as error:
            if rank is not None:
                raise RanksError(f"rank {rank} ({link.peer}) joined and then closed its connection") from error
            self._send_away(link, str(error) or "it left without a word")
            return
        for frame in frames:
            if rank is None and link in self._unknown:
                self._hello(link, frame)
            elif frame.kind == "failed":
                raise error_of(frame)

    def _hello(self, link: Link, frame: Frame) -> None:
        facts = frame.facts
        rank, theirs = facts.get("rank"), facts.get("facts")
        if frame.kind != "hello" or not isinstance(rank, int) or not isinstance(theirs, dict):
            self._send_away(link, f"its first message is {frame.kind!r}, not a hello")
            return
        name = f"rank {rank} ({link.peer})"
        mine = {"protocol": PROTOCOL, "ranks": self.ranks, **self.facts}
        said = {"protocol": facts.get("protocol"), "ranks": facts.get("ranks"), **theirs}
        if said["protocol"] != PROTOCOL:
            mine, said = {"protocol": PROTOCOL}, {"protocol": said["protocol"]}
        unlike = differences(mine, said)
        if unlike:
            error = RankMismatch(f"{name} was not started like rank 0: {_listed(unlike, rank)}")
            link.send_now(failed_frame(error))
            self._drop(link)
            raise error
        if rank in self.joined:
            error = RankMismatch(f"{name}: field 'rank': rank {rank} has already joined from {self.joined[rank].peer}")
        elif not 1 <= rank < self.ranks:
            error = RankMismatch(f"{name}: field 'rank' is {rank}; rank 0 waits for ranks 1 to {self.ranks - 1}")
        else:
            self._unknown.pop(link)
            self.joined[rank] = link
            log.info("%s has joined", name)
            return
        # One process too many is no harm to the others.
        log.warning("%s", error)
        link.send_now(failed_frame(error))
        self._drop(link)


def _listed(unlike: list[tuple[str, Any, Any]], rank: int) -> str:
    return "; ".join(
        f"field {name!r} is {mine!r} on rank 0 and {theirs!r} on rank {rank}" for name, mine, theirs in unlike
    )


def listen(address: Address) -> socket.socket:
    """A socket that listens at this address alone. Port 0 takes a free one. Raises PortError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PortError(f"the ranks cannot meet at {address_text(address)}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_MAX_UNKNOWN)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise PortError(f"the ranks cannot meet at {address_text(address)}: {error}") from error
    return sock


def lead(
    listener: socket.socket,
    ranks: int,
    facts: Facts,
    *,
    limit_s: float = 300.0,
    expected: Mapping[int, str] | None = None,
    progress: Callable[[str], None] = log.info,
    watch: Callable[[], None] = lambda: None,
    timing: Timing | None = None,
) -> Control:
    """Rank 0: wait for ranks 1 to ranks - 1 at `listener`, which is closed afterwards.

    expected: where a rank should come from, for the messages alone. progress: is told every 5 s who is missing. watch:
    called several times a second; what it raises ends the wait.
    Raises RankNeverCame after limit_s, RankMismatch when a rank was started with other facts, RanksError when one that
    had joined is lost. Ranks that have joined are told, and end with the same error.
    """
    timing = timing or Timing()
    gathering = Gathering(listener, ranks, facts, expected or {}, timing)
    began = time.monotonic()
    told = began
    try:
        while missing := gathering.missing():
            gathering.step()
            watch()
            now = time.monotonic()
            if now - began > limit_s:
                raise RankNeverCame(_still_missing(missing, limit_s, gathering.expected))
            if now - told >= PROGRESS_S:
                told = now
                for rank in missing:
                    progress(_still_missing([rank], now - began, gathering.expected))
        for link in gathering.joined.values():
            with contextlib.suppress(OSError):  # its control says so at once
                link.send(encode(Frame("welcome")))
    except RanksError as error:
        gathering.end(error)
        raise
    except BaseException as error:
        gathering.end(RanksError(f"rank 0 failed while the ranks met: {type(error).__name__}: {error}"))
        raise
    finally:
        listener.close()
    gathering.end(None)
    return Control(0, ranks, gathering.joined, timing)


def _still_missing(missing: list[int], waited: float, expected: Mapping[int, str]) -> str:
    parts = [
        f"rank {r} has not joined after {waited:.0f} s" + (f": expected {expected[r]}" if r in expected else "")
        for r in missing
    ]
    return "; ".join(parts)


def join(
    leader: Address,
    rank: int,
    ranks: int,
    facts: Facts,
    *,
    limit_s: float = 300.0,
    source: str = "",
    progress: Callable[[str], None] = log.info,
    watch: Callable[[], None] = lambda: None,
    timing: Timing | None = None,
) -> Control:
    """A follower: dial rank 0 until it answers, say hello, wait until all have come.

    source: the own address to dial from; empty leaves it to the system. progress, watch: as `lead`'s. Raises
    RankNeverCame when rank 0 cannot be reached within limit_s, or some rank did not come; RankMismatch and RanksError
    as `lead`.
    """
    timing = timing or Timing()
    began = time.monotonic()
    link = _dial(leader, began, limit_s, source, progress, watch)
    try:
        hello = Frame("hello", {"protocol": PROTOCOL, "rank": rank, "ranks": ranks, "facts": dict(facts)})
        link.send(encode(hello))
        link.accept(RANK)
        early = _await_welcome(link, leader, began, limit_s, progress, watch, timing)
    except BaseException as error:
        what = f"rank {rank} failed while the ranks met: {type(error).__name__}: {error}"
        link.send_now(failed_frame(error if isinstance(error, RanksError) else RanksError(what)))
        link.close()
        raise
    return Control(rank, ranks, {0: link}, timing, early)


def _dial(
    leader: Address,
    began: float,
    limit_s: float,
    source: str,
    progress: Callable[[str], None],
    watch: Callable[[], None],
) -> Link:
    told = began
    while True:
        watch()
        try:
            sock = socket.create_connection(leader, timeout=_CONNECT_S, source_address=(source, 0) if source else None)
            return Link(sock)
        except OSError as error:
            waited = time.monotonic() - began
            line = f"rank 0 cannot be reached at {address_text(leader)} after {waited:.0f} s: {error}"
        if waited > limit_s:
            raise RankNeverCame(line)
        if time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            progress(line)
        time.sleep(_RETRY_S)


def _await_welcome(
    link: Link,
    leader: Address,
    began: float,
    limit_s: float,
    progress: Callable[[str], None],
    watch: Callable[[], None],
    timing: Timing,
) -> list[Frame]:
    """What rank 0 has sent after its welcome."""
    where = address_text(leader)
    told = began
    answered = False  # until then rank 0 may have its door open and be busy inside
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            watch()
            try:
                frames = link.read() if selector.select(timing.beat_s) else []
            except FrameError as error:
                raise RanksError(f"what answers at {where} is not rank 0: {error}") from error
            except (EOFError, OSError) as error:
                what = "closed its connection: it has ended, or has all the ranks it waits for"
                raise RanksError(f"rank 0 ({where}) {what}") from error
            answered = answered or bool(frames)
            for at, frame in enumerate(frames):
                if frame.kind == "welcome":
                    return frames[at + 1 :]
                if frame.kind == "failed":
                    raise error_of(frame)
            now = time.monotonic()
            if answered and now - link.heard > timing.lost_s:
                raise RanksError(f"rank 0 ({where}) has not been heard of for {now - link.heard:.1f} s")
            # Rank 0 keeps the limit; a follower that has dialled late must not give up before it.
            if now - began > limit_s + timing.lost_s + PROGRESS_S:
                what = "has not had all ranks join" if answered else "has not answered"
                raise RankNeverCame(f"rank 0 ({where}) {what} after {now - began:.0f} s")
            if now - told >= PROGRESS_S:
                told = now
                what = "the other ranks have not come" if answered else "it has not answered"
                progress(f"connected to rank 0 at {where}; {what} after {now - began:.0f} s")
            link.beat({})
