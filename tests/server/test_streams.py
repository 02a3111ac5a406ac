"""What happens to a stream over time: silence, clients that leave, clients that do not read, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, ClientError, web
from scripted import MODEL, finished

from tfglm.engine.api import Delta, Progress, Started, TokenLogprob
from tfglm.server import stream

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def until(check: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def open_stream(api: Any, **fields: Any) -> Any:
    return api.session.post(api.url + "/v1/chat/completions", json={**BODY, "stream": True, **fields})


async def test_headers_and_role_come_at_admission(make_api, gate):
    api = await make_api([gate, finished()])
    async with open_stream(api) as response:
        assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
        first = await response.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        gate.set()


async def test_silence_is_filled_with_comments(make_api, gate):
    api = await make_api([gate, Delta("answer", "x", (300,)), finished()], keepalive_s=0.1)
    async with open_stream(api) as response:
        await response.content.readuntil(b"\n\n")
        for _ in range(5):
            assert await response.content.readuntil(b"\n\n") == b": keepalive\n\n"
        gate.set()
        rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"content":"x"' in rest


async def test_progress_that_the_client_does_not_see_is_silence(make_api):
    progress = [step for i in range(60) for step in (Progress(i, 60), 0.02)]
    api = await make_api([Started(1.0), *progress, finished()], keepalive_s=0.1)
    async with open_stream(api) as response:
        assert (await response.read()).count(b": keepalive\n\n") >= 4


async def test_no_comments_when_turned_off(make_api):
    api = await make_api([Started(1.0), 0.3, finished()], keepalive_s=0)
    async with open_stream(api) as response:
        assert b"keepalive" not in await response.read()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("said", [[], [Started(1.0), Progress(4, 9)], [Started(1.0), Delta("answer", "x", (300,))]])
async def test_leaving_cancels(make_api, gate, streamed, said):
    api = await make_api([*said, gate, finished()])
    sent = asyncio.ensure_future(api.session.post(api.url + "/v1/chat/completions", json={**BODY, "stream": streamed}))
    assert await until(lambda: api.engine.requests)
    if streamed:
        (await sent).close()
    else:
        sent.cancel()
    (cancelled,) = api.engine.cancelled.values()
    assert await until(cancelled.is_set)
    assert await until(lambda: not api.state.live)
    async with api.session.get(api.url + "/metrics") as response:
        assert f'tfglm:client_disconnections_total{{model_name="{MODEL}"}} 1.0' in await response.text()


async def test_leaving_before_the_first_byte_is_no_mistake_of_the_server(make_api, monkeypatch, caplog):
    api = await make_api()

    async def gone(self: Any, request: Any) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "prepare", gone)
    with pytest.raises(ClientError):
        await open_stream(api)
    assert await until(lambda: not api.state.live)
    (cancelled,) = api.engine.cancelled.values()
    assert await until(cancelled.is_set)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_finished_reply_cancels_nothing(make_api):
    api = await make_api()
    for streamed in (True, False):
        async with open_stream(api, stream=streamed) as response:
            await response.read()
    assert len(api.engine.cancelled) == 2
    assert not any(event.is_set() for event in api.engine.cancelled.values())


async def test_a_client_that_does_not_read_is_dropped(make_api, gate, monkeypatch):
    """More text than the sockets hold, none of it read: the engine is never held up and the request ends."""
    monkeypatch.setattr(stream, "WRITE_SECONDS", 0.3)
    flood = [Delta("answer", "x" * 1_000_000, (300,)) for _ in range(30)]
    api = await make_api([*flood, gate, finished()])
    host, port = api.url.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        assert await until(lambda: api.engine.generation_tokens == 30)
        (cancelled,) = api.engine.cancelled.values()
        assert await until(cancelled.is_set)
        assert (await api.get("/health"))[0] == 200
        # Gone although nothing was read; what is left is the connection of the health check.
        assert await until(lambda: api.connections() == 1)
        await asyncio.to_thread(read_to_the_end, client)
    assert await until(lambda: not api.state.live)


def read_to_the_end(client: socket.socket) -> None:
    """Returns once the connection is gone; a connection that stays open is a TimeoutError."""
    client.settimeout(10)
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass


async def test_many_streams_at_once(make_api):
    script = [
        Started(1.0),
        *[step for i in range(20) for step in (Delta("answer", f"{i} ", (300 + i,)), 0.001)],
        finished(),
    ]
    api = await make_api(script)
    replies = await asyncio.gather(*[api.chat_stream() for _ in range(20)])
    for lines in replies:
        texts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
        assert "".join(texts) == "".join(f"{i} " for i in range(20))


async def test_what_the_drain_ends_is_told(make_api, gate):
    api = await make_api([Started(1.0), Delta("answer", "x", (300,)), gate, finished()])
    whole = asyncio.ensure_future(api.chat())
    async with open_stream(api) as response:
        assert await until(lambda: len(api.state.live) == 2)
        for generation in list(api.state.live):
            generation.fail("draining", "the server is shutting down")
        *_, error, done, end = (await response.read()).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "draining"
    status, body = await whole
    assert (status, body["error"]["code"]) == (503, "draining")
    assert all(event.is_set() for event in api.engine.cancelled.values())


async def test_a_mistake_of_ours_after_the_headers_is_an_error_event(make_api):
    unknown = Delta("answer", "x", (10**9,), (TokenLogprob(10**9, -1.0),))
    api = await make_api([Started(1.0), unknown, finished()])
    async with open_stream(api, logprobs=True) as response:
        text = await response.text()
    assert response.status == 200 and "HTTP/1.1" not in text
    *_, error, done = [line for line in text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == "data: [DONE]"
    async with open_stream(api) as response:
        assert response.status == 200


async def test_a_logprob_of_minus_infinity_is_a_number_in_json(make_api):
    token = Delta("answer", "x", (300,), (TokenLogprob(300, float("-inf"), ((300, float("-inf")),)),))
    api = await make_api([Started(1.0), token, finished()])
    async with api.session.post(
        api.url + "/v1/chat/completions", json={**BODY, "logprobs": True, "top_logprobs": 1}
    ) as response:
        [entry] = json.loads(await response.text(), parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
