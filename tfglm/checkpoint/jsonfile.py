"""A JSON object out of a file somebody else wrote: every way it can be broken is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfglm.errors import TfglmError

_LONGEST_SHOWN = 200


def read_object(path: Path, error: type[TfglmError]) -> dict[str, Any]:
    """The JSON object in `path`. Raises `error` naming the file, and the line where it does not parse."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except OSError as exc:
        raise error(f"{path} cannot be read: {exc.strerror}") from None
    return parse_object(data, str(path), error)


def parse_object(data: bytes, source: str, error: type[TfglmError]) -> dict[str, Any]:
    """The JSON object in UTF-8 `data`; repeated keys and NaN/Infinity are refused, since readers disagree on them."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            keys = [key for key, _ in items]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise error(f"{source}: key {shown(repeated)} is given more than once")
        return result

    def constant(word: str) -> Any:
        raise error(f"{source}: {word} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as exc:
        raise error(f"{source} is not UTF-8 text (byte {exc.start})") from None
    except json.JSONDecodeError as exc:
        raise error(f"{source} is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}") from None
    except (RecursionError, ValueError) as exc:  # nesting too deep; an integer of thousands of digits
        raise error(f"{source} is not JSON this program can hold: {exc}") from None
    if not isinstance(value, dict):
        raise error(f"{source} holds a JSON {_kind(value)}; an object is needed")
    return value


def shown(value: object) -> str:
    """A value out of a file for a message: as Python writes it, cut so that the message stays one readable line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
