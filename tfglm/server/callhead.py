"""What follows `<tool_call>`: the head of a call, or the prose of somebody who speaks of the tag."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tfglm.server.markup import ARG_KEY, CLOSE, END_KEY, SPACE, starts
from tfglm.server.offered import OfferedTools, Tool

MAX_HEAD = 512
"""Characters up to the first tag."""
HEAD_WINDOW = MAX_HEAD + len(END_KEY)
"""What decides is within so many characters."""
_REGULAR = re.compile(r"(?:[A-Za-z0-9_-]{1,128}(?:[ \t\r\n]+[^ \t\r\n]*)?)?[ \t\r\n]*")
"""A name, perhaps with a key behind it whose tag is missing, or the beginning of such a head."""


@dataclass(frozen=True)
class Head:
    """`length` characters name the tool. repaired: a key follows without its `<arg_key>`."""

    tool: Tool
    length: int
    repaired: bool = False


Verdict = Head | Literal["more", "text", "json"]


def read_head(text: str, tools: OfferedTools) -> Verdict:
    """The head at the start of `text`; "more" while that cannot be told; "json" if an object or array begins there."""
    bare = text.lstrip(SPACE)
    if bare[:1] in ("{", "[") and len(text) - len(bare) <= MAX_HEAD:
        return "json"
    at = text.find("<")
    words = text if at < 0 else text[:at]
    bare = words.strip(SPACE)
    if len(words) > MAX_HEAD or not (_REGULAR.fullmatch(words.lstrip(SPACE)) or tools.may_begin(bare)):
        return "text"
    if at < 0:
        return "more"
    found = {tag: starts(text[at:], tag) for tag in (ARG_KEY, CLOSE, END_KEY)}
    if found[ARG_KEY] or found[CLOSE]:
        tool = tools.find(bare)
        return Head(tool, at) if tool else "text"
    if found[END_KEY]:
        return _without_key_tag(words, tools) or "text"
    return "more" if None in found.values() else "text"


def _without_key_tag(words: str, tools: OfferedTools) -> Head | None:
    """`NAME KEY</arg_key>`, or both in one word, which a known name must part."""
    lead = len(words) - len(words.lstrip(SPACE))
    name, *key = words.split() or [""]
    if key:
        tool = tools.find(name)
    else:
        tool = tools.named_at_start(name)
        name = tool.name if tool else name
    return Head(tool, lead + len(name), repaired=True) if tool else None
