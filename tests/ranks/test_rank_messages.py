"""Frames: what goes in comes out, whole or in crumbs; what is none, or too large, is refused before it is stored."""

import contextlib
import json
import random
import struct

import pytest

from tfglm.ranks.messages import RANK, STRANGER, Array, Frame, FrameError, Limits, Reader, encode

FRAME = Frame(
    "work",
    {"number": 3, "text": "naïve", "nested": {"b": [1, 2.5], "a": None}, "odd": float("inf")},
    (
        Array("ids", "int64", (2,), bytes(range(16))),
        Array("none", "float32", (0, 4), b""),
        Array("x", "bool", (), b"\1"),
    ),
)


def packed(header: object, body: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">4sIQ", b"TFR1", len(head), len(body)) + head + body


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_frames_come_out_as_they_went_in(step: int) -> None:
    data = encode(FRAME) + encode(Frame("beat")) + encode(FRAME)
    reader = Reader(RANK)
    frames = [frame for at in range(0, len(data), step) for frame in reader.feed(data[at : at + step])]
    assert frames == [FRAME, Frame("beat"), FRAME]


def test_equal_frames_give_equal_bytes() -> None:
    assert encode(Frame("a", {"x": 1, "y": 2})) == encode(Frame("a", {"y": 2, "x": 1}))
    assert encode(FRAME) == encode(Reader(RANK).feed(encode(FRAME))[0])


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\n", b"TFR2", b"\0", b"TFR1"[::-1]])
def test_what_does_not_begin_like_a_frame_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(FrameError, match="not a frame of tfglm"):
        Reader(STRANGER).feed(data)


@pytest.mark.parametrize(("header", "body"), [(1 << 31, 0), (2, 1 << 62), (STRANGER.header + 1, 0), (2, 1)])
def test_a_frame_that_is_too_large_is_refused_by_its_first_bytes(header: int, body: int) -> None:
    with pytest.raises(FrameError, match=r"of \d+ bytes; at most \d+ are accepted"):
        Reader(STRANGER).feed(struct.pack(">4sIQ", b"TFR1", header, body))


def test_a_frame_at_its_limits_is_accepted() -> None:
    data = encode(FRAME)
    _, header, body = struct.unpack_from(">4sIQ", data)
    assert Reader(Limits(header, body)).feed(data) == [FRAME]
    with pytest.raises(FrameError, match="header"):
        Reader(Limits(header - 1, body)).feed(data)
    with pytest.raises(FrameError, match="body"):
        Reader(Limits(header, body - 1)).feed(data)


@pytest.mark.parametrize(
    "data",
    [
        packed([]),
        packed({"kind": "a", "facts": {}}),
        packed({"kind": 1, "facts": {}, "arrays": []}),
        packed({"kind": "a", "facts": [], "arrays": []}),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "object", [1]]]}, b"12345678"),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "int8", [-1]]]}),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "int8", [-2, -2]]]}, b"1234"),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "int64", [1]]]}, b"1234567"),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "int8", ["a"]]]}, b"1"),
        packed({"kind": "a", "facts": {}, "arrays": []}, b"1"),
        packed({"kind": "a", "facts": {}, "arrays": [["x", "int8", [1 << 80]]]}, b"1"),
        struct.pack(">4sIQ", b"TFR1", 3, 0) + b"\xff\xfe{",
        struct.pack(">4sIQ", b"TFR1", 40000, 0) + b"[" * 40000,
    ],
)
def test_a_header_that_cannot_be_meant_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        Reader(Limits(1 << 20, 1 << 20)).feed(data)


def test_no_bytes_whatever_raise_anything_else() -> None:
    generator = random.Random(11)
    good = encode(FRAME)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        reader = Reader(Limits(1 << 16, 1 << 16))
        with contextlib.suppress(FrameError):
            reader.feed(bytes(data))
