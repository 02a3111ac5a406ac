"""Chat messages as clients send them -> chat messages as templates expect them.

Every rule here is a defect that clients of other servers have met: `null` printed as "None", arguments given as text,
reasoning under another name, roles that a template silently skips.
"""

from __future__ import annotations

import json
from typing import Any

from tfglm.server.errors import invalid, unsupported
from tfglm.server.jsontext import kind_of, shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_TOOLS = 128
MAX_MESSAGES = 20_000
"""Templates look back and forth between messages, so their time grows with the square of the number."""
UNREADABLE = "arguments"
"""The argument that holds the text of a call's arguments where that is not the JSON text of an object."""


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New messages with only the keys that templates read. Raises ApiError naming the message and the part."""
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are accepted")
    return [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalise_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool definitions, unchanged: the template prints the client's own keys in the client's order."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries; at most {MAX_TOOLS} are accepted")
    for i, tool in enumerate(tools or []):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise unsupported(f"{where}.type", f"{where}.type is {shown(tool['type'])}; only 'function' is supported")
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise invalid(f"{where}.function", f"{where}.function must be an object, not {kind_of(function)}")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise invalid(f"{where}.function.name", f"{where}.function.name must be a non-empty string")
    return tools or []


def _normalise(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if message.get("function_call") is not None:
        raise unsupported(f"{where}.function_call", f"{where}.function_call is not supported; send tool_calls")
    content = message.get("content")
    if content is None and role not in ("assistant", "tool"):
        raise invalid(f"{where}.content", f"{where}.content is missing; a {role} message needs text")
    result: dict[str, Any] = {"role": ROLES[role], "content": _content(content, role, f"{where}.content")}
    if role == "assistant":
        reasoning = _reasoning(message, where)
        if reasoning is not None:
            result["reasoning_content"] = reasoning
        calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
        if calls:
            result["tool_calls"] = calls
    if role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id must be a string, not {kind_of(call_id)}")
        result["tool_call_id"] = call_id or ""
    return result


def _content(content: Any, role: str, where: str) -> str | list[Any]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a string or an array of parts, not {kind_of(content)}")
    if role == "tool" and content and all(isinstance(part, dict) and "output" in part for part in content):
        # Several results in one message, which templates print one by one.
        return [{**part, "output": _content(part["output"], "", f"{where}.output")} for part in content]
    if role == "tool" and content and all(isinstance(p, dict) and p.get("type") == "tool_reference" for p in content):
        return content  # names of deferred tools, which templates print in full
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(where, f"{where} must be an object with a type, not {kind_of(part)}")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{where}.type", f"{where}.type is {shown(kind)}; this model reads only 'text' parts")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"{where}.{kind}", f"{where}.{kind} must be a string, not {kind_of(text)}")
    return text


def _reasoning(message: dict[str, Any], where: str) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if isinstance(value, str):
            return value
        if value is not None:
            raise invalid(f"{where}.{name}", f"{where}.{name} must be a string, not {kind_of(value)}")
    details = message.get("reasoning_details")
    if not isinstance(details, list):
        return None
    texts = [part["text"] for part in details if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if texts else None


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise invalid(where, f"{where} must be an array, not {kind_of(calls)}")
    result = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise invalid(f"{at}.function", f"{at} must be an object with a function that has a name")
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise invalid(f"{at}.id", f"{at}.id must be a string, not {kind_of(call_id)}")
        arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
        function = {"name": name, "arguments": arguments}
        result.append({"id": call_id or "", "type": "function", "function": function})
    return result


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Templates need a mapping; the API carries its JSON text. Of a call that was cut off it is sent back as it came,
    often with the client's complaint as its result: the model reads it as one argument."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise invalid(where, f"{where} must be the JSON text of an object, not {kind_of(arguments)}")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {UNREADABLE: arguments}
