"""A scripted engine and a small client: what the server's tests talk to and through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tfglm.engine.api import (
    ContextLengthError,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Snapshot,
    Started,
    Timings,
    Usage,
)
from tfglm.errors import TfglmError
from tfglm.server.state import ServerState

CONTEXT = 4096
MODEL = "tiny"

TIMINGS = Timings(queue_ms=1.0, prompt_ms=20.0, predicted_ms=30.0, first_token_ms=21.0)


def finished(
    reason: FinishReason = "stop",
    *,
    prompt: int = 7,
    tokens: int = 4,
    reasoning: int = 0,
    stop: str | int | None = None,
) -> Finished:
    return Finished(reason, stop, Usage(prompt, tokens, reasoning), TIMINGS)


@dataclass
class FakeEngine:
    """Plays `script` for every request, each on a thread of its own; an entry is an event or a pause.

    A float pauses; a threading.Event is waited for; cancel ends any pause and the reply. Requests whose ids are in
    `quick` end at once.
    """

    script: list[Event | float | threading.Event] = field(default_factory=lambda: [Started(1.0), finished()])
    refuse: TfglmError | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: dict[str, threading.Event] = field(default_factory=dict)
    live: int = 0
    state: Any = "ready"
    generation_tokens: int = 0
    quick: set[str] = field(default_factory=set)

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        if len(request.prompt) + request.max_tokens > CONTEXT:
            raise ContextLengthError("the server let a request through that does not fit")
        self.requests.append(request)
        self.cancelled[request.id] = threading.Event()
        self.live += 1
        threading.Thread(target=self._play, args=(request, on_event), daemon=True).start()

    def _play(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        cancelled = self.cancelled[request.id]
        try:
            for step in [finished()] if request.id in self.quick else self.script:
                if isinstance(step, float):
                    cancelled.wait(step)
                elif isinstance(step, threading.Event):
                    while not step.wait(0.01) and not cancelled.is_set():
                        pass
                if cancelled.is_set():
                    on_event(finished("cancelled"))
                    return
                if not isinstance(step, float | threading.Event):
                    if isinstance(step, Delta):
                        self.generation_tokens += len(step.token_ids)
                    on_event(step)
        finally:
            self.live -= 1

    def cancel(self, request_id: str) -> None:
        if request_id in self.cancelled:
            self.cancelled[request_id].set()

    def drain(self) -> None:
        self.state = "draining"

    def snapshot(self) -> Snapshot:
        return Snapshot(self.state, self.live, 0, 0.0, CONTEXT, 0, CONTEXT, 0, self.generation_tokens, 0, 0)


@dataclass
class Api:
    """The running application and a client session for it."""

    session: aiohttp.ClientSession
    url: str
    state: ServerState
    engine: FakeEngine
    runner: web.AppRunner

    def connections(self) -> int:
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def chat_stream(self, **fields: Any) -> list[str]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        async with self.session.post(self.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = (await response.read()).decode("utf-8")
        assert text.endswith("\n\n")
        return text[:-2].split("\n\n")
