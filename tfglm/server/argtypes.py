"""Arguments of tool calls are untyped text on the wire; a tool's JSON schema says what each of them is.

Text where the schema allows a string, whatever it looks like ("001", "true"); JSON where it does not; without a word
from the schema, objects and arrays are JSON and everything else is text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

Types = frozenset[str]
"""JSON types ("string", "integer", ...) that a schema allows."""

STRING: Types = frozenset({"string"})
_NAMES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_EXACT = 2.0**53
"""Whole floats below this are whole numbers without loss."""
_MAX_DEPTH = 32
"""Of references and unions; a schema may refer to itself."""


def resolve(schema: Any, root: Any) -> Any:
    """The schema that a chain of local references ("#/$defs/Unit") leads to; the schema itself without one."""
    for _ in range(_MAX_DEPTH):
        pointer = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return schema
        schema = root
        for step in pointer[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def allowed_types(schema: Any, root: Any, depth: int = 0) -> Types | None:
    """What values of `schema` may be; None when it does not say. References are looked up in `root`."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    named = schema.get("type")
    if named is not None:
        names = [named] if isinstance(named, str) else named
        known = isinstance(names, list) and all(isinstance(name, str) and name in _NAMES for name in names)
        return frozenset(names) if known and names else None
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*(_types_of(value) for value in schema["enum"])) or None
    if "const" in schema:
        return _types_of(schema["const"])
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            branches = [allowed_types(branch, root, depth + 1) for branch in schema[union]]
            told = [branch for branch in branches if branch is not None]
            return frozenset().union(*told) if told and len(told) == len(branches) else None
    if isinstance(schema.get("allOf"), list):
        told = [types for part in schema["allOf"] if (types := allowed_types(part, root, depth + 1)) is not None]
        return frozenset.intersection(*told) or None if told else None
    return None


def is_plain_text(types: Types | None) -> bool:
    """Whether every text is its own value, so that it can be passed on before it is complete."""
    return types is not None and "string" in types and not types & {"null", "array", "object"}


def typed(text: str, types: Types | None) -> str:
    """The value that an argument's text stands for, as compact JSON. Text that fits no allowed type stays text, for
    the client to refuse: its schema checker says what was wrong, which the model can use.
    """
    try:
        return _dump(_value(text, types))
    except RecursionError:
        return _dump(text)  # nests deeper than can be written


def quoted(text: str) -> str:
    """The text as it stands between the quotes of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, types: Types | None) -> Any:
    bare = text.strip()
    if types is None:
        found = _parse(bare)
        return found if isinstance(found, (dict, list)) else text
    if "string" in types:
        if "null" in types and bare == "null":
            return None
        found = _parse(bare) if types & {"array", "object"} else None
        return found if isinstance(found, (dict, list)) and _fits(found, types) else text
    for candidate in (bare, _WORDS.get(bare, bare), *_closed(bare)):
        try:
            value = _whole(_strict(candidate), types)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str):
            value = _whole(_parse(value.strip(), value), types)
        if _fits(value, types):
            return value
    return text


def _types_of(value: Any) -> Types:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float):
        return frozenset({"number"})
    names = {type(None): "null", str: "string", int: "integer", list: "array", dict: "object"}
    return frozenset({names[type(value)]})


def _fits(value: Any, types: Types) -> bool:
    return bool(_types_of(value) & types) or ("number" in types and type(value) is int)


def _whole(value: Any, types: Types) -> Any:
    """3.0 is a whole number to JSON schema; clients in typed languages need it written as one."""
    if isinstance(value, float) and "number" not in types and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def _closed(text: str) -> list[str]:
    """The text with one closing bracket more, if it begins as an object or array."""
    return [text + _CLOSERS[text[0]]] if text[:1] in _CLOSERS else []


def _parse(text: str, otherwise: Any = None) -> Any:
    try:
        return _strict(text)
    except (ValueError, RecursionError):
        return otherwise


def _strict(text: str) -> Any:
    """The JSON value of a text. Raises ValueError for what RFC 8259 does not know (NaN) or a float cannot hold."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large for a 64-bit float")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape and UTF-8 cannot carry.
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text
