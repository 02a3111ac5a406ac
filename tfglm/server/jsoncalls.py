"""Calls written as JSON between the call tags, as many models were trained to: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from typing import Any

from tfglm.server.argtypes import typed
from tfglm.server.offered import OfferedTools, Tool

_OBJECT = frozenset({"object"})


def calls_in_json(text: str, tools: OfferedTools) -> list[tuple[Tool, str]]:
    """The calls in an object or an array of objects, with their arguments as JSON; none at all unless every one names
    an offered tool and has an object of arguments."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item, tools) for item in (found if isinstance(found, list) else [found])]
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else []


def _call(item: Any, tools: OfferedTools) -> tuple[Tool, str] | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    tool = tools.find(item["name"])
    if tool is None or not tool.offered:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    if not isinstance(arguments, str):
        return None
    # Goes through the same reading as other arguments, so that what is sent is finite, compact and can be encoded.
    written = typed(arguments, _OBJECT)
    return (tool, written) if written.startswith("{") else None
