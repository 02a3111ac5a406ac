"""Frozen dataclasses out of JSON that Ansible wrote: what is missing, misspelt or out of range is named."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import types
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tfglm.checkpoint.jsonfile import shown
from tfglm.errors import ConfigError

T = TypeVar("T")

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def fact(
    doc: str,
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    address: bool = False,
    filled: bool = False,
) -> Any:
    """A documented field. low, high: its range; address: an IPv4 or IPv6 address; filled: text that is not empty."""
    meta = {"doc": doc, "low": low, "high": high, "choices": choices, "address": address, "filled": filled}
    if isinstance(default, type):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


def parse(cls: type[T], raw: object, where: str) -> T:
    """`raw` as a `cls`. where: file and field so far, for messages. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is {shown(raw)}; it takes an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in raw:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(fields)}"
            raise ConfigError(f"{where} has a field {shown(name)} that does not exist{hint}")
    hints = get_type_hints(cls)
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _value(hints[name], raw[name], f"{where}: {name}", f.metadata)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where} lacks {name}: {f.metadata['doc']}")
    return cls(**values)


def _value(kind: Any, raw: object, where: str, meta: Mapping[str, Any]) -> Any:
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ConfigError(f"{where} is {shown(raw)}; it takes a list")
        item = get_args(kind)[0]
        return tuple(_value(item, value, f"{where}[{i}]", meta) for i, value in enumerate(raw))
    if origin is not None:  # Mapping[str, str]
        return types.MappingProxyType(_texts(raw, where))
    if dataclasses.is_dataclass(kind):
        return parse(kind, raw, where)  # type: ignore[arg-type]
    return _scalar(kind, raw, where, meta)


def _texts(raw: object, where: str) -> dict[str, str]:
    """Text by name; numbers and booleans are written as a command line would have them."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is {shown(raw)}; it takes an object")
    texts = {}
    for name, value in raw.items():
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{where}: {name} is {shown(value)}; it takes text or a number")
        texts[name] = str(int(value)) if isinstance(value, bool) else str(value)
    return texts


def _scalar(kind: type, raw: object, where: str, meta: Mapping[str, Any]) -> Any:
    good = isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool))
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        raw, good = float(raw), True
    low, high = meta["low"], meta["high"]
    wanted = _WORDS[kind] if low is None else f"{_WORDS[kind]} from {low} to {high}"
    if meta["choices"]:
        wanted = " or ".join(meta["choices"])
        good = good and raw in meta["choices"]
    if meta["filled"]:
        wanted = "text that is not empty"
        good = good and bool(raw)
    if meta["address"]:
        wanted = "an IP address"
        good = good and _is_address(str(raw))
    if good and low is not None:
        good = low <= raw <= high
    if not good:
        raise ConfigError(f"{where} is {shown(raw)}; it takes {wanted}: {meta['doc']}")
    return raw


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """The JSON that `parse` reads back as the same facts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Every leaf of plain JSON by its path, as text: what two ranks compare to name the field they differ in."""
    if isinstance(value, dict):
        return {path: text for name, item in value.items() for path, text in flat(item, f"{prefix}.{name}").items()}
    if isinstance(value, list):
        return {path: text for i, item in enumerate(value) for path, text in flat(item, f"{prefix}[{i}]").items()}
    return {prefix.removeprefix("."): str(value)}


def table(*classes: type) -> str:
    """Every field of the classes as a Markdown table."""
    rows = ["| object | field | default | what it is |", "|---|---|---|---|"]
    for cls in classes:
        for f in dataclasses.fields(cls):
            missing = f.default is dataclasses.MISSING
            default = "" if missing and f.default_factory is dataclasses.MISSING else f.default
            if missing and f.default_factory is not dataclasses.MISSING:
                default = "its own defaults" if dataclasses.is_dataclass(f.default_factory) else "none"
            elif missing:
                default = "required"
            meta = f.metadata
            span = f" ({meta['low']} to {meta['high']})" if meta["low"] is not None else ""
            span = f" ({', '.join(meta['choices'])})" if meta["choices"] else span
            default = "none" if default == () else default
            rows.append(
                f"| {cls.__name__} | `{f.name}` | {default if default != '' else 'empty'} | {meta['doc']}{span} |"
            )
    return "\n".join(rows)
