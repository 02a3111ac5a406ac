"""Asks an OpenAI-compatible server. What goes wrong on its side is a ServerError, never an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tfglm.checks.address import base_url, reason
from tfglm.checks.errors import CheckError
from tfglm.checks.problem import Call, Json, Problem, Reply

_CONNECT_S = 30
_MAX_EVENT = 64 << 20
"""Bytes of one event of a stream; longer ones are the server's mistake."""


class ServerError(CheckError):
    """The server gave no whole reply: refused, timed out, answered with an error, or broke off."""


@dataclass(frozen=True)
class Options:
    """How every question is asked. `thinking` None leaves it to the server. `timeout_s` is for one reply."""

    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 4096
    thinking: bool | None = None
    timeout_s: float = 900.0


class Server:
    """A server and one of its models."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, options: Options) -> None:
        self.url, self.model, self.options = url, model, options
        self._session = session

    async def ask(self, problem: Problem, *, stream: bool = False) -> Reply:
        """The reply to a problem. Raises ServerError."""
        body = self._body(problem.messages, problem.tools)
        if not stream:
            return reply_of(await self.post("/v1/chat/completions", body))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._answer("/v1/chat/completions", body) as response:
            return await assembled(_events(response.content.iter_any()))

    async def prompt_tokens(self, problem: Problem) -> int | None:
        """By the server's /tokenize, or None where it has none. Raises ServerError if it cannot be reached."""
        body = {"model": self.model, "messages": list(problem.messages), **self._template()}
        for path in ("/tokenize", "/v1/tokenize"):
            try:
                count = (await self.post(path, body)).get("count")
            except _Refused:
                continue
            if isinstance(count, int):
                return count
        return None

    async def prompt_usage(self, problem: Problem) -> int:
        """By `usage.prompt_tokens` of a reply of one token. Raises ServerError."""
        body = self._body(problem.messages, problem.tools) | {"max_tokens": 1}
        return reply_of(await self.post("/v1/chat/completions", body)).prompt_tokens

    async def post(self, path: str, body: Json) -> Json:
        """Raises ServerError."""
        async with self._answer(path, body) as response:
            return _object(await response.read())

    def _body(self, messages: tuple[Json, ...], tools: tuple[Json, ...]) -> Json:
        body: Json = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.options.temperature,
            "seed": self.options.seed,
            "max_tokens": self.options.max_tokens,
            **self._template(),
        }
        return body | {"tools": list(tools)} if tools else body

    def _template(self) -> Json:
        thinking = self.options.thinking
        return {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}

    @asynccontextmanager
    async def _answer(self, path: str, body: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=self.options.timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.post(self.url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise _Refused(f"status {response.status}: {_message(await response.text(errors='replace'))}")
                yield response
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"no connection within {_CONNECT_S} s") from None
        except TimeoutError:
            raise ServerError(f"no whole reply within {self.options.timeout_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerError(str(error) or type(error).__name__) from None


class _Refused(ServerError):
    """An answer with a status other than 200."""


async def connect(session: aiohttp.ClientSession, url: str, model: str | None, options: Options) -> Server:
    """The server at an address with or without http:// and /v1, and its only or first model. Raises ServerError."""
    base = base_url(url)
    if model:
        return Server(session, base, model, options)
    limit = aiohttp.ClientTimeout(total=_CONNECT_S)
    try:
        async with session.get(f"{base}/v1/models", timeout=limit) as response:
            raw = await response.read()
            if response.status != 200:
                raise ServerError(
                    f"{base}/v1/models answers {response.status}: {_message(raw.decode(errors='replace'))}"
                )
        return Server(session, base, str(_object(raw)["data"][0]["id"]), options)
    except TimeoutError:
        raise ServerError(f"{base}/v1/models does not answer within {_CONNECT_S} s") from None
    except aiohttp.ClientError as error:
        raise ServerError(f"{base} does not answer: {reason(error)}") from None
    except (LookupError, TypeError):
        raise ServerError(f"{base}/v1/models lists no model; name one with --model") from None


def reply_of(body: Json) -> Reply:
    """A reply that came in one piece. Raises ServerError where it does not have the API's shape."""
    try:
        [choice] = body["choices"]
        message = choice["message"]
        calls = tuple(_call(call["function"]) for call in message.get("tool_calls") or ())
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return _reply(message.get("content") or "", reasoning, calls, choice.get("finish_reason"), body.get("usage"))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"a reply of another shape ({error!r}): {json.dumps(body)[:200]}") from None


async def assembled(events: AsyncIterator[str]) -> Reply:
    """A reply from the data of a stream's events. Raises ServerError where it breaks off or has another shape."""
    content, reasoning, finish, usage, whole = "", "", None, None, False
    calls: dict[int, list[str]] = {}
    async for data in events:
        if data == "[DONE]":
            whole = True
            break
        chunk = _object(data.encode())
        if chunk.get("error"):
            raise ServerError(f"the stream ended with an error: {_message(data)}")
        try:
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta") or {}
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
                finish = choice.get("finish_reason") or finish
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part["index"], ["", ""])
                    function = part.get("function") or {}
                    call[0] += function.get("name") or ""
                    call[1] += function.get("arguments") or ""
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"an event of another shape ({error!r}): {data[:200]}") from None
    if not whole or finish is None:
        raise ServerError(f"the stream broke off {'before [DONE]' if finish else 'without a finish_reason'}")
    made = tuple(Call(name, arguments) for _, (name, arguments) in sorted(calls.items()))
    return _reply(content, reasoning, made, finish, usage)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data` fields of server-sent events; comments and other fields are passed over."""
    buffer = b""
    async for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
        if len(buffer) > _MAX_EVENT:
            raise ServerError(f"an event of more than {_MAX_EVENT >> 20} MiB")


def _reply(content: str, reasoning: str, calls: tuple[Call, ...], finish: Any, usage: Any) -> Reply:
    """Servers that do not part the reasoning leave it before </think>."""
    thought, tag, rest = content.rpartition("</think>")
    if tag:
        content, reasoning = rest, reasoning + thought.removeprefix("<think>")
    counts = usage or {}
    return Reply(
        content, reasoning, calls, str(finish or ""), int(counts.get("prompt_tokens") or 0),
        int(counts.get("completion_tokens") or 0),
    )  # fmt: skip


def _call(function: Json) -> Call:
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise TypeError("name and arguments of a call are text")
    return Call(name, arguments)


def _object(raw: bytes) -> Json:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"an answer that is no JSON object: {raw[:200]!r}")
    return found


def _message(text: str) -> str:
    """The message of an error body, or the start of whatever it is."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]
