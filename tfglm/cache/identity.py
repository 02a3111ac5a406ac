"""What a stored page depends on besides its text: the checkpoint, and whatever else decides a cached row's bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_SAMPLE_BYTES = 1 << 16


def identity(checkpoint: Path, facts: Mapping[str, object]) -> bytes:
    """32 bytes that differ for another checkpoint or other facts.

    A checkpoint is told by config.json and, of every weight file, name, size, time of change, first and last 64 KiB:
    hashing it whole would take longer than reading most prompts anew.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps({name: str(value) for name, value in facts.items()}, sort_keys=True).encode())
    digest.update((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"{file.name}/{stat.st_size}/{stat.st_mtime_ns}/".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, stat.st_size - _SAMPLE_BYTES))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()
