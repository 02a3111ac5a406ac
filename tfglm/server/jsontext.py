"""JSON in and out: bodies are read strictly (RFC 8259, no NaN, no lone surrogates), replies are written compactly."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Nesting that a body may have; deeper ones are attacks on recursion, not requests."""


class BadJsonError(ValueError):
    """A body that is not one JSON object; the message says where and why."""


def load_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Every string in it can be encoded as UTF-8 and every number is finite."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadJsonError(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    except RecursionError:
        raise BadJsonError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise BadJsonError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadJsonError(f"the body must be a JSON object, not {kind_of(value)}")
    _check(value)
    return value


def dump_text(value: Any) -> str:
    """Compact JSON. U+2028, U+2029 and U+0085 are escaped: some clients split streams there as if at newlines."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if text.isascii():
        return text
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def dump_bytes(value: Any) -> bytes:
    return dump_text(value).encode()


def kind_of(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """A client's value for a message: as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(root: dict[str, Any]) -> None:
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                for key in container:
                    _check_text(key)
                container = container.values()
            for item in container:
                if isinstance(item, str):
                    _check_text(item)
                elif isinstance(item, float):
                    if not math.isfinite(item):
                        raise BadJsonError("a number in the body is too large for a 64-bit float")
                elif isinstance(item, (list, dict)):
                    inner.append(item)
        if not inner:
            return
        level = inner
    raise BadJsonError(f"the body nests deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        unit = ord(text[error.start])
        raise BadJsonError(
            f"a string in the body holds the lone surrogate \\u{unit:04x}; pairs must be whole"
        ) from None
