"""The output folder of a quantisation: files that are whole or absent, and a manifest of those that are done.

A file is written under a temporary name, flushed to the disk and renamed; then the manifest, likewise, gains its hash.
Whatever moment the process is killed at, the next run finds layers that are done and at most one temporary file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tfglm.checkpoint.safetensors import build_header, read_header
from tfglm.checkpoint.store import TORCH_DTYPES
from tfglm.errors import CheckpointError, ConfigError

MANIFEST_FILE = "quantize.json"
_TEMPORARY = ".part"
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass
class Manifest:
    """job: hash of all that decides the output. files: sha256 and bytes of each finished file. reports: figures of each
    quantised layer, by its number."""

    folder: Path
    job: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, job: str) -> Manifest:
        """The manifest of an earlier run of the same job, or an empty one in a new or empty folder.

        Temporary files that a killed run left are removed.

        Raises CheckpointError for a folder that holds something else.
        """
        path = folder / MANIFEST_FILE
        if not path.exists():
            if folder.exists() and any(not _is_temporary(entry) for entry in folder.iterdir()):
                raise CheckpointError(f"{folder} is not empty and holds no {MANIFEST_FILE}; choose another folder")
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, job)
        for entry in folder.iterdir():
            if _is_temporary(entry):
                entry.unlink()
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["job"] != job:
            raise ConfigError(
                f"{folder} holds a quantisation of another source, recipe, calibration or version of this program; "
                "choose another folder, or delete this one"
            )
        return cls(folder, job, found["files"], found["reports"])

    def done(self, name: str) -> bool:
        """Whether a file was finished by an earlier run and still is what it was."""
        known, path = self.files.get(name), self.folder / name
        return known is not None and path.exists() and sha256(path) == known["sha256"]

    def add(self, name: str, report: dict[str, Any] | None = None, layer: int | None = None) -> None:
        """Note that a file is finished, with its layer's figures."""
        path = self.folder / name
        self.files[name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
        if report is not None:
            self.reports[str(layer)] = report
        write_json(self.folder / MANIFEST_FILE, {"job": self.job, "files": self.files, "reports": self.reports})


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file of CPU tensors, whole or not at all. Wider dtypes first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = build_header({name: (_DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in ordered})
    write_whole(path, [header, *(_bytes(tensors[name]) for name in ordered)])


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file."""
    tensors = {}
    with path.open("rb") as file:
        for entry in read_header(file.fileno(), path):
            data = torch.empty(entry.nbytes, dtype=torch.uint8)
            file.seek(entry.offset)
            file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
            tensors[entry.name] = data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
    return tensors


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_whole(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file so that its name never stands for half of it, and survives a power cut once this returns."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("wb") as out:
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def header_names(path: Path) -> list[str]:
    """The tensors of a safetensors file."""
    with path.open("rb") as file:
        return [entry.name for entry in read_header(file.fileno(), path)]


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _is_temporary(path: Path) -> bool:
    return path.name.endswith(_TEMPORARY)
