"""Messages -> the text of a prompt, and whether the reply starts inside a think block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfglm.server.errors import ApiError, invalid
from tfglm.server.messages import normalise_messages, normalise_tools
from tfglm.server.schemas import ChatPromptFields
from tfglm.server.template import ChatTemplate, TemplateRefusedError
from tfglm.server.thinking import END_THINK, close_thinking, resolve_thinking, starts_in_reasoning
from tfglm.server.toolchoice import chosen_tools

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Names that chat_template_kwargs may not set: they are the request itself."""


@dataclass(frozen=True)
class ChatPrompt:
    """`tools` are the definitions that the model was shown: the calls it may make."""

    text: str
    starts_in_reasoning: bool
    tools: list[dict[str, Any]] = field(default_factory=list)


def chat_prompt(template: ChatTemplate, fields: ChatPromptFields, *, thinking_default: bool) -> ChatPrompt:
    """Renders the request's messages with the checkpoint's template. Raises ApiError naming the field at fault."""
    messages = normalise_messages(fields.messages)
    thinking = resolve_thinking(fields, thinking_default)
    continued = bool(fields.continue_final_message)
    _check_continuation(fields, messages)
    tools = chosen_tools(normalise_tools(fields.tools), fields.tool_choice)
    variables = _variables(fields)
    variables["enable_thinking"] = thinking.on
    if thinking.on:
        variables["reasoning_effort"] = thinking.effort
    try:
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=fields.add_generation_prompt is not False and not continued,
            variables=variables,
        )
    except TemplateRefusedError as error:
        raise ApiError(400, f"the chat template refused the messages: {error}", param="messages") from None
    if not text:
        raise ApiError(400, "the chat template made an empty prompt of these messages", param="messages")
    if continued and messages[-1].get("reasoning_content") and not messages[-1]["content"]:
        # Only reasoning was given: it is the think block that goes on.
        text = text.removesuffix(END_THINK)
    if not thinking.on:
        text = close_thinking(text)
    return ChatPrompt(text, starts_in_reasoning(text), tools)


def _check_continuation(fields: ChatPromptFields, messages: list[dict[str, Any]]) -> None:
    if not fields.continue_final_message:
        return
    if fields.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        raise invalid(
            "continue_final_message", "continue_final_message needs a last message of the assistant without calls"
        )


def _variables(fields: ChatPromptFields) -> dict[str, Any]:
    variables = dict(fields.chat_template_kwargs or {})
    for name in RESERVED:
        if name in variables:
            raise invalid(
                f"chat_template_kwargs.{name}", f"{name} is a field of the request, not of chat_template_kwargs"
            )
    for name in ("enable_thinking", "thinking", "reasoning_effort"):
        variables.pop(name, None)
    return variables
