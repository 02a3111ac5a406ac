"""The part of JSON Schema that the suites use: enough to say of a value where it breaks its schema."""

from __future__ import annotations

from typing import Any

from tfglm.checks.problem import Json, dumps, same

_KNOWN = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "minimum",
    "maximum",
    "description",
}


def broken(value: Any, schema: Json, at: str = "the object") -> str | None:
    """What is wrong with the value, naming the place, or None. `additionalProperties` may only be false."""
    unknown = schema.keys() - _KNOWN
    if unknown:
        raise ValueError(f"{at}: the schema has {sorted(unknown)}, which this check does not know")
    if "enum" in schema and not any(same(value, choice) for choice in schema["enum"]):
        return f"{at} is {dumps(value)[:80]}, not one of {dumps(schema['enum'])}"
    types = schema.get("type")
    if types is not None and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        return f"{at} is {dumps(value)[:80]}, not of type {types}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            return f"{at} is {value}, below {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{at} is {value}, above {schema['maximum']}"
    if isinstance(value, list) and "items" in schema:
        found = (broken(item, schema["items"], f"{at}[{n}]") for n, item in enumerate(value))
        return next((fault for fault in found if fault), None)
    return _fields(value, schema, at) if isinstance(value, dict) else None


def _fields(value: Json, schema: Json, at: str) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            return f"{at} lacks {name!r}"
    for name, item in value.items():
        if name in properties:
            fault = broken(item, properties[name], f"{at}.{name}")
            if fault:
                return fault
        elif schema.get("additionalProperties") is False:
            return f"{at} has {name!r}, which the schema does not know"
    return None


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[name])
