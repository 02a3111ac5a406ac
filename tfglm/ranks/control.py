"""Keeps the ranks together: who is alive, how far each is, rank 0's messages, and one end for all of them.

Every follower has one connection, to rank 0. Each side sends a beat every second and gives the other up when it has
not heard anything for five. Whatever goes wrong anywhere becomes one RanksError: the rank that notices tells rank 0,
rank 0 tells the others, and everything that waits on any rank (a message, a gather, a key of the board) raises it.
This module knows nothing of tensors; it runs without torch.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tfglm.errors import RankMismatch, RankNeverCame, RanksError
from tfglm.ranks.link import Link
from tfglm.ranks.messages import RANK, Array, Frame, FrameError, encode
from tfglm.ranks.progress import GatherWatch, Progress

log = logging.getLogger(__name__)

_ERRORS = {error.__name__: error for error in (RanksError, RankMismatch, RankNeverCame)}
_MAX_WAITING = 1024  # messages that a follower may lag behind rank 0
_PROGRESS_S = 5.0
_TELLING_S = 2.0


@dataclass(frozen=True)
class Timing:
    """Seconds. A rank is lost when nothing was heard of it for `lost_s`; it does not get on when it has not finished a
    message of rank 0 within `step_s`, however alive it is otherwise. A gather that every rank has come to is broken
    when none is over in `gather_s` and the time that the largest under way may take, which grows with a step's rows:
    15 s more for 4,096 of GLM-5.3 on three ranks. That also covers what one device computes for longer than the others
    between two gathers, at most a layer's indexer over a million tokens: some 0.6 s for 4,096 rows on a GB10."""

    beat_s: float = 1.0
    lost_s: float = 5.0
    step_s: float = 300.0
    gather_s: float = 4.0


