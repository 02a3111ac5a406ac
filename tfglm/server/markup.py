"""The tags of tool calls in GLM's replies, and how to tell a tag from the beginning of one."""

from __future__ import annotations

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARG_KEY, END_KEY = "<arg_key>", "</arg_key>"
ARG_VALUE, END_VALUE = "<arg_value>", "</arg_value>"
TAGS = (OPEN, CLOSE, ARG_KEY, END_KEY, ARG_VALUE, END_VALUE)
SPACE = " \t\r\n"
"""What may stand between tags."""


def starts(text: str, tag: str) -> bool | None:
    """Whether `text` starts with `tag`; None while it may yet become so."""
    return True if text.startswith(tag) else None if tag.startswith(text) else False


def partial_end(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
