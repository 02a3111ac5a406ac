"""The tools that a request offers, as the reader of its reply's calls needs them: names, types of arguments, and which
arguments a call must have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfglm.server.argtypes import Types, allowed_types, resolve

_UNOFFERED = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that a call to no offered tool may have; clients answer those with "unknown tool"."""


@dataclass(frozen=True)
class Tool:
    """`types` of an argument is None where the schema says nothing; `offered` False: nothing is known of the tool."""

    name: str
    types: Mapping[str, Types | None] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    offered: bool = True


class OfferedTools:
    def __init__(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        """definitions: checked tools of a request, each in its own form or wrapped as {"function": ...}."""
        tools = [_tool(definition.get("function", definition)) for definition in definitions]
        self._by_name = {tool.name: tool for tool in tools}
        self._by_folded_name = {tool.name.casefold(): tool for tool in reversed(tools)}
        self._longest_first = sorted(self._by_name, key=len, reverse=True)
        self._odd = [name for name in self._by_name if not _UNOFFERED.fullmatch(name)]

    def find(self, name: str) -> Tool | None:
        """The tool that a written name means: its exact name, or its name in other letter case, or a tool that was not
        offered. None for what cannot be a tool's name."""
        tool = self._by_name.get(name) or self._by_folded_name.get(name.casefold())
        if tool is None and _UNOFFERED.fullmatch(name):
            tool = Tool(name, offered=False)
        return tool

    def named_at_start(self, text: str) -> Tool | None:
        """The tool with the longest offered name that `text` begins with and goes on after."""
        for name in self._longest_first:
            if len(name) < len(text) and text.startswith(name):
                return self._by_name[name]
        return None

    def may_begin(self, text: str) -> bool:
        """Whether `text` begins an offered name that is written in other signs than names usually are."""
        folded = text.casefold()
        return any(name.casefold().startswith(folded) for name in self._odd)


def _tool(function: Mapping[str, Any]) -> Tool:
    """Schemas are the client's; whatever is wrong with one leaves its arguments untyped."""
    root = function.get("parameters")
    schema = resolve(root, root)
    if not isinstance(schema, Mapping):
        return Tool(function["name"])
    properties, required = schema.get("properties"), schema.get("required")
    types = (
        {key: allowed_types(value, root) for key, value in properties.items()}
        if isinstance(properties, Mapping)
        else {}
    )
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return Tool(function["name"], types, frozenset(names))
