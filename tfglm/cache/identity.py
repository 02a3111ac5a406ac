"""What a stored page depends on besides its text: the checkpoint, and whatever else decides a cached row's bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_SAMPLE_BYTES = 1 << 16
_COMPUTES = ("cache", "checkpoint", "formats", "kernels", "layout.py", "models", "ops", "ranks")
"""Packages and modules whose sources decide a cached row's bits: also who has what of it, and who adds first."""


def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """Of all sources that compute or store a cached row. The version's number alone would let a kernel that was changed
    between two releases resume on rows of the one before."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _COMPUTES:
        path = package / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh"):
                digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def identity(checkpoint: Path, facts: Mapping[str, object]) -> bytes:
    """32 bytes that differ for another checkpoint or other facts; also for files that were written anew."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps({name: str(value) for name, value in facts.items()}, sort_keys=True).encode())
    digest.update(checkpoint_digest(checkpoint).encode())
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{file.name}/{file.stat().st_mtime_ns}/".encode())
    return digest.digest()


def checkpoint_digest(checkpoint: Path) -> str:
    """The same for copies of a checkpoint. It is told by config.json and, of every weight file, name, size, first and
    last 64 KiB: hashing it whole would take longer than reading most prompts anew."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