class Control:
    """One rank's end of the connections between rank 0 and the others. Any thread may call it.

    links: on rank 0 one for every other rank, on the others the one to rank 0. The connections belong to this object.
    early: what rank 0 has already sent to this follower.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        links: Mapping[int, Link],
        timing: Timing | None = None,
        early: Iterable[Frame] = (),
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timing = timing or Timing()
        self._links = dict(links)
        self._changed = threading.Condition()
        self._ending = False
        self._failure: RanksError | None = None
        self._on_failure: list[Callable[[RanksError], None]] = []
        self._inbox: deque[Frame] = deque()
        self._board: dict[str, bytes] = {}
        self._announced: deque[tuple[int, str, float]] = deque()
        self._own = Progress()
        self._under_way: deque[tuple[int, int]] = deque()  # number and bytes of gathers that this rank has not left
        self._counting = threading.Lock()
        self._progress = {other: Progress() for other in self._links} | {rank: self._own}
        self._gathers = GatherWatch(self.timing.gather_s)
        self._before_beats: list[Callable[[], None]] = []
        self._stopped = False
        self._closed = False
        self._over = False
        self._wake, self._woken = socket.socketpair()
        for link in self._links.values():
            link.accept(RANK)
            link.heard = time.monotonic()
        for frame in early:
            self._take(0, frame)
        self._thread = threading.Thread(target=self._run, name="ranks-control", daemon=True)
        self._thread.start()

    # -- for whoever works on this rank

    @property
    def host(self) -> str:
        """This rank's own address on its connections: where the others reach it. Empty for a rank on its own."""
        return next((link.host for link in self._links.values()), "")

    def check(self) -> None:
        """Raises the RanksError that ended the ranks, if one did."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)

    def on_failure(self, call: Callable[[RanksError], None]) -> None:
        """Have `call` run, in a thread of this object, when the ranks end. At once if they already have."""
        with self._changed:
            if self._failure is None:
                self._on_failure.append(call)
                return
            failure = self._failure
        call(failure)

    def fail(self, error: RanksError) -> None:
        """End all ranks with this error, unless they have ended. Waits for no other rank; afterwards `check` raises."""
        with self._changed:
            if self._closed:
                return
            if self._ending:  # another thread tells the others just now
                self._changed.wait_for(lambda: self._failure is not None, _TELLING_S)
                return
            self._ending = True
        log.error("%s", error)
        # The others first: as soon as this rank's own threads know, its process may be gone.
        frame = failed_frame(error)
        for link in self._links.values():
            link.send_now(frame, wait_s=0.2)
        with self._changed:
            self._failure = error
            calls = list(self._on_failure)
            self._changed.notify_all()
        for call in calls:
            try:
                call(error)
            except Exception:
                log.exception("while the ranks end")
        for link in self._links.values():
            link.hang_up()

    def failure(self, within_s: float) -> RanksError | None:
        """What ended the ranks, waiting up to `within_s` seconds for it to become known."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, within_s)
            return self._failure

    def announce(self, number: int, kind: str, data: bytes | bytearray) -> None:
        """Rank 0: send an encoded work frame to all others. number: 1, 2, 3, ...; kind: for the messages."""
        self.check()
        with self._changed:
            self._announced.append((number, kind, time.monotonic()))
        for rank, link in self._links.items():
            try:
                link.send(data)
            except OSError as error:
                self.fail(RanksError(f"rank {rank} ({link.peer}) cannot be reached: {error}"))
                self.check()

    def receive(self) -> Frame | None:
        """A follower: rank 0's next message; None once rank 0 has stopped. Waits as long as rank 0 is alive."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._failure is not None or self._stopped)
            self.check()
            return self._inbox.popleft() if self._inbox else None

    def done(self, number: int) -> None:
        """A follower: message `number` and all before it are finished. Rank 0 hears it with the next beat."""
        self._own.done = number

    def came(self, size: int) -> int:
        """This rank comes to its next gather, of `size` bytes in all; the gather's number."""
        own = self._own
        with self._counting:
            own.came += 1
            own.bytes = max(own.bytes, size)
            self._under_way.append((own.came, size))
            return own.came

    def left(self, gather: int) -> None:
        """This rank has everybody's part of a gather and of those before it."""
        with self._counting:
            self._own.left = gather
            while self._under_way and self._under_way[0][0] <= gather:
                self._under_way.popleft()
            self._own.bytes = max((size for _, size in self._under_way), default=0)

    def before_beats(self, call: Callable[[], None]) -> None:
        """Have `call` run in the thread of this object each time before it tells the others how far this rank is."""
        self._before_beats.append(call)

    def post(self, key: str, value: bytes) -> None:
        """Put a value where every rank can read it."""
        with self._changed:
            self._board[key] = value
            self._changed.notify_all()
        frame = _posted(key, value)
        for link in self._links.values():
            try:
                link.send(encode(frame))
            except OSError:
                # The thread that reads from this connection says what became of the other rank.
                failure = self.failure(self.timing.lost_s)
                raise failure or RanksError(f"{link.peer} cannot be reached: {key} was not posted") from None

    def read(self, key: str, limit_s: float) -> bytes:
        """The value of a key, waiting for some rank to post it. Raises RanksError after `limit_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._board or self._failure is not None, limit_s)
            if key not in self._board:
                self.check()
                raise RanksError(f"nobody has posted {key!r} within {limit_s:g} s")
            return self._board[key]

    def has(self, keys: list[str]) -> bool:
        """Whether all these keys are posted."""
        with self._changed:
            return all(key in self._board for key in keys)

    def meet(self, what: str, limit_s: float, progress: Callable[[str], None] = log.info) -> None:
        """Wait until every rank has come to `what`, say "loading". Ends all ranks when one has not by the limit."""
        began = time.monotonic()
        self.post(f"meet/{what}/{self.rank}", b"")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or not self._missing(what), _PROGRESS_S)
                missing = self._missing(what)
            if not missing:
                return  # even if a rank that has left since ended the others
            self.check()
            waited = time.monotonic() - began
            if waited >= limit_s:
                self.fail(RanksError(f"rank {missing[0]} was not ready with {what} after {waited:.0f} s"))
                self.check()
            names = ", ".join(str(rank) for rank in missing)
            progress(f"rank {names} is not ready with {what} after {waited:.0f} s")

    def close(self) -> None:
        """Rank 0: stop the followers. All: end the connections. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._stopped = self._closed = True
            self._changed.notify_all()
        if self.rank == 0 and self._failure is None:
            for link in self._links.values():
                link.send_now(Frame("stop"), wait_s=0.2)
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.timing.lost_s)
        for link in self._links.values():
            link.close()

    # -- the thread

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without this thread nothing would notice a lost rank
            self.fail(RanksError(f"rank {self.rank} cannot watch the others: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector, self._woken:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            next_beat = time.monotonic()
            while not (self._closed or self._over) and self._failure is None:
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.data is not None:
                        self._read(key.data)
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + self.timing.beat_s
                    for call in self._before_beats:
                        call()
                    for link in self._links.values():
                        link.beat(self._own.facts())
                    self._look(now)

    def _read(self, rank: int) -> None:
        link = self._links[rank]
        try:
            for frame in link.read():
                self._take(rank, frame)
        except (EOFError, ConnectionResetError):
            self._lost(rank, "closed its connection")
        except OSError as error:
            self._lost(rank, f"lost its connection: {error}")
        except FrameError as error:
            self.fail(RanksError(f"rank {rank} ({link.peer}) sent {error}"))

    def _lost(self, rank: int, how: str) -> None:
        if self._stopped:
            self._over = True
            return
        self.fail(RanksError(f"rank {rank} ({self._links[rank].peer}) {how}"))

    def _take(self, rank: int, frame: Frame) -> None:
        facts = frame.facts
        if frame.kind == "beat":
            self._progress[rank] = Progress.of(facts)
        elif frame.kind == "failed":
            self.fail(error_of(frame))
        elif frame.kind == "posted":
            self._posted(rank, frame)
        elif frame.kind == "stop" and rank == 0:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
        elif frame.kind == "work" and rank == 0:
            self._work(frame)
        else:
            self.fail(RanksError(f"rank {rank} sent a message of the unknown kind {frame.kind!r}"))

    def _work(self, frame: Frame) -> None:
        with self._changed:
            self._inbox.append(frame)
            waiting = len(self._inbox)
            self._changed.notify_all()
        if waiting > _MAX_WAITING:
            self.fail(RanksError(f"rank {self.rank} is {waiting} messages behind rank 0"))

    def _posted(self, rank: int, frame: Frame) -> None:
        key, value = str(frame.facts["key"]), bytes(frame.arrays[0].data)
        with self._changed:
            self._board[key] = value
            self._changed.notify_all()
        if self.rank == 0:
            for other, link in self._links.items():
                if other != rank and not link.send_now(frame, wait_s=1.0):
                    self.fail(RanksError(f"rank {other} ({link.peer}) does not take {key!r}"))

    def _look(self, now: float) -> None:
        """Has a rank fallen silent, or does one not get on?"""
        for rank, link in self._links.items():
            silent = now - link.heard
            if silent > self.timing.lost_s:
                self.fail(RanksError(f"rank {rank} ({link.peer}) has not been heard of for {silent:.1f} s"))
                return
        if self.rank == 0:
            self._look_at_messages(now)
            self._look_at_gathers(now)

    def _look_at_messages(self, now: float) -> None:
        done = {rank: self._progress[rank].done for rank in self._links}
        with self._changed:
            while self._announced and min(done.values()) >= self._announced[0][0]:
                self._announced.popleft()
            if not self._announced or now - self._announced[0][2] <= self.timing.step_s:
                return
            number, kind, since = self._announced[0]
        rank = min(rank for rank in done if done[rank] < number)
        what = f"has not finished message {number} ({kind}) after {now - since:.0f} s"
        self.fail(RanksError(f"rank {rank} is alive, but {what}"))

    def _look_at_gathers(self, now: float) -> None:
        if any(now - link.heard > 2.5 * self.timing.beat_s for link in self._links.values()):
            self._gathers.forget()
        elif broken := self._gathers.broken(self._progress, now):
            self.fail(RanksError(broken))

    def _missing(self, what: str) -> list[int]:
        return [rank for rank in range(self.ranks) if f"meet/{what}/{rank}" not in self._board]


def failed_frame(error: RanksError) -> Frame:
    """The message that ends another rank with this error."""
    return Frame("failed", {"reason": error.message, "error": type(error).__name__})


def error_of(frame: Frame) -> RanksError:
    """The error that a failed message carries."""
    return _ERRORS.get(str(frame.facts.get("error")), RanksError)(str(frame.facts.get("reason")))


def _posted(key: str, value: bytes) -> Frame:
    return Frame("posted", {"key": key}, (Array("value", "uint8", (len(value),), value),))


def controls_in_process(ranks: int, timing: Timing | None = None) -> list[Control]:
    """The controls of ranks that are threads of this process, over local socket pairs."""
    pairs = {rank: socket.socketpair() for rank in range(1, ranks)}
    leader = Control(0, ranks, {rank: Link(pair[0]) for rank, pair in pairs.items()}, timing)
    return [leader, *(Control(rank, ranks, {0: Link(pair[1])}, timing) for rank, pair in pairs.items())]


def end_process_on_failure(control: Control, grace_s: float = 2.0, exit_code: int = 69) -> None:
    """Have this process end when the ranks do, however deep it waits: a moment for the reply's last words, then exit.

    A kernel, or a library's collective, cannot be called back; without this its process would outlive the others.
    """

    def end(error: RanksError) -> None:
        def now() -> None:
            log.error("%s; this process ends", error)
            logging.shutdown()
            os._exit(exit_code)

        timer = threading.Timer(grace_s, now)
        timer.daemon = True
        timer.start()

    control.on_failure(end)
