"""`tool_choice`: which of the tools the model is shown. Choices that would have to be enforced are refused."""

from __future__ import annotations

from typing import Any

from tfglm.server.errors import ApiError, invalid, unsupported
from tfglm.server.jsontext import kind_of, shown

NAME_FORM = '{"type": "function", "function": {"name": ...}}'


def chosen_tools(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """Those of the checked tools that `choice` offers. Raises ApiError for choices that cannot be kept."""
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return []
    if choice == "required":
        raise _unenforced("tool_choice", "'required'")
    if isinstance(choice, dict) and choice.get("type") == "function":
        raise _unenforced("tool_choice", f"of the function {shown(_name(choice))}")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice.get("allowed_tools", choice))
    raise invalid(
        "tool_choice", f"tool_choice is {shown(choice)}; it must be 'auto', 'none' or an object of type 'allowed_tools'"
    )


def _allowed(tools: list[dict[str, Any]], allowed: Any) -> list[dict[str, Any]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise invalid(where, f"{where} must be an object, not {kind_of(allowed)}")
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    if mode == "required":
        raise _unenforced(f"{where}.mode", "'required'")
    if mode != "auto":
        raise invalid(f"{where}.mode", f"{where}.mode is {shown(mode)}; it must be 'auto'")
    if not isinstance(listed, list) or not listed:
        raise invalid(f"{where}.tools", f"{where}.tools must be an array of at least one tool")
    names = set()
    known = {tool.get("function", tool)["name"] for tool in tools}
    for i, item in enumerate(listed):
        name = _name(item)
        if name is None:
            raise invalid(f"{where}.tools[{i}]", f"{where}.tools[{i}] must name a tool, as in {NAME_FORM}")
        if name not in known:
            raise invalid(
                f"{where}.tools[{i}]", f"{where}.tools[{i}] names {shown(name)}, which is not among the tools"
            )
        names.add(name)
    return [tool for tool in tools if tool.get("function", tool)["name"] in names]


def _name(item: Any) -> str | None:
    """The tool that a reference names, in either of the two forms that OpenAI's interfaces use."""
    function = item.get("function", item) if isinstance(item, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _unenforced(param: str, what: str) -> ApiError:
    return unsupported(param, f"a tool_choice {what} cannot be enforced yet; use 'auto', which leaves it to the model")
