"""What a rank says of itself when the ranks meet, as far as every rank of tfglm has it in common."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tfglm

_ROOT = Path(tfglm.__file__).parent


def code_facts() -> dict[str, str]:
    """version; code: hash of the Python files; kernels: hash of the CUDA sources. Equal files give equal hashes."""
    return {
        "version": tfglm.__version__,
        "code": _hash([*_ROOT.rglob("*.py")]),
        "kernels": _hash([*_ROOT.rglob("*.cu"), *_ROOT.rglob("*.cuh")]),
    }


def _hash(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        total.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()[:16]
