"""Pages that other numbers of ranks have left on a disk. Nobody reads them now, so they are the first to go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_RANK = re.compile(r"rank\d+of(\d+)")


def rank_folder(parent: Path, rank: int, ranks: int) -> Path:
    """Where a rank keeps its part of every page."""
    return parent / f"rank{rank}of{ranks}"


def other_folders(parent: Path, ranks: int) -> list[Path]:
    """The folders of ranks of another number, but for those that a server uses at the moment."""
    if not parent.is_dir():
        return []
    found = ((_RANK.fullmatch(folder.name), folder) for folder in sorted(parent.iterdir()))
    return [folder for match, folder in found if match and int(match[1]) != ranks and not _in_use(folder)]


def _in_use(folder: Path) -> bool:
    try:
        with (folder / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # or nothing that this process may change
    return False


class Leftovers:
    """The files of pages in some folders. used: their bytes."""

    def __init__(self, folders: Sequence[Path]) -> None:
        found = []
        for folder in folders:
            with os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith((".page", ".page.tmp")):
                        stat = file.stat()
                        found.append((stat.st_mtime_ns, file.path, stat.st_size))
        self._files = deque((Path(path), nbytes) for _, path, nbytes in sorted(found))
        self.used = sum(nbytes for _, nbytes in self._files)

    def drop(self) -> bool:
        """Remove the oldest file; False if there is none. One that cannot be removed, or that a server has come to use
        since, is not counted any more."""
        if not self._files:
            return False
        path, nbytes = self._files.popleft()
        self.used -= nbytes
        if not _in_use(path.parent):
            with contextlib.suppress(OSError):
                path.unlink()
        return True
