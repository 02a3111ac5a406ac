"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from tfglm import __version__
from tfglm.engine.api import Event, Failed, Finished, GenerationRequest
from tfglm.server.errors import ApiError, invalid, unavailable
from tfglm.server.generation import Generation
from tfglm.server.intake import parse_object, prepare, read_body
from tfglm.server.jsontext import dump_bytes, dump_text
from tfglm.server.prompt import chat_prompt
from tfglm.server.reply import ChatReply, Piece
from tfglm.server.sampling import (
    check_min_tokens,
    check_model,
    check_supported,
    reply_budget,
    sampling_params,
    stop_strings,
    token_ids,
)
from tfglm.server.schemas import ChatBody, parse
from tfglm.server.state import STATE, Served, ServerState
from tfglm.server.stream import DONE, failure, sse, stream_reply
from tfglm.server.usage import closing_fields, usage_block
from tfglm.settings import Settings

FINGERPRINT = f"tfglm-{__version__}"


@dataclass(frozen=True)
class ChatJob:
    """A checked request: what the engine gets and how the reply is written."""

    request: GenerationRequest
    model: str
    created: int
    stream: bool
    include_usage: bool
    include_reasoning: bool


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    served = state.require()
    job = await prepare(await read_body(request), partial(_prepare, served, state.settings))
    with Generation(state, served, job.request) as generation:
        reply = _reply(served, job)
        if job.stream:
            encoder = ChatStream(job, reply, state)
            return await stream_reply(request, generation, encoder, state.settings.keepalive_s)
        pieces: list[Piece] = []
        while not generation.ended:
            for event in await generation.next():
                pieces += reply.feed(event)
    return _whole(job, reply, pieces, state)


def _prepare(served: Served, settings: Settings, raw: bytes) -> ChatJob:
    body = parse(ChatBody, parse_object(raw))
    info, tokenizer = served.info, served.tokenizer
    check_model(body.model, info)
    check_supported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    stop = stop_strings(body.stop)
    stop_ids = token_ids(body.stop_token_ids or (), tokenizer.vocab_size, "stop_token_ids")
    sampling = sampling_params(body, info.defaults, tokenizer.vocab_size)
    prompt = chat_prompt(served.template, body, thinking_default=settings.thinking)
    ids = tokenizer.encode(prompt.text)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = reply_budget(asked, len(ids), info.context, settings.max_tokens, "messages")
    request = GenerationRequest(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        prompt=ids,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=check_min_tokens(body.min_tokens, max_tokens),
        stop=stop,
        stop_token_ids=stop_ids,
        include_stop_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        starts_in_reasoning=prompt.starts_in_reasoning,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        draft=body.draft is not False,
    )
    return ChatJob(
        request=request,
        model=info.name,
        created=int(time.time()),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        include_reasoning=body.include_reasoning is not False,
    )


def _reply(served: Served, job: ChatJob) -> ChatReply:
    return ChatReply(
        served.tokenizer,
        starts_in_reasoning=job.request.starts_in_reasoning,
        include_reasoning=job.include_reasoning,
        logprobs=job.request.logprobs is not None,
    )


def _whole(job: ChatJob, reply: ChatReply, pieces: list[Piece], state: ServerState) -> web.Response:
    finished = finished_or_error(reply.end)
    if reply.unclosed:
        state.metrics.count("unclosed_think")
    message: dict[str, Any] = {"role": "assistant", "content": _join(pieces, "content"), "refusal": None}
    reasoning = _join(pieces, "reasoning_content")
    if reasoning:
        message["reasoning_content"] = reasoning
    logprobs = None
    if job.request.logprobs is not None:
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        logprobs = {"content": entries, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finished.reason,
        "stop_reason": finished.stop_reason,
    }
    payload = {
        **_header(job, "chat.completion"),
        "service_tier": "default",
        "choices": [choice],
        "usage": usage_block(finished.usage),
        **closing_fields(finished, reply.digest),
    }
    return web.Response(body=dump_bytes(payload), content_type="application/json", charset="utf-8")


def finished_or_error(end: Event | None) -> Finished:
    """The end of a whole reply. Raises ApiError when there is none worth sending."""
    if isinstance(end, Finished) and end.reason != "cancelled":
        return end
    if isinstance(end, Failed):
        if end.code == "draining":
            raise unavailable(end.code, end.message)
        # The same request would meet the same end; clients would send it twice more.
        raise ApiError(500, end.message, code=end.code, headers={"x-should-retry": "false"})
    raise ApiError(500, "the reply was cancelled", code="cancelled")


class ChatStream:
    """chat.completion.chunk events. All but the text of a chunk is prepared once."""

    def __init__(self, job: ChatJob, reply: ChatReply, state: ServerState) -> None:
        self._job, self._reply, self._state = job, reply, state
        head = dump_text(_header(job, "chat.completion.chunk"))[:-1]
        self._head = f'data: {head},"choices":[{{"index":0,"delta":{{'
        self._tail = ',"finish_reason":null}]' + (',"usage":null' if job.include_usage else "") + "}\n\n"

    def opening(self) -> bytes:
        return self._chunk('"role":"assistant","content":""', "null")

    def feed(self, event: Event) -> bytes:
        data = b"".join([self._piece(piece) for piece in self._reply.feed(event)])
        end = self._reply.end
        if isinstance(end, Failed):
            return data + failure(end)
        if isinstance(end, Finished):
            return data + self._closing(end)
        return data

    def _piece(self, piece: Piece) -> bytes:
        logprobs = "null" if piece.logprobs is None else dump_text({"content": piece.logprobs, "refusal": None})
        return self._chunk(f'"{piece.field}":{dump_text(piece.text)}', logprobs)

    def _chunk(self, delta: str, logprobs: str) -> bytes:
        return f'{self._head}{delta}}},"logprobs":{logprobs}{self._tail}'.encode()

    def _closing(self, end: Finished) -> bytes:
        if end.reason == "cancelled":
            return failure(Failed("cancelled", "the reply was cancelled"))
        if self._reply.unclosed:
            self._state.metrics.count("unclosed_think")
        header = _header(self._job, "chat.completion.chunk")
        choice = {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,
        }
        last: dict[str, Any] = {**header, "choices": [choice], **closing_fields(end, self._reply.digest)}
        if not self._job.include_usage:
            return sse(last) + DONE
        return sse({**last, "usage": None}) + sse({**header, "choices": [], "usage": usage_block(end.usage)}) + DONE


def _join(pieces: list[Piece], field: str) -> str:
    return "".join(piece.text for piece in pieces if piece.field == field)


def _header(job: ChatJob, kind: str) -> dict[str, Any]:
    return {
        "id": job.request.id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": FINGERPRINT,
    }
