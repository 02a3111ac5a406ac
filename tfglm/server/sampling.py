"""Fields of a request -> how its tokens are drawn and where its reply ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfglm.checkpoint.config import GenerationDefaults
from tfglm.engine.api import SamplingParams
from tfglm.server.errors import ApiError, invalid, unsupported
from tfglm.server.info import ModelInfo
from tfglm.server.jsontext import kind_of, shown
from tfglm.server.schemas import ReplyFields

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 10_000
"""Of one stop string: the engine prepares them where requests are submitted, in time that grows with their length."""


def check_model(name: str | None, info: ModelInfo) -> None:
    if name is not None and name != info.name:
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist; this server serves {info.name!r}",
            code="model_not_found",
            param="model",
        )


def check_supported(body: ReplyFields) -> None:
    """Refuses what would change the reply and is not built."""
    if body.n not in (None, 1):
        raise unsupported("n", f"n is {body.n}; this server makes one reply a request, send the request {body.n} times")
    if body.response_format is not None and body.response_format.type != "text":
        kind = shown(body.response_format.type)
        raise unsupported(
            "response_format",
            f"response_format {kind} cannot be enforced yet; use 'text' and say in a message what JSON is wanted",
        )


def sampling_params(body: ReplyFields, defaults: GenerationDefaults, vocab_size: int) -> SamplingParams:
    def value(given: float | None, default: float) -> float:
        return default if given is None else given

    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        temperature=value(body.temperature, defaults.temperature),
        top_p=value(body.top_p, defaults.top_p),
        top_k=min(max(top_k, 0), vocab_size),
        min_p=value(body.min_p, defaults.min_p),
        repetition_penalty=value(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=value(body.frequency_penalty, 0.0),
        presence_penalty=value(body.presence_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed,
    )


def stop_strings(stop: Any) -> tuple[str, ...]:
    """`stop` as sent: null, a string, or up to 16 strings."""
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise invalid("stop", f"stop must be a string or an array of strings, not {kind_of(stop)}")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are accepted")
    for i, text in enumerate(stops):
        if not isinstance(text, str):
            raise invalid(f"stop[{i}]", f"stop[{i}] must be a string, not {kind_of(text)}")
        if not text:
            raise invalid(f"stop[{i}]", f"stop[{i}] is empty; every reply would end at once")
        if len(text) > MAX_STOP_CHARACTERS:
            raise invalid(
                f"stop[{i}]", f"stop[{i}] has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are accepted"
            )
    return tuple(stops)


def token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> tuple[int, ...]:
    """Checked token ids. Raises ApiError naming the first that the tokenizer does not have."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(
                f"{param}[{i}]",
                f"{param}[{i}] is {shown(token)}; token ids are whole numbers from 0 to {vocab_size - 1}",
            )
    return tuple(ids)


def reply_budget(asked: int | None, prompt_tokens: int, context: int, default: int, param: str) -> int:
    """max_tokens of the reply. What was asked for must fit the window; the default is cut to the room that is left."""
    room = context - prompt_tokens
    if asked is not None and asked <= room:
        return asked
    if asked is None and room >= 1:
        return min(default, room)
    completion = 1 if asked is None else asked
    raise ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested {prompt_tokens + completion} "
        f"tokens ({prompt_tokens} in the {param}, {completion} in the completion). "
        f"Please reduce the length of the {param} or completion.",
        code="context_length_exceeded",
        param=param,
    )


def check_min_tokens(min_tokens: int | None, max_tokens: int) -> int:
    if min_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {min_tokens}, more than the {max_tokens} tokens the reply may have")
    return min_tokens or 0


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    checked = {}
    for key, value in bias.items():
        # isdecimal alone would let other scripts' digits through.
        if not (key.isascii() and key.isdecimal()) or len(key) > 9 or int(key) >= vocab_size:
            raise invalid(
                "logit_bias", f"logit_bias has the key {shown(key)}; keys are token ids from 0 to {vocab_size - 1}"
            )
        checked[int(key)] = value
    return checked
