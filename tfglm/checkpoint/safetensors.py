"""The safetensors file format: 8 bytes little-endian header length, a JSON header, the tensors' bytes without gaps.

Format: https://huggingface.co/docs/safetensors (data_offsets count from the end of the header). Torch-free.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfglm.checkpoint.jsonfile import parse_object, shown
from tfglm.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes an element, by the format's name of the dtype."""

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# The format has no bounds on these; any will do that keeps a product of sizes short enough for a message.
_MAX_SIZE = 1 << 80
_MAX_DIMENSIONS = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes of row-major little-endian data at byte `offset` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(fd: int, file: Path) -> list[TensorEntry]:
    """The tensors of the open file, by offset. Raises CheckpointError unless header and file size agree exactly."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{file} is no whole safetensors file: {size} bytes, with a header of {length} announced")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: the header is {length} bytes; at most {_MAX_HEADER_BYTES} are allowed")
    header = parse_object(os.pread(fd, length, 8), f"{file} (header)", CheckpointError)
    header.pop("__metadata__", None)
    start = 8 + length
    entries = [_entry(name, fields, file, start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_ranges(entries, file, start, size)
    return entries


def _entry(name: str, fields: Any, file: Path, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sizes = (*shape, begin, end)
        if not isinstance(dtype, str) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError
        if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in sizes):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{file}: tensor {name} is described by {shown(fields)}; "
            "dtype, shape and data_offsets [begin, end] are needed"
        ) from None
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {shown(dtype)}; known: {', '.join(ITEM_BYTES)}")
    entry = TensorEntry(name, file, dtype, shape, start + begin)
    if entry.nbytes != end - begin:
        raise CheckpointError(
            f"{file}: tensor {name}, {dtype} {list(shape)}, needs {entry.nbytes} bytes; "
            f"data_offsets [{begin}, {end}] give {end - begin}"
        )
    return entry


def _check_ranges(entries: list[TensorEntry], file: Path, start: int, size: int) -> None:
    """Tensors must follow each other from `start` to the end of the file: no overlap, no gap, nothing cut off."""
    expected = start
    for entry in entries:
        if entry.offset != expected:
            word = "overlaps the tensor before it" if entry.offset < expected else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {entry.name} {word} (byte {entry.offset}, expected {expected})")
        expected += entry.nbytes
        if expected > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {entry.name} ends at byte {expected}, the file at {size}; copy it again"
            )
    if expected != size:
        raise CheckpointError(
            f"{file} has {size - expected} bytes after its last tensor (ends at {expected} of {size})"
        )


def build_header(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Length and header of a file that holds tensors (dtype, shape) in this order, padded to align the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
