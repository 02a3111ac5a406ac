"""POST /tokenize and /detokenize, in vLLM's shape: the ids that a completion or a chat of the same body would run."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from tfglm.server.about import json_response
from tfglm.server.intake import parse_object, prepare, read_body
from tfglm.server.logprobs import token_text
from tfglm.server.prompt import chat_prompt
from tfglm.server.sampling import check_model, token_ids
from tfglm.server.schemas import DetokenizeBody, TokenizeChatBody, TokenizeTextBody, parse
from tfglm.server.state import STATE, Served
from tfglm.settings import Settings


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    work = partial(_tokenize, state.require(), state.settings)
    return json_response(await prepare(await read_body(request), work))


async def detokenize(request: web.Request) -> web.Response:
    work = partial(_detokenize, request.app[STATE].require())
    return json_response(await prepare(await read_body(request), work))


def _tokenize(served: Served, settings: Settings, raw: bytes) -> dict[str, Any]:
    data = parse_object(raw)
    body: TokenizeChatBody | TokenizeTextBody
    if data.get("messages") is not None:
        body = parse(TokenizeChatBody, data)
        text = chat_prompt(served.template, body, thinking_default=settings.thinking).text
    else:
        body = parse(TokenizeTextBody, data)
        text = body.prompt
    check_model(body.model, served.info)
    ids = served.tokenizer.encode(text)
    strings = [token_text(served.tokenizer.token_bytes(token)) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": served.info.context, "tokens": ids, "token_strs": strings}


def _detokenize(served: Served, raw: bytes) -> dict[str, Any]:
    body = parse(DetokenizeBody, parse_object(raw))
    check_model(body.model, served.info)
    ids = token_ids(body.tokens, served.tokenizer.vocab_size, "tokens")
    return {"prompt": served.tokenizer.decode(list(ids))}
