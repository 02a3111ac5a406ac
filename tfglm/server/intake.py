"""From the socket to a JSON object: size, time, content type and syntax of a request's body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from tfglm.server.errors import ApiError
from tfglm.server.jsontext import BadJsonError, load_object

BODY_SECONDS = 60.0
"""How long a client may take to send its body."""
INLINE_BYTES = 32 * 1024
"""Smaller bodies are handled where they are: a hop to a thread would cost more than the work."""

T = TypeVar("T")


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError 415, 408; aiohttp raises 413 past the server's limit."""
    if "Content-Type" in request.headers:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"Content-Type is {kind}; send application/json", code="unsupported_media_type")
    if "Content-Encoding" in request.headers and request.headers["Content-Encoding"].lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted", code="unsupported_media_type")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", code="body_timeout") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400."""
    try:
        return load_object(raw)
    except BadJsonError as error:
        raise ApiError(400, str(error), code="invalid_json") from None


async def prepare(raw: bytes, work: Callable[[bytes], T]) -> T:
    """`work(raw)`: parsing, rendering and tokenising. Big bodies go to a thread, so that other streams flow on."""
    if len(raw) <= INLINE_BYTES:
        return work(raw)
    return await asyncio.to_thread(work, raw)
