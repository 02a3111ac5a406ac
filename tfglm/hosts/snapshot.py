"""Files of a checkpoint folder: that they are all there, the same on every machine, and what their names say they are.

A Hugging Face cache keeps a repository as `snapshots/<revision>/<file>`, links to `blobs/<hash>`: sha256 for large
files, git's sha1 for small ones. A blob may itself be a link to a place that all repositories share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_HEAD_BYTES = 65536
_CHUNK = 1 << 24
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class File:
    """name: below the folder. size: -1 where the content cannot be read. head: sha256 of the first 64 KiB, which a
    server that shows names but not contents, or an older copy, does not give."""

    name: str
    size: int
    head: str


def manifest(folder: Path) -> list[File]:
    """Every file below `folder`, links followed, in the order of their names' bytes."""
    found = []
    for below, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(below) / name
            try:
                with path.open("rb") as file:
                    head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
                    size = os.fstat(file.fileno()).st_size
            except OSError:
                size, head = -1, ""
            found.append(File(path.relative_to(folder).as_posix(), size, head))
    return sorted(found, key=lambda file: file.name.encode())


def digest(files: Iterable[File]) -> str:
    """16 hex digits over a manifest."""
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()[:16]


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `theirs` has otherwise than `ours`, both manifests as JSON."""
    mine, other = ({file["name"]: file for file in files} for files in (ours, theirs))
    said = []
    for name in sorted(mine.keys() | other.keys()):
        if name not in other:
            said.append(f"{name} is missing")
        elif name not in mine:
            said.append(f"{name} is there, which the head does not have")
        elif other[name]["size"] != mine[name]["size"]:
            size = other[name]["size"]
            said.append(f"{name} " + ("cannot be read" if size < 0 else f"has {size} bytes, not {mine[name]['size']}"))
        elif other[name]["head"] != mine[name]["head"]:
            said.append(f"{name} begins with other bytes")
    return said


def missing_files(folder: Path) -> list[str]:
    """What a checkpoint must have and `folder` lacks: config.json, and every shard that the index names."""
    wanted = {"config.json"}
    index = folder / _INDEX
    if index.exists():
        wanted |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    elif not (folder / "model.safetensors").exists():
        wanted.add(_INDEX)
    return sorted(name for name in wanted if not (folder / name).exists())


def outside(folder: Path, root: Path) -> list[str]:
    """Files whose content lies outside of `root`, which an export of `root` therefore does not give."""
    real = root.resolve()
    paths = (Path(below) / name for below, _, names in os.walk(folder, followlinks=True) for name in names)
    return [f"{path} is {path.resolve()}" for path in paths if not path.resolve().is_relative_to(real)]


def bytes_to_fetch(repository: Path, siblings: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of a revision that are not in the cache. siblings: the Hub's own list, {rfilename, size, blobId,
    lfs: {sha256}}; repository: `models--org--name` in the cache."""
    missing = 0
    for sibling in siblings:
        blob = repository / "blobs" / ((sibling.get("lfs") or {}).get("sha256") or sibling.get("blobId") or "-")
        size = sibling.get("size") or 0
        if not blob.exists() or blob.stat().st_size != size:
            missing += size
    return missing


def copy_from(source: Path, target: Path, *, write: bool = True) -> int:
    """Make `target` hold what `source` does, contents instead of links; returns the bytes to copy. A file that has the
    right size and head stays. Files that `source` lacks are left alone.

    Raises OSError with the bytes that are missing when the disk has no room.
    """
    here = {file.name: file for file in manifest(target)} if target.is_dir() else {}
    wanted = [file for file in manifest(source) if here.get(file.name) != file]
    needed = sum(max(0, file.size) for file in wanted)
    if not write or not wanted:
        return needed
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if free < needed:
        raise OSError(f"{target} needs {needed} bytes more; {free} are free")
    for file in wanted:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with (source / file.name).open("rb") as taken, partial.open("wb") as written:
            while chunk := taken.read(_CHUNK):
                written.write(chunk)
            written.flush()
            os.fsync(written.fileno())
            os.posix_fadvise(taken.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        partial.replace(path)
    return needed


def corrupt(folder: Path, remembered: Path | None = None) -> tuple[list[str], int]:
    """(Files whose content is not what their blob's name says, bytes read). Files that are no links into `blobs` have
    no such name, and are left out.

    remembered: a file that keeps what was found right, by size, time of change and inode, so that hundreds of
    gigabytes are read once; without it everything is read.
    """
    known = _remembered(remembered)
    wrong, read = [], 0
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        blob = path.parent / path.readlink()
        name = blob.name
        if blob.parent.name != "blobs" or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name):
            continue
        if not blob.exists():
            wrong.append(f"{path.name}: its blob {name} is missing")
            continue
        stats = blob.stat()
        seen = [stats.st_size, stats.st_mtime_ns, stats.st_ino]
        if known.get(str(blob)) == seen:
            continue
        read += stats.st_size
        if _hash(blob, name, stats.st_size) != name:
            wrong.append(f"{path.name}: its content does not have the hash {name}")
            known.pop(str(blob), None)
        else:
            known[str(blob)] = seen
    if remembered is not None and read:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        written = remembered.with_suffix(".new")
        written.write_text(json.dumps(known, indent=0, sort_keys=True))
        written.replace(remembered)
    return wrong, read


def _hash(blob: Path, name: str, size: int) -> str:
    known = hashlib.sha256() if len(name) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            known.update(chunk)
            # What has been hashed is not wanted again: on a Spark the page cache lies in the GPU's memory.
            os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
    return known.hexdigest()


def _remembered(path: Path | None) -> dict[str, list[int]]:
    try:
        return dict(json.loads(path.read_text())) if path is not None else {}
    except (OSError, ValueError):
        return {}


def as_json(files: Iterable[File]) -> list[dict[str, Any]]:
    return [asdict(file) for file in files]
