"""Whether and how hard the model thinks, from the many ways clients ask for it; first match wins.

GLM-5.3's template knows efforts Low, High and Max but no "off". Off is made from its output: the effort block is
removed and the think block is closed. Where the reply starts is read from the finished prompt, never from the request.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tfglm.server.errors import invalid, unsupported
from tfglm.server.jsontext import kind_of, shown

if TYPE_CHECKING:
    from tfglm.server.schemas import ChatPromptFields

log = logging.getLogger("tfglm.server")

Effort = Literal["low", "high", "max", "none"]
EFFORTS: dict[str, Effort] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
THINK, END_THINK = "<think>", "</think>"
_ASSISTANT = "<|assistant|>"
_ROLE = re.compile(r"<\|(?:system|user|assistant|observation)\|>")
_EFFORT_BLOCK = re.compile(r"(\[gMASK\]<sop>)<\|system\|>Reasoning Effort: (?:Low|High|Max)")


@dataclass(frozen=True)
class Thinking:
    """`effort` "none" means: answer at once."""

    effort: Effort

    @property
    def on(self) -> bool:
        return self.effort != "none"


def resolve_thinking(fields: ChatPromptFields, default: bool) -> Thinking:
    """What the request asks for. Raises ApiError on values without a meaning and on contradictions."""
    kwargs = fields.chat_template_kwargs or {}
    effort = _effort(fields, kwargs)
    switch = _switch(fields, kwargs)
    if switch and effort == "none":
        raise invalid(
            "reasoning_effort", "reasoning_effort is 'none' but thinking is switched on; send only one of them"
        )
    if switch is None:
        return Thinking(effort or ("max" if default else "none"))
    return Thinking((effort or "max") if switch else "none")


def close_thinking(prompt: str) -> str:
    """The rendered prompt with thinking off: no effort line, and no open think block at its end."""
    head = _EFFORT_BLOCK.match(prompt)
    if head:
        prompt = head.group(1) + prompt[head.end() :]
    return prompt + END_THINK if prompt.endswith(THINK) and starts_in_reasoning(prompt) else prompt


def starts_in_reasoning(prompt: str) -> bool:
    """True when the prompt ends inside a think block of the assistant."""
    roles = [match.group() for match in _ROLE.finditer(prompt, max(0, prompt.rfind(_ASSISTANT)))]
    if roles != [_ASSISTANT]:
        return False
    tail = prompt[prompt.rfind(_ASSISTANT) :]
    return tail.rfind(THINK) > tail.rfind(END_THINK)


def _effort(fields: ChatPromptFields, kwargs: dict[str, Any]) -> Effort | None:
    reasoning = fields.reasoning or {}
    for param, value in (
        ("reasoning_effort", fields.reasoning_effort),
        ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort")),
        ("reasoning.effort", reasoning.get("effort")),
    ):
        if value is None:
            continue
        if not isinstance(value, str) or value not in EFFORTS:
            raise invalid(param, f"{param} is {shown(value)}; it must be one of {', '.join(EFFORTS)}")
        return EFFORTS[value]
    return None


def _switch(fields: ChatPromptFields, kwargs: dict[str, Any]) -> bool | None:
    enable = kwargs.get("enable_thinking")
    if enable is not None:
        if not isinstance(enable, bool):
            name = "chat_template_kwargs.enable_thinking"
            raise invalid(name, f"{name} must be a boolean, not {kind_of(enable)}")
        return enable
    for param, value in (("chat_template_kwargs.thinking", kwargs.get("thinking")), ("thinking", fields.thinking)):
        if isinstance(value, dict):
            if value.get("budget_tokens") is not None:
                raise unsupported(f"{param}.budget_tokens", f"{param}.budget_tokens is not supported yet; leave it out")
            value = {"enabled": True, "disabled": False}.get(str(value.get("type")), value)
        if isinstance(value, bool):
            return value
        if value is not None:
            # Clients send words of other vendors here ("adaptive"); refusing them would refuse the whole client.
            log.debug("%s %r has no meaning here; ignored", param, value)
    return fields.enable_thinking
