"""POST /v1/completions: raw text or token ids in, text out; think markup is ordinary text here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, PromptLogprobs
from tfglm.server.errors import invalid, unsupported
from tfglm.server.generation import Generation
from tfglm.server.intake import parse_object, prepare, read_body
from tfglm.server.job import Job, finished_or_error, make_job
from tfglm.server.jsontext import dump_bytes, kind_of
from tfglm.server.logprobs import CompletionLogprobs
from tfglm.server.sampling import check_model, check_supported, reply_budget, token_ids
from tfglm.server.schemas import CompletionBody, parse
from tfglm.server.state import STATE, Served
from tfglm.server.stream import failure, sse, stream_reply
from tfglm.server.usage import TokenDigest, closing_fields, usage_block
from tfglm.settings import Settings

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer


KIND = "text_completion"


@dataclass(frozen=True)
class TextPiece:
    """Text to append to the choice, with the log-probabilities of its tokens if they were asked for."""

    text: str
    logprobs: dict[str, Any] | None


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    served = state.require()
    job, reply = await prepare(await read_body(request), partial(_prepare, served, state.settings))
    with Generation(state, served, job.request) as generation:
        if job.stream:
            encoder = CompletionStream(job, reply)
            return await stream_reply(request, generation, encoder, state.settings.keepalive_s)
        pieces = [reply.opening()]
        while not generation.ended:
            for event in await generation.next():
                pieces += reply.feed(event)
    return _whole(job, reply, pieces)


def _prepare(served: Served, settings: Settings, raw: bytes) -> tuple[Job, CompletionReply]:
    body = parse(CompletionBody, parse_object(raw))
    tokenizer = served.tokenizer
    check_model(body.model, served.info)
    check_supported(body)
    if body.best_of not in (None, 1):
        raise unsupported("best_of", f"best_of is {body.best_of}; this server makes one reply a request")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens is 0; without echo there would be nothing to send")
    text, ids = _prompt(body.prompt, tokenizer)
    max_tokens = reply_budget(body.max_tokens, len(ids), served.info.context, settings.max_tokens, "prompt")
    # A reply of no tokens exists for the sake of its prompt's log-probabilities; the engine knows it by them.
    prompt_logprobs = (body.logprobs or 0) if body.echo and (body.logprobs is not None or max_tokens == 0) else None
    job = make_job(
        served,
        body,
        "cmpl",
        ids,
        max_tokens,
        split_reasoning=False,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    echo = ""
    if body.echo:
        echo = tokenizer.decode(ids) if text is None else text
    return job, CompletionReply(tokenizer, job.request, echo)


def _prompt(prompt: Any, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """A string, a list of token ids, or a list that holds one of either -> (text if given as text, ids)."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise unsupported("prompt", f"prompt holds {len(prompt)} prompts; send them one a request")
        prompt = prompt[0]
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        text, ids = None, list(token_ids(prompt, tokenizer.vocab_size, "prompt"))
    else:
        raise invalid("prompt", f"prompt must be a string or an array of token ids, not {kind_of(prompt)}")
    if not ids:
        raise invalid("prompt", "prompt is empty; a reply needs at least one token before it")
    return text, ids


class CompletionReply:
    """Engine events in, pieces of text out; `end` is set by the last event. echo: the prompt as text when it is to be
    repeated in front of the reply."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, echo: str) -> None:
        self.digest = TokenDigest()
        self.end: Finished | Failed | None = None
        self._tokenizer, self._prompt, self._echo = tokenizer, request.prompt, echo
        self._logprobs = CompletionLogprobs(tokenizer) if request.logprobs is not None else None

    def opening(self) -> TextPiece:
        """What is known at admission: the echoed prompt, or nothing."""
        return TextPiece(self._echo, None)

    def feed(self, event: Event) -> list[TextPiece]:
        if isinstance(event, PromptLogprobs) and self._logprobs:
            self._logprobs.add(self._prompt, event.entries)
        elif isinstance(event, Delta):
            self.digest.add(event.token_ids)
            if self._logprobs:
                shown = [entry for entry in event.logprobs if not self._tokenizer.is_special(entry.token_id)]
                self._logprobs.add([entry.token_id for entry in shown], shown)
            if event.text:
                return [TextPiece(event.text, self._taken())]
        elif isinstance(event, Failed):
            self.end = event
        elif isinstance(event, Finished):
            self.end = event
            rest = self._taken()
            return [TextPiece("", rest)] if rest else []
        return []

    def _taken(self) -> dict[str, Any] | None:
        return self._logprobs.take() if self._logprobs else None


class CompletionStream:
    """text_completion events."""

    def __init__(self, job: Job, reply: CompletionReply) -> None:
        self._job, self._reply = job, reply
        self._head = {**job.header(KIND), **({"usage": None} if job.include_usage else {})}

    def opening(self) -> bytes:
        return self._chunk(self._reply.opening())

    def feed(self, event: Event) -> bytes:
        data = b"".join([self._chunk(piece) for piece in self._reply.feed(event)])
        end = self._reply.end
        if isinstance(end, Failed):
            return data + failure(end)
        if isinstance(end, Finished):
            return data + self._job.closing(KIND, _choice(TextPiece("", None), end), end, self._reply.digest)
        return data

    def _chunk(self, piece: TextPiece) -> bytes:
        return sse({**self._head, "choices": [_choice(piece)]})


def _whole(job: Job, reply: CompletionReply, pieces: list[TextPiece]) -> web.Response:
    finished = finished_or_error(reply.end)
    logprobs: dict[str, Any] | None = None
    for piece in pieces:
        if piece.logprobs and logprobs is None:
            logprobs = piece.logprobs
        elif piece.logprobs and logprobs:
            for name, values in piece.logprobs.items():
                logprobs[name] += values
    payload = {
        **job.header(KIND),
        "choices": [_choice(TextPiece("".join(piece.text for piece in pieces), logprobs), finished)],
        "usage": usage_block(finished.usage),
        **closing_fields(finished, reply.digest),
    }
    return web.Response(body=dump_bytes(payload), content_type="application/json", charset="utf-8")


def _choice(piece: TextPiece, end: Finished | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": end.reason if end else None,
        "stop_reason": end.stop_reason if end else None,
    }
