"""What an installation consists of, by content: the same sources have the same name on every machine and day."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SOURCES = ("tfglm", "patches", "pyproject.toml", "README.md", "LICENSE")
"""What is installed on machines and copied into images, below the project's folder."""
_NOT_SOURCES = (".pyc", ".orig", ".rej", "~")


def source_files(root: Path, names: Iterable[str] = SOURCES) -> list[str]:
    """Files below `root`, in the order of their names' bytes."""
    found = []
    for name in names:
        path = root / name
        paths = path.rglob("*") if path.is_dir() else [path] if path.is_file() else []
        found += [p.relative_to(root).as_posix() for p in paths if p.is_file()]
    return sorted((name for name in found if not name.endswith(_NOT_SOURCES)), key=str.encode)


def content_hash(root: Path, files: Iterable[str], more: str = "") -> str:
    """12 hex digits over names, contents and whether a file may be run; `more` is text that belongs to them."""
    known = hashlib.sha256(json.dumps(more).encode())
    for name in files:
        data = (root / name).read_bytes()
        runs = bool((root / name).stat().st_mode & 0o100)
        known.update(json.dumps([name, runs, hashlib.sha256(data).hexdigest()]).encode())
    return known.hexdigest()[:12]


def pack(root: Path, files: Iterable[str], archive: Path) -> None:
    """A .tar.gz of `files` whose bytes depend on their contents alone, written under another name first."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    written = archive.with_suffix(".new")
    with (
        written.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in files:
            data = root / name
            entry = tarfile.TarInfo(name)
            entry.size = data.stat().st_size
            entry.mode = 0o755 if data.stat().st_mode & 0o100 else 0o644
            with data.open("rb") as content:
                tar.addfile(entry, content)
    written.replace(archive)


def image_identity(inspected: Mapping[str, Any]) -> str:
    """12 hex digits of what an image is, from `docker image inspect`. Its Id is no such thing: docker's stores
    compute it over different files, so that two machines give one image two of them."""
    config = inspected.get("Config") or {}
    parts = [config.get(name) for name in ("Env", "Entrypoint", "Cmd", "WorkingDir")]
    layers = (inspected.get("RootFS") or {}).get("Layers")
    return hashlib.sha256(json.dumps([layers, *parts]).encode()).hexdigest()[:12]
