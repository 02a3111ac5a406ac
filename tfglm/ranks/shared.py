"""A wire through memory that the ranks of one host share. One-shot: everybody writes, everybody reads everybody.

A gather of n bytes goes in pieces of at most a place's size. Each piece has a sequence number. A rank writes its piece
into its own place, then its flag: the number. It reads another rank's place once that rank's flag says so. Every rank
has two places, used in turn, and that is enough: who writes piece k + 2 has seen all flags reach k + 1, and a rank sets
its flag to k + 1 only after it has read all places of piece k. A wire over RDMA can use the same two places and flags,
with a write of the data and one of the flag in the place of the stores here.

The memory: one line of 128 bytes a rank (flag; bytes of the gather, one word for either place; abort), so that ranks do
not write to each other's cache lines, then `ranks` times two places. It is an unnamed file that the others open through
rank 0's /proc entry: nothing is left behind however a rank ends.

Why the order of the stores holds, on x86-64 and on arm64 alike. Between writing a place and writing the flag, and
between reading a flag and reading the place, stands `_fence`: a lock is released and taken again. Releasing is a
store with release semantics and taking is an atomic operation with acquire semantics (glibc's semaphores under
CPython's locks, or CPython's own mutexes from 3.13). What comes before a release is ordered before it; what comes
after an acquire is ordered after it; and an acquire is never performed ahead of an earlier release (on arm64 these
are instructions of the LDAR and STLR kind, which keep their order among themselves; on x86-64 a locked instruction is
a full fence). So everything before is ordered before everything after, loads and stores alike. Neither half alone
would do: a later store may overtake a release.

Flags are compared with the two values they can have, never by size: if a word were ever stored in parts, a mixture of
an old and a new number would be neither, because their lowest bytes differ.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time

import torch

from tfglm.errors import RanksError
from tfglm.ranks.control import Control
from tfglm.ranks.staging import Staging

_LINE_WORDS = 16  # words of 8 bytes a rank
_FLAG, _SIZE, _ABORT = 0, 1, 3
_TOKEN_BYTES = 16
_PLACE_BYTES = 4 << 20
_OPEN_S = 30.0

# A wait first looks again at once, then lets other threads run, then sleeps: short waits end within microseconds, and
# on a machine with fewer cores than ranks a waiting rank does not keep the one it waits for from working.
_SPINS = 100
_YIELDS = 200
_SLEEP_S = (50e-6, 1e-3)


class SharedWire:
    """One rank's end. All ranks make theirs at the same time, on one host.

    place_bytes: the largest piece. limit_s: how long `gather` waits for another rank. Raises RanksError when the memory
    of rank 0 cannot be opened, as on another host.
    """

    capturable = False
    arrivals = None

    def __init__(self, control: Control, limit_s: float = 300.0, place_bytes: int = _PLACE_BYTES) -> None:
        self.rank = control.rank
        self.ranks = control.ranks
        self._limit_s = limit_s
        self._place_bytes = place_bytes
        self._aborted: str | None = None
        self._staging = Staging(self.ranks)
        self._piece = 0
        self._gathers = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        lines = self.ranks * _LINE_WORDS * 8
        memory = _shared_memory(control, lines + self.ranks * 2 * place_bytes + _TOKEN_BYTES)
        self._words = memoryview(memory)[:lines].cast("Q")
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=lines, count=self.ranks * 2 * place_bytes)
        self._places = data.view(self.ranks, 2, place_bytes)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out, gathered = self._staging.outgoing(tensor), self._staging.incoming(tensor)
        size = out.numel()
        parts = gathered.view(self.ranks, size)
        for start in range(0, size, self._place_bytes):
            self._exchange(out[start : start + self._place_bytes], parts[:, start : start + self._place_bytes], size)
        self._gathers += 1
        return self._staging.deliver(gathered, tensor)

    def _exchange(self, piece: torch.Tensor, parts: torch.Tensor, size: int) -> None:
        """piece [n] uint8 -> every rank's, into parts [ranks, n]. size: of the whole gather, which must agree."""
        self._piece += 1
        number, turn = self._piece, self._piece % 2
        length = piece.numel()
        words, own = self._words, self.rank * _LINE_WORDS
        self._places[self.rank, turn, :length].copy_(piece)
        words[own + _SIZE + turn] = size
        self._fence()
        words[own + _FLAG] = number
        parts[self.rank].copy_(piece)
        for rank in range(self.ranks):
            if rank != self.rank:
                self._await(rank, number)
                if (theirs := words[rank * _LINE_WORDS + _SIZE + turn]) != size:
                    what = f"gather {self._gathers} has {size} bytes on rank {self.rank} and {theirs} on rank {rank}"
                    raise RanksError(f"{what}: they have not been doing the same")
                parts[rank].copy_(self._places[rank, turn, :length])

    def _await(self, rank: int, number: int) -> None:
        """Until the rank's flag is at `number`, or at the next one already."""
        words, flag = self._words, rank * _LINE_WORDS + _FLAG
        looks, until, sleep = 0, 0.0, _SLEEP_S[0]
        while words[flag] not in (number, number + 1):
            looks += 1
            if looks <= _SPINS:
                continue
            self._check()
            if looks <= _SPINS + _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            until = until or now + self._limit_s
            if now > until:
                raise RanksError(f"rank {rank} did not come to gather {self._gathers} within {self._limit_s:g} s")
            time.sleep(sleep)
            sleep = min(2 * sleep, _SLEEP_S[1])
        self._check()
        self._fence()

    def _check(self) -> None:
        if self._aborted is not None:
            raise RanksError(self._aborted)
        for rank in range(self.ranks):
            if self._words[rank * _LINE_WORDS + _ABORT]:
                raise RanksError(f"rank {rank} has ended the gathers")

    def _fence(self) -> None:
        """No load or store after it is performed before one ahead of it. See the module's text."""
        self._lock.release()
        self._lock.acquire()

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        self._words[self.rank * _LINE_WORDS + _ABORT] = 1

    def close(self) -> None:
        """The memory goes with this object; a gather in another thread may still look at it until then."""
        self._aborted = self._aborted or "the wire is closed"


def _shared_memory(control: Control, size: int) -> mmap.mmap:
    """The same zeroed memory on every rank; its last bytes are a token by which the others know it."""
    if control.rank == 0:
        token = secrets.token_bytes(_TOKEN_BYTES)
        file = os.memfd_create("tfglm-ranks")
        try:
            os.ftruncate(file, size)
            memory = mmap.mmap(file, size)
            memory[size - _TOKEN_BYTES :] = token
            control.post("shared", token + f"/proc/{os.getpid()}/fd/{file}".encode())
            control.meet("shared memory", _OPEN_S)
        finally:
            os.close(file)
        return memory
    posted = control.read("shared", _OPEN_S)
    token, path = posted[:_TOKEN_BYTES], posted[_TOKEN_BYTES:].decode()
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != size:
                raise OSError(f"{path} has {os.fstat(file).st_size} bytes, not {size}")
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        if memory[size - _TOKEN_BYTES :] != token:
            raise OSError(f"{path} is something else")
    except (OSError, ValueError) as error:
        what = f"rank {control.rank} cannot share memory with rank 0, which takes one host and one user: {error}"
        control.fail(RanksError(what))
        control.check()
        raise
    control.meet("shared memory", _OPEN_S)
    return memory
