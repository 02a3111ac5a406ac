"""Request bodies as they come: broken, huge, chunked, hostile. Never a 500, never a hung connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MODEL

from tfglm.server import intake
from tfglm.server.jsontext import BadJsonError, dump_bytes, dump_text, load_object

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
JSON = {"Content-Type": "application/json"}


async def send(api: Any, data: Any, path: str = CHAT, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    async with api.session.post(api.url + path, data=data, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def raw(api: Any, request: bytes) -> bytes:
    """The answer to bytes on a connection of their own, read until the server closes it."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        GOOD + b"x",
        GOOD[:-1],
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf" + GOOD,
        b'{"model": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[" * 100_000,
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"a": "\x00"}',
    ],
)
async def test_not_json(make_api, body):
    api = await make_api()
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        status, reply = await send(api, body, path)
        assert (status, reply["error"]["code"]) == (400, "invalid_json"), reply
    assert not api.engine.requests


async def test_whole_surrogate_pairs_are_text(make_api, tokenizer):
    api = await make_api()
    status, reply = await send(api, b'{"prompt": "\\ud83d\\ude42"}', "/tokenize")
    assert status == 200 and tokenizer.decode(reply["tokens"]) == "🙂"


async def test_content_types(make_api):
    api = await make_api()
    for kind in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
        assert (await send(api, GOOD, headers={"Content-Type": kind}))[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/octet-stream"):
        status, reply = await send(api, GOOD, headers={"Content-Type": kind})
        assert (status, reply["error"]["code"]) == (415, "unsupported_media_type")
    status, _ = await send(api, GOOD, headers={**JSON, "Content-Encoding": "gzip"})
    assert status == 415
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(GOOD)}\r\n\r\n"
    assert b"200 OK" in await raw(api, head.encode() + GOOD)


async def test_chunked_bodies_and_the_connection_after_them(make_api):
    api = await make_api()

    async def pieces() -> Any:
        for i in range(0, len(GOOD), 7):
            yield GOOD[i : i + 7]
            await asyncio.sleep(0)

    assert (await send(api, pieces()))[0] == 200
    body = b"".join(b"%x\r\n%s\r\n" % (len(GOOD[i : i + 9]), GOOD[i : i + 9]) for i in range(0, len(GOOD), 9))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await raw(api, head.encode() + body + b"0\r\n\r\n" + health)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_two_lengths_are_refused_and_the_connection_closed(make_api):
    """The classic of request smuggling."""
    api = await make_api()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    both = head + f"Content-Length: {len(GOOD)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await raw(api, both.encode() + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") or answer.startswith(b"HTTP/1.0 400")
    assert answer.count(b"HTTP/1.") == 1 and not api.engine.requests


async def test_what_is_no_http_leaves_no_traceback(make_api, caplog):
    """The client is told; the log of a server that anybody may knock at stays readable."""
    api = await make_api()
    packed = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    packed += "Connection: close\r\nContent-Length: 5\r\n\r\nabcde"
    for request, status in (
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 500 + b"\r\n", b"400"),
        (packed.encode(), b"415"),
    ):
        assert (await raw(api, request)).split()[1] == status
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_of_a_body(make_api, chunked):
    api = await make_api(body_mib=1)
    body = b" " * (1024 * 1024)

    async def pieces(data: bytes) -> Any:
        yield data

    for size, expected in ((0, 400), (1, 413)):
        data = body + b" " * size
        status, reply = await send(api, pieces(data) if chunked else data, "/tokenize")
        assert status == expected
    assert reply["error"]["type"] == reply["error"]["code"] == "request_too_large"
    assert "1 MiB" in reply["error"]["message"]


async def test_a_body_that_never_comes(make_api, monkeypatch):
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.05)
    api = await make_api()
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_body_for_a_route_that_is_not_there(make_api):
    api = await make_api()
    status, reply = await send(api, b"x" * 1_000_000, "/v1/embeddings")
    assert (status, reply["error"]["code"]) == (404, "not_found")
    assert (await send(api, GOOD))[0] == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES))
def test_json_survives_the_way_out_and_in(value):
    data = dump_bytes(value)
    assert load_object(data) == json.loads(data) == value
    assert len(dump_text(value).splitlines()) <= 1 or value == {}


@settings(max_examples=50, deadline=None)
@given(st.binary())
def test_any_bytes_are_an_object_or_an_error(data):
    try:
        assert isinstance(load_object(data), dict)
    except BadJsonError as error:
        assert str(error)
