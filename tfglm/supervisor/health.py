"""What a serving rank 0 says of itself: /health, asked without an HTTP library; tokens a second out of two answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_BYTES = 1 << 20
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Health:
    """status: HTTP's, 0 without an answer. facts: the JSON object that came with it."""

    status: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return str(self.facts.get("status", "no answer"))


async def ask(host: str, port: int, key: str, limit: float) -> Health:
    """GET /health at the address the engine listens on. Never raises, never takes longer than `limit` seconds."""
    try:
        return await asyncio.wait_for(_ask(_ANYWHERE.get(host, host), port, key), limit)
    except (OSError, TimeoutError, ValueError, IndexError):
        return Health(0)


async def _ask(host: str, port: int, key: str) -> Health:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        bearer = f"Authorization: Bearer {key.split(',')[0]}\r\n" if key else ""
        writer.write(f"GET /health HTTP/1.0\r\nHost: {host}\r\n{bearer}\r\n".encode())
        answer = b""
        while len(answer) < _MOST_BYTES and (chunk := await reader.read(_MOST_BYTES)):
            answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        facts = json.loads(body)
        return Health(int(head.split()[1]), facts if isinstance(facts, dict) else {})
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Rate:
    """A counter's growth a second over the last `span_s` seconds."""

    def __init__(self, span_s: float = 10.0) -> None:
        self._span_s = span_s
        self._samples: collections.deque[tuple[float, float]] = collections.deque()

    def add(self, value: float, now: float | None = None) -> None:
        """A counter that went back belongs to another process: what was known of it is forgotten."""
        now = time.monotonic() if now is None else now
        if self._samples and value < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, value))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._span_s:
            self._samples.popleft()

    @property
    def a_second(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / max(ended - began, 1e-9)
