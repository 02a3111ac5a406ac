"""A small OpenAI-compatible server on a thread, whose replies a function makes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Body = dict[str, Any]


@dataclass
class Say:
    """A reply. `calls` are (name, arguments as text). `cut` ends it at the limit."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    cut: bool = False

    @property
    def finish(self) -> str:
        return "length" if self.cut else "tool_calls" if self.calls else "stop"


class Fake:
    """`reply` may raise web.HTTPException, or return a response of its own instead of a Say."""

    def __init__(self, reply: Callable[[Body], Say | web.Response], *, tokenizes: bool = False) -> None:
        self.reply, self.tokenizes = reply, tokenizes
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []

    def count(self, body: Body) -> int:
        """A word is a token; eleven more for the frame."""
        return 11 + sum(len(str(message["content"]).split()) for message in body["messages"])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        said = self.reply(body)
        if not isinstance(said, Say):
            return said
        usage = {"prompt_tokens": self.count(body), "completion_tokens": 7}
        if body.get("stream"):
            return await self.stream(request, said, usage)
        calls = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(said.calls)
        ]
        message = {"role": "assistant", "content": said.content or None, "reasoning_content": said.reasoning or None}
        if calls:
            message["tool_calls"] = calls
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": said.finish}],
                                  "usage": usage})  # fmt: skip

    async def stream(self, request: web.Request, said: Say, usage: Body) -> web.StreamResponse:
        """Three characters a delta, seven bytes a write, so that neither lines nor code points arrive whole."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[Body] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": piece} for piece in pieces(said.reasoning)]
        deltas += [{"content": piece} for piece in pieces(said.content)]
        for n, (name, arguments) in enumerate(said.calls):
            deltas.append(
                {"tool_calls": [{"index": n, "id": f"call_{n}", "function": {"name": name, "arguments": ""}}]}
            )
            deltas += [{"tool_calls": [{"index": n, "function": {"arguments": p}}]} for p in pieces(arguments)]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": said.finish}]})
        chunks.append({"choices": [], "usage": usage})
        told = ": keep-alive\n\n" + "".join(f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in chunks)
        raw = (told + "data: [DONE]\n\n").encode()
        for at in range(0, len(raw), 7):
            await response.write(raw[at : at + 7])
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.count(await request.json())})


def pieces(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


@contextmanager
def served(fake: Fake) -> Iterator[str]:
    """The fake on a thread of its own, at the yielded address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", fake.chat)
        app.router.add_get("/v1/models", fake.models)
        if fake.tokenizes:
            app.router.add_post("/tokenize", fake.tokenize)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
