"""The bodies of requests. Types are strict (a boolean is no number), null means "default", unknown fields pass."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tfglm.server.errors import ApiError, invalid, unsupported
from tfglm.server.jsontext import shown

INT64 = 2**63
MAX_STOP_TOKEN_IDS = 1024
"""Below every vocabulary's size: with min_tokens they are forbidden, and something must be left to draw."""


def _integral(value: object) -> object:
    """JSON does not tell 5.0 from 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral), Field(strict=True, ge=-INT64, lt=INT64)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Object = dict[str, Any]

UNSUPPORTED = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "suffix": "put it in the prompt",
    "guided_json": "grammars are not supported yet",
    "guided_regex": "grammars are not supported yet",
    "guided_choice": "grammars are not supported yet",
    "guided_grammar": "grammars are not supported yet",
    "structured_outputs": "grammars are not supported yet",
    "json_schema": "grammars are not supported yet",
    "thinking_budget": "use reasoning_effort or max_tokens",
    "thinking_token_budget": "use reasoning_effort or max_tokens",
    "audio": "this model reads and writes text",
    "web_search_options": "this server has no web search",
}
"""Fields that change the reply and would silently not do so: refused when they are set."""


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(Body):
    include_usage: Flag | None = None


class ResponseFormat(Body):
    type: Text


class ChatPromptFields(Body):
    """What a chat prompt is made of; shared by /v1/chat/completions and /tokenize."""

    messages: Annotated[list[Object], Field(min_length=1)]
    tools: list[Object] | None = None
    tool_choice: Any = None
    reasoning_effort: Text | None = None
    reasoning: Object | None = None
    thinking: Any = None
    enable_thinking: Flag | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None


class ReplyFields(Body):
    """How a reply is made; shared by chat and completions."""

    model: Text
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Int | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Real, Field(ge=-100, le=100)]] | None = None
    seed: Int | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[Int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: Flag | None = None
    ignore_eos: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    draft: Flag | None = None


class ChatBody(ReplyFields, ChatPromptFields):
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    include_reasoning: Flag | None = None
    parallel_tool_calls: Flag | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(ReplyFields):
    prompt: Any
    echo: Flag | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None


class TokenizeTextBody(Body):
    model: Text | None = None
    prompt: Text
    return_token_strs: Flag | None = None


class TokenizeChatBody(ChatPromptFields):
    model: Text | None = None
    return_token_strs: Flag | None = None


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: list[Int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: dict[str, Any]) -> B:
    """The body as `kind`. Raises ApiError (400) whose `param` names the first field at fault."""
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise _field_error(error.errors(include_url=False)[0]) from None
    for name, advice in UNSUPPORTED.items():
        if (body.model_extra or {}).get(name) not in (None, [], {}, "", False):
            raise unsupported(name, f"{name} is not supported: {advice}")
    return body


def _field_error(detail: ErrorDetails) -> ApiError:
    param = ""
    for step in detail["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    if detail["type"] == "missing":
        where = "; GET /v1/models names it" if param == "model" else ""
        return ApiError(400, f"{param} is required{where}", code="missing_required_parameter", param=param)
    text = detail["msg"]
    return invalid(param, f"{param} is {shown(detail['input'])}: {text[:1].lower()}{text[1:]}")
