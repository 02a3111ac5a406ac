"""Kept pages in files of one folder: what survives a restart. Bytes only, torch-free.

A file is a header and one page's bytes. It is written under a temporary name, brought to the disk, and only then given
its own, so that a crash at any moment loses the block being written and no other. A file that is cut short, altered or
another's fails its checks and is treated as absent; what is served has the right length, key and checksum.

Name: the page's key, then the first half of the key before it, in hexadecimal. The key is a hash over all tokens up to
the page's end, and over the identity of the model and of everything else that decides what a page holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tfglm.cache.leftovers import Leftovers
from tfglm.errors import ConfigError

log = logging.getLogger(__name__)

MAGIC, VERSION = b"TFGLMPG\0", 1
_HEADER = struct.Struct("<8sIIQ32s32s")
"""Magic, format version, CRC-32 of the payload, its bytes, key, identity; then the CRC-32 of all of that."""
_CHECK = struct.Struct("<I")
READERS = 8
AHEAD = 2 * READERS
"""Pages that are read before they are asked for."""
IN_MEMORY = AHEAD + 3
"""Pages in memory at most while they are on their way, to and from the disk."""
IN_MEMORY_FOLLOWING = IN_MEMORY + AHEAD
"""The same of a rank other than 0, where pages that wait to be written are copies."""
HEADER_BYTES = _HEADER.size + _CHECK.size
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{32})\.page")
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class _Entry:
    """One file. before: the first half of the key before its own."""

    name: str
    nbytes: int
    before: bytes


class PageStore:
    """Files of pages of `payload` bytes, of at most `limit` bytes in all, leaving `keep_free` bytes of the disk free;
    the least recently used that no other follows goes first, and before it the files in the folders `beside` this one,
    which count too. Any thread may call anything.

    identity: 32 bytes. Raises ConfigError for a folder that cannot be used or that another process uses.
    """

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        payload: int,
        *,
        limit: int,
        keep_free: int,
        beside: Sequence[Path] = (),
    ) -> None:
        self._folder, self._identity, self._payload = folder, identity, payload
        self._limit, self._keep_free = limit, keep_free
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._followers: Counter[bytes] = Counter()
        self._used = 0
        self._full = False
        self._latest = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner = _owned(folder / "lock")
            self._scan()
            self._leftovers = Leftovers(beside)
        except OSError as error:
            raise ConfigError(f"--disk-cache: {folder} cannot be used: {error.strerror}") from None

    @property
    def used(self) -> int:
        """Bytes of all files in its folder."""
        return self._used

    @property
    def takes_more(self) -> bool:
        """Whether there is room for a page, were it that of all others."""
        with self._lock:
            return self._can_fit(HEADER_BYTES + self._payload)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def close(self) -> None:
        """Let another process have the folder."""
        self._owner.close()

    def touch(self, keys: Sequence[bytes]) -> None:
        """A text whose pages these are was used."""
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                self._entries.move_to_end(key)
            with contextlib.suppress(OSError):
                os.utime(self._folder / entry.name, ns=self._now())

    def read(self, key: bytes) -> bytearray | None:
        """The page of a key; None, with a warning, if its file is not what was written."""
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            return None
        path = self._folder / entry.name
        try:
            page, wrong = self._read(path, key)
        except OSError as error:
            page, wrong = None, error.strerror or "unreadable"
        if page is None:
            log.warning("W_DISK_CACHE: %s is skipped: %s", path, wrong)
            with self._lock:
                self._forget(key)
            with contextlib.suppress(OSError):
                path.unlink()
        return page

    def write(self, key: bytes, before: bytes, page: bytes | bytearray | memoryview) -> bool:
        """Store a page that follows the page `before`; False if there is no room. Raises OSError."""
        assert len(page) == self._payload
        nbytes = HEADER_BYTES + self._payload
        with self._lock:
            if key in self._entries:
                return True
            if not self._make_room(nbytes, before[:16]):
                return False
        name = f"{key.hex()}-{before[:16].hex()}.page"
        temporary = self._folder / f"{name}{_TEMPORARY}"
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file, self._header(key, page))
                _write_all(file, page)
                os.utime(file.fileno(), ns=self._now())
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            temporary.replace(self._folder / name)
            _sync_folder(self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        with self._lock:
            self._add(key, _Entry(name, nbytes, before[:16]))
        return True

    def _header(self, key: bytes, page: bytes | bytearray | memoryview) -> bytes:
        fields = _HEADER.pack(MAGIC, VERSION, zlib.crc32(page), len(page), key, self._identity)
        return fields + _CHECK.pack(zlib.crc32(fields))

    def _read(self, path: Path, key: bytes) -> tuple[bytearray | None, str]:
        """The page, or None and what is wrong with the file."""
        size = HEADER_BYTES + self._payload
        with path.open("rb", buffering=0) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                return None, f"it has {found} bytes, not {size}"
            header, page = bytearray(HEADER_BYTES), bytearray(self._payload)
            _read_all(file, header)
            _read_all(file, page)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        fields = bytes(header[: _HEADER.size])
        if _CHECK.unpack_from(header, _HEADER.size)[0] != zlib.crc32(fields):
            return None, "its header is damaged"
        magic, version, crc, _, its_key, identity = _HEADER.unpack(fields)
        if (magic, version) != (MAGIC, VERSION):
            return None, f"it is of format {version}, not {VERSION}"
        if (its_key, identity) != (key, self._identity):
            return None, "it is a page of another text or model"
        if crc != zlib.crc32(page):
            return None, "its page is damaged"
        return page, ""

    def _now(self) -> tuple[int, int]:
        """A time for a file, later than any before: the file system's own clock is too coarse to order uses by."""
        with self._lock:
            self._latest = max(time.time_ns(), self._latest + 1)
            return self._latest, self._latest

    # ---- the index; the lock is held

    def _scan(self) -> None:
        """Find what is there, oldest first, and remove what a crash left unfinished."""
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                if file.name.endswith(".page" + _TEMPORARY):
                    Path(file.path).unlink()
                elif match := _NAME.fullmatch(file.name):
                    stat = file.stat()
                    found.append((stat.st_mtime_ns, file.name, stat.st_size, match))
        for _, name, nbytes, match in sorted(found, key=lambda item: item[:2]):
            self._add(bytes.fromhex(match[1]), _Entry(name, nbytes, bytes.fromhex(match[2])))

    def _add(self, key: bytes, entry: _Entry) -> None:
        if key in self._entries:
            return
        self._entries[key] = entry
        self._used += entry.nbytes
        self._followers[entry.before] += 1

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._used -= entry.nbytes
        self._followers[entry.before] -= 1
        if not self._followers[entry.before]:
            del self._followers[entry.before]

    def _make_room(self, nbytes: int, spare: bytes) -> bool:
        """Whether a file of `nbytes` bytes fits, after removing what has to go but the page it follows."""
        if not self._can_fit(nbytes, spare):
            return self._refuse()
        while self._used + self._leftovers.used + nbytes > self._limit or self._free() - nbytes < self._keep_free:
            if self._leftovers.drop():
                continue
            victim = next((key for key in self._entries if key[:16] not in self._followers and key[:16] != spare), None)
            if victim is None:
                return self._refuse()
            path = self._folder / self._entries[victim].name
            self._forget(victim)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._full = False
        return True

    def _can_fit(self, nbytes: int, spare: bytes = b"") -> bool:
        """Whether a file of `nbytes` bytes would fit if all others but the spare one went. Otherwise none should: pages
        that are there are of more use than none."""
        left = sum(entry.nbytes for key, entry in self._entries.items() if key[:16] == spare)
        freed = self._used + self._leftovers.used - left
        return left + nbytes <= self._limit and self._free() + freed - nbytes >= self._keep_free

    def _refuse(self) -> bool:
        if not self._full:
            log.warning(
                "W_DISK_CACHE: no room in %s: %.1f GiB are free there, %.1f must stay so by --disk-keep-free-gib, and "
                "--disk-cache-gib is %.1f; what is there is still read",
                self._folder,
                self._free() / 2**30,
                self._keep_free / 2**30,
                self._limit / 2**30,
            )
        self._full = True
        return False

    def _free(self) -> int:
        stat = os.statvfs(self._folder)
        return stat.f_bavail * stat.f_frsize


def _owned(path: Path) -> BinaryIO:
    """The lock file of a folder, held. Raises ConfigError if another process holds it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"--disk-cache: another server uses {path.parent}; give each one its own folder") from None
    return file


def _write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _read_all(file: BinaryIO, into: bytearray) -> None:
    """Fill `into`. Raises OSError if the file ends before."""
    left = memoryview(into)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise OSError(0, "it ends early")
        left = left[count:]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
