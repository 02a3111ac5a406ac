"""POST /v1/chat/completions."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from aiohttp import web

from tfglm.engine.api import Event, Failed, Finished
from tfglm.server.errors import invalid
from tfglm.server.generation import Generation
from tfglm.server.intake import parse_object, prepare, read_body
from tfglm.server.job import Job, finished_or_error, make_job
from tfglm.server.jsontext import dump_bytes, dump_text
from tfglm.server.prompt import chat_prompt
from tfglm.server.reply import CallPiece, ChatReply, Piece, TextPiece
from tfglm.server.sampling import check_model, check_supported, reply_budget
from tfglm.server.schemas import ChatBody, parse
from tfglm.server.state import STATE, Served, ServerState
from tfglm.server.stream import failure, stream_reply
from tfglm.server.usage import closing_fields, usage_block
from tfglm.settings import Settings

log = logging.getLogger("tfglm.server")

CHUNK = "chat.completion.chunk"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    served = state.require()
    job, reply = await prepare(await read_body(request), partial(_prepare, served, state.settings))
    with Generation(state, served, job.request) as generation:
        if job.stream:
            encoder = ChatStream(job, reply, state, generation)
            return await stream_reply(request, generation, encoder, state.settings.keepalive_s)
        pieces: list[Piece] = []
        while not generation.ended:
            for event in await generation.next():
                pieces += _take(reply, generation, event)
    return _whole(job, reply, pieces, state)


def _prepare(served: Served, settings: Settings, raw: bytes) -> tuple[Job, ChatReply]:
    body = parse(ChatBody, parse_object(raw))
    check_model(body.model, served.info)
    check_supported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    prompt = chat_prompt(served.template, body, thinking_default=settings.thinking)
    ids = served.tokenizer.encode(prompt.text)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    job = make_job(
        served,
        body,
        "chatcmpl",
        ids,
        reply_budget(asked, len(ids), served.info.context, settings.max_tokens, "messages"),
        starts_in_reasoning=prompt.starts_in_reasoning,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    reply = ChatReply(
        served.tokenizer,
        starts_in_reasoning=prompt.starts_in_reasoning,
        include_reasoning=body.include_reasoning is not False,
        logprobs=bool(body.logprobs),
        tools=prompt.tools,
        one_call=body.parallel_tool_calls is False,
    )
    return job, reply


def _take(reply: ChatReply, generation: Generation, event: Event) -> list[Piece]:
    pieces = reply.feed(event)
    if reply.enough:
        generation.complete()
    return pieces


def _count(job: Job, reply: ChatReply, state: ServerState) -> None:
    """What the figures and the log say of a reply's message."""
    if reply.unclosed:
        state.metrics.count("unclosed_think")
    state.metrics.tool_calls(reply.calls)
    broken = [result for result in reply.calls if result in ("malformed", "truncated")]
    if broken:
        log.warning("%s: of %d tool calls: %s", job.request.id, len(reply.calls), ", ".join(broken))


def _whole(job: Job, reply: ChatReply, pieces: list[Piece], state: ServerState) -> web.Response:
    finished = finished_or_error(reply.end)
    _count(job, reply, state)
    message = _message(pieces)
    logprobs = None
    if job.request.logprobs is not None:
        entries = [entry for piece in pieces if isinstance(piece, TextPiece) for entry in piece.logprobs or ()]
        logprobs = {"content": entries, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reply.finish_reason,
        "stop_reason": finished.stop_reason,
    }
    payload = {
        **job.header("chat.completion"),
        "service_tier": "default",
        "choices": [choice],
        "usage": usage_block(finished.usage),
        **closing_fields(finished, reply.digest),
    }
    return web.Response(body=dump_bytes(payload), content_type="application/json", charset="utf-8")


class ChatStream:
    """chat.completion.chunk events. All but the text of a chunk is prepared once."""

    def __init__(self, job: Job, reply: ChatReply, state: ServerState, generation: Generation) -> None:
        self._job, self._reply, self._state, self._generation = job, reply, state, generation
        head = dump_text(job.header(CHUNK))[:-1]
        self._head = f'data: {head},"choices":[{{"index":0,"delta":{{'
        self._tail = ',"finish_reason":null}]' + (',"usage":null' if job.include_usage else "") + "}\n\n"

    def opening(self) -> bytes:
        return self._chunk('"role":"assistant","content":""', "null")

    def feed(self, event: Event) -> bytes:
        data = b"".join([self._piece(piece) for piece in _take(self._reply, self._generation, event)])
        end = self._reply.end
        if isinstance(end, Failed):
            return data + failure(end)
        if isinstance(end, Finished):
            return data + self._closing(end)
        return data

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallPiece):
            return self._chunk(f'"tool_calls":[{dump_text(_call_delta(piece))}]', "null")
        logprobs = "null" if piece.logprobs is None else dump_text({"content": piece.logprobs, "refusal": None})
        return self._chunk(f'"{piece.field}":{dump_text(piece.text)}', logprobs)

    def _chunk(self, delta: str, logprobs: str) -> bytes:
        return f'{self._head}{delta}}},"logprobs":{logprobs}{self._tail}'.encode()

    def _closing(self, end: Finished) -> bytes:
        _count(self._job, self._reply, self._state)
        choice = {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": self._reply.finish_reason,
            "stop_reason": end.stop_reason,
        }
        return self._job.closing(CHUNK, choice, end, self._reply.digest)


def _message(pieces: list[Piece]) -> dict[str, Any]:
    """What a client makes of a stream's deltas."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            continue
        if piece.id is not None:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name}})
            arguments.append([])
        arguments[piece.index].append(piece.arguments)
    for call, texts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(texts)
    content, reasoning = _join(pieces, "content"), _join(pieces, "reasoning_content")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _join(pieces: list[Piece], field: str) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece) and piece.field == field)
