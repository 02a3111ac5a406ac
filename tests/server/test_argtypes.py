"""Text of arguments -> JSON values by a tool's schema: every row of the rules, and whatever else comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfglm.server.argtypes import allowed_types, is_plain_text, quoted, typed
from tfglm.server.offered import OfferedTools

ROOT: dict[str, Any] = {
    "$defs": {
        "Unit": {"enum": ["c", "f"]},
        "Place": {"type": "object"},
        "Again": {"$ref": "#/$defs/Unit"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}]},
        "a/b": {"type": "boolean"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "array"}, {"enum": [1, 2.5]}]}, {"array", "integer", "number"}),
        ({"enum": ["a", None, True]}, {"string", "null", "boolean"}),
        ({"const": 3}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/Unit"}, {"description": "x"}]}, {"string"}),
        ({"$ref": "#/$defs/Place"}, {"object"}),
        ({"$ref": "#/$defs/Again"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({}, None),
        (True, None),
        (None, None),
        ({"type": "text"}, None),
        ({"type": []}, None),
        ({"type": {}}, None),
        ({"enum": []}, None),
        ({"anyOf": []}, None),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{}]}, None),
        ({"$ref": "#/$defs/Nowhere"}, None),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/Tree"}, None),
        ({"$ref": "http://elsewhere/schema"}, None),
        ({"$ref": 5}, None),
    ],
)
def test_what_a_schema_allows(schema: Any, types: set[str] | None) -> None:
    assert allowed_types(schema, ROOT) == types


def test_a_tool_reads_its_schema_through_references() -> None:
    parameters = {
        "$ref": "#/$defs/Args",
        "$defs": {"Args": {"properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}, "N": {"type": "integer"}},
    }
    tool = OfferedTools([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).find("f")
    assert tool is not None and tool.types == {"n": {"integer"}} and tool.required == {"n"}


@pytest.mark.parametrize("parameters", [None, [], "x", {"properties": 3}, {"required": 5}, {"required": [1, {}]}])
def test_a_schema_that_is_none_leaves_arguments_untyped(parameters: Any) -> None:
    tool = OfferedTools([{"name": "f", "parameters": parameters}]).find("f")
    assert tool is not None and not tool.types and not tool.required


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        # With strings: as written.
        (" 001 ", {"string"}, " 001 "),
        ("null", {"string"}, "null"),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        (" null\n", {"string", "null"}, None),
        ("nullable", {"string", "null"}, "nullable"),
        ("[1, 2]", {"string", "array"}, [1, 2]),
        ("[1, 2", {"string", "array"}, "[1, 2"),
        ('{"a": 1}', {"string", "array"}, '{"a": 1}'),
        ("123", {"string", "integer"}, "123"),
        ("true", {"string", "boolean"}, "true"),
        # Without strings: JSON.
        (" 5\n", {"integer"}, 5),
        ("-0.5e1", {"number"}, -5.0),
        ("5", {"number"}, 5),
        ("3.0", {"integer"}, 3),
        ("3.5", {"integer"}, "3.5"),
        ('"5"', {"integer"}, 5),
        ('"x"', {"integer"}, '"x"'),
        ("True", {"boolean"}, True),
        ("False", {"boolean", "null"}, False),
        ("None", {"boolean", "null"}, None),
        ("None", {"boolean"}, "None"),
        ("true", {"integer"}, "true"),
        ("1", {"boolean"}, "1"),
        ("[1, [2]", {"array"}, [1, [2]]),
        ('{"a": [1]', {"object"}, {"a": [1]}),
        ('{"a": [1', {"object"}, '{"a": [1'),
        ("[1]", {"object"}, "[1]"),
        ("five", {"integer"}, "five"),
        ("", {"integer"}, ""),
        ("NaN", {"number"}, "NaN"),
        ("-Infinity", {"number"}, "-Infinity"),
        ("1e999", {"number"}, "1e999"),
        ("007", {"integer"}, "007"),
        ("0x10", {"integer"}, "0x10"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        # Without a word from the schema: objects and arrays only.
        ('{"a": "b"}', None, {"a": "b"}),
        (" [1, null] ", None, [1, None]),
        ("5", None, "5"),
        ("true", None, "true"),
        ('"x"', None, '"x"'),
        (" x ", None, " x "),
        ("[NaN]", None, "[NaN]"),
        ("[" * 100_000, None, "[" * 100_000),
        ("[" * 900 + "]" * 900, {"integer"}, "[" * 900 + "]" * 900),
    ],
)
def test_values(text: str, types: set[str] | None, value: Any) -> None:
    written = typed(text, None if types is None else frozenset(types))
    read = json.loads(written)
    assert read == value and type(read) is type(value)


def test_what_is_written_is_compact_and_plain() -> None:
    assert typed('{"ü": [1, {"b" : "☃"}]}', frozenset({"object"})) == '{"ü":[1,{"b":"☃"}]}'
    assert typed('{"a": "\\ud800"}', None).encode() == b'{"a":"\\ud800"}'


def test_only_texts_that_are_their_own_value_may_stream() -> None:
    assert is_plain_text(frozenset({"string"})) and is_plain_text(frozenset({"string", "integer"}))
    for types in (None, {"integer"}, {"string", "null"}, {"string", "array"}, {"string", "object"}):
        assert not is_plain_text(None if types is None else frozenset(types))


TYPES = st.none() | st.frozensets(
    st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"]), min_size=1
)
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_a_value_comes_back_from_what_the_template_writes(value: Any) -> None:
    """Templates write strings as they are and everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    read = json.loads(typed(text, frozenset({NAMES.get(type(value), "object")})))
    assert read == value and type(read) is type(value)


@given(st.text(), TYPES)
def test_any_text_becomes_a_value(text: str, types: frozenset[str] | None) -> None:
    written = typed(text, types)
    json.loads(written)
    written.encode()


@given(st.lists(st.text()))
def test_pieces_of_a_string_are_escaped_one_by_one(pieces: list[str]) -> None:
    assert json.loads('"' + "".join(map(quoted, pieces)) + '"') == "".join(pieces)
