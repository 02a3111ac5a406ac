"""Server-sent events: headers at admission, whole events only, a comment when nothing else was sent for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from aiohttp import web

from tfglm.engine.api import Event, Failed
from tfglm.server.errors import ApiError
from tfglm.server.generation import Generation
from tfglm.server.jsontext import dump_bytes

log = logging.getLogger("tfglm.server")

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"
WRITE_SECONDS = 60.0
"""How long a client may leave a full socket unread before it is dropped."""


class Encoder(Protocol):
    """Turns the events of one reply into server-sent events."""

    def opening(self) -> bytes:
        """The first event, sent at admission."""
        ...

    def feed(self, event: Event) -> bytes:
        """The events that follow from an engine event, [DONE] included at the end; may be empty."""
        ...


def sse(payload: object) -> bytes:
    return b"data: " + dump_bytes(payload) + b"\n\n"


def failure(failed: Failed) -> bytes:
    """An error after the headers: clients raise it as an API error."""
    return sse(ApiError(500, failed.message, code=failed.code).payload()) + DONE


async def stream_reply(
    request: web.Request, generation: Generation, encoder: Encoder, keepalive_s: float
) -> web.StreamResponse:
    """Writes the whole reply. Leaves early, with the generation unfinished, when the client goes or stops reading."""
    response = web.StreamResponse(headers=HEADERS)
    silent_since = time.monotonic()
    try:
        await response.prepare(request)
        await _write(response, encoder.opening())
        while not generation.ended:
            rest = silent_since + keepalive_s - time.monotonic() if keepalive_s else None
            events = await generation.next(rest)
            data = b"".join([encoder.feed(event) for event in events])
            if not data and (rest is None or time.monotonic() < silent_since + keepalive_s):
                continue
            await _write(response, data or KEEPALIVE)
            silent_since = time.monotonic()
        await response.write_eof()
    except TimeoutError:
        log.warning("%s: the client has not read for %.0f s; dropped", generation.request.id, WRITE_SECONDS)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionResetError:
        log.debug("%s: the client is gone", generation.request.id)
    except Exception:
        # The headers are out: a second response would corrupt the stream, so the error goes the way of the others.
        log.exception("%s: its events could not be written", generation.request.id)
        mistake = Failed("internal_error", "the server made a mistake; its log has the traceback")
        await _write(response, failure(mistake))
        await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(data)
