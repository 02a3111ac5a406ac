"""Conversations, and their text in the model's chat format.

`render` writes what the checkpoint's own template writes (a test compares them); the template itself would take most of
the time that making data takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EFFORTS = ("low", "high", "max")
_LINE = {"low": "Low", "high": "High", "max": "Max"}
_TOOLS_HEAD = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """role: system, user, assistant or tool. calls: (name, arguments) of an assistant's turn."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Json], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """effort None: thinking is off."""

    turns: Sequence[Turn]
    effort: str | None = None
    tools: Sequence[Json] = ()

    def messages(self) -> list[Json]:
        """As a chat API takes them."""
        result: list[Json] = []
        for turn in self.turns:
            message: Json = {"role": turn.role, "content": turn.content}
            if turn.role == "assistant":
                message["reasoning_content"] = turn.reasoning
                if turn.calls:
                    message["tool_calls"] = [
                        {"type": "function", "function": {"name": name, "arguments": arguments}}
                        for name, arguments in turn.calls
                    ]
            result.append(message)
        return result


def render(conversation: Conversation) -> str:
    """The whole text, with the token that ends the last turn."""
    parts = ["[gMASK]<sop>"]
    if conversation.effort is not None:
        parts.append(f"<|system|>Reasoning Effort: {_LINE[conversation.effort]}")
    if conversation.tools:
        parts.append(_TOOLS_HEAD)
        parts += [json.dumps(tool.get("function", tool), ensure_ascii=False) + "\n" for tool in conversation.tools]
        parts.append(_TOOLS_TAIL)
    before = ""
    for turn in conversation.turns:
        if turn.role == "tool":
            parts.append(
                ("" if before == "tool" else "<|observation|>") + f"<tool_response>{turn.content}</tool_response>"
            )
        elif turn.role == "assistant":
            parts.append(f"<|assistant|><think>{turn.reasoning}</think>{turn.content.strip()}")
            parts += [_call(name, arguments) for name, arguments in turn.calls]
        else:
            parts.append(f"<|{turn.role}|>{turn.content}")
        before = turn.role
    last = conversation.turns[-1]
    if last.role == "assistant":
        parts.append("<|observation|>" if last.calls else "<|user|>")
    return "".join(parts)


def _call(name: str, arguments: Json) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{values}</tool_call>"
