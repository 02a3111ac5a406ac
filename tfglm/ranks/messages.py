"""What travels between two ranks: frames of a JSON header and raw bytes. Plain data only; nothing in it is executed.

A frame on the wire, big-endian:

    4 bytes  magic "TFR1"
    4 bytes  length of the header
    8 bytes  length of the body
    header   JSON: {"kind": str, "facts": {...}, "arrays": [[name, dtype, shape], ...]}
    body     the arrays' bytes, one after the other, C order, little-endian

The magic stays as it is when the messages change; the first frame of a connection carries the protocol's number.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Raised with every change of what the messages mean; ranks of different numbers refuse each other.
PROTOCOL = 2

_MAGIC = b"TFR1"
_HEAD = struct.Struct(">4sIQ")

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


class FrameError(ValueError):
    """The bytes are no frame, or one that is larger than what is accepted."""


@dataclass(frozen=True)
class Limits:
    """The largest header and body that are accepted, in bytes. Checked before anything is allocated."""

    header: int
    body: int


# Nobody has said yet who he is.
STRANGER = Limits(header=1 << 16, body=0)
# A prompt chunk's tokens and page numbers are some 100 KiB; this is room for whatever else rank 0 may hand out.
RANK = Limits(header=16 << 20, body=1 << 30)


@dataclass(frozen=True)
class Array:
    """A named array: dtype as in ITEM_BYTES, data of prod(shape) items."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    """One message: its kind, JSON values, arrays; of one that was received, all of the bytes it came as."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[Array, ...] = ()
    received: bytes = field(default=b"", compare=False, repr=False)


def encode(frame: Frame) -> bytearray:
    """The bytes of a frame. Equal frames give equal bytes: facts are sorted by name."""
    arrays = [[array.name, array.dtype, list(array.shape)] for array in frame.arrays]
    header = {"kind": frame.kind, "facts": dict(frame.facts), "arrays": arrays}
    head = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    body = sum(len(array.data) for array in frame.arrays)
    return bytearray().join([_HEAD.pack(_MAGIC, len(head), body), head, *(array.data for array in frame.arrays)])


class Reader:
    """Turns a stream of bytes into frames. `limits` may be widened once the other side has said who it is."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError as soon as what came cannot be a frame."""
        self._buffer += data
        frames = []
        while (size := self._size()) is not None and len(self._buffer) >= size:
            _, header, _ = _HEAD.unpack_from(self._buffer)
            frames.append(_decode(bytes(memoryview(self._buffer)[:size]), header))
            del self._buffer[:size]
        return frames

    def _size(self) -> int | None:
        """Bytes of the frame that the buffer begins with; None until its first 16 bytes are there."""
        if not self._buffer.startswith(_MAGIC[: len(self._buffer)]):
            raise FrameError(f"not a frame of tfglm: it begins with {bytes(self._buffer[:16])!r}")
        if len(self._buffer) < _HEAD.size:
            return None
        _, header, body = _HEAD.unpack_from(self._buffer)
        for name, size, limit in (("header", header, self.limits.header), ("body", body, self.limits.body)):
            if size > limit:
                raise FrameError(f"a frame's {name} of {size} bytes; at most {limit} are accepted")
        return _HEAD.size + header + body


def _decode(data: bytes, header_bytes: int) -> Frame:
    """Of a frame's bytes, of which its arrays become views."""
    at = _HEAD.size + header_bytes
    try:
        header = json.loads(data[_HEAD.size : at])
        kind, facts = header["kind"], header["facts"]
        described = [(str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in header["arrays"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"a frame's header cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise FrameError(f"a frame's header must hold a kind and facts; it holds {kind!r} and {type(facts).__name__}")
    arrays, body = [], memoryview(data)[at:]
    at = 0
    for name, dtype, shape in described:
        if dtype not in ITEM_BYTES or any(n < 0 for n in shape):
            raise FrameError(f"array {name!r} of a frame {kind!r} is {dtype} {list(shape)}")
        size = ITEM_BYTES[dtype] * math.prod(shape)
        arrays.append(Array(name, dtype, shape, body[at : at + size]))
        at += size
    if at != len(body):
        raise FrameError(f"the arrays of a frame {kind!r} need {at} bytes; {len(body)} came")
    return Frame(kind, facts, tuple(arrays), data)
