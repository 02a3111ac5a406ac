"""Text of answers -> text and tool calls: every rule of the format, every slip that is mended, any cut of the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfglm.server.markup import TAGS
from tfglm.server.offered import OfferedTools
from tfglm.server.template import ChatTemplate
from tfglm.server.thoughts import ThoughtCalls
from tfglm.server.toolcalls import CallArguments, CallParser, CallStart, Part, Text


def tool(name: str, required: Sequence[str] = (), /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = OfferedTools(
    [
        tool("now"),
        tool("read", ["path"], path=STRING, lines=INTEGER),
        tool("readme"),
        tool(
            "write",
            ["path", "text"],
            path=STRING,
            text=STRING,
            tags={"type": "array"},
            mode={"type": ["string", "null"]},
        ),
        tool("my.tool v2", x={}),
    ]
)


def arg(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def call(name: str, *args: str) -> str:
    return f"<tool_call>{name}{''.join(args)}</tool_call>"


READ = call("read", arg("path", "/a b"))
IS_READ = ("read", '{"path":"/a b"}')
Message = tuple[str, list[tuple[str, str]]]


def message(parts: list[Part]) -> Message:
    """What a client makes of the parts."""
    text = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Text):
            text += part.text
        elif isinstance(part, CallStart):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        else:
            assert part.text
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.text)
    return text, calls


def read(pieces: Sequence[str], *, ended: bool = True, **options: Any) -> tuple[Message, list[str]]:
    parser = CallParser(TOOLS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish(ended)
    return message(parts), list(parser.results)


WELL_FORMED: list[tuple[str, str, list[tuple[str, str]]]] = [
    (call("now"), "", [("now", "{}")]),
    (READ, "", [IS_READ]),
    (READ + call("now"), "", [IS_READ, ("now", "{}")]),
    (f"Let me look.\n{READ}", "Let me look.\n", [IS_READ]),
    (f"{READ}\nThat was it.", "\nThat was it.", [IS_READ]),
    (f"a{READ}b{call('now')}c", "abc", [IS_READ, ("now", "{}")]),
    # White space by itself is no text.
    (f"\n\n{READ}\n{call('now')}\n", "", [IS_READ, ("now", "{}")]),
    (f"a{READ}\n", "a", [IS_READ]),
    ("  \n hello", "  \n hello", []),
    ("  \n ", "", []),
    # GLM-4.5's newlines.
    (
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>/x</arg_value>\n<arg_key> text </arg_key>\n"
        "<arg_value>a\nb\n</arg_value>\n</tool_call>",
        "",
        [("write", '{"path":"/x","text":"a\\nb\\n"}')],
    ),
    (call("\n now \n"), "", [("now", "{}")]),
    # Types.
    (call("read", arg("path", "007"), arg("lines", " 12 ")), "", [("read", '{"path":"007","lines":12}')]),
    (
        call("write", arg("path", ""), arg("text", '"\\\u2028é🙂')),
        "",
        [("write", '{"path":"","text":"\\"\\\\\u2028é🙂"}')],
    ),
    (call("write", arg("mode", "null"), arg("tags", "[1, 2")), "", [("write", '{"mode":null,"tags":[1,2]}')]),
    (call("now", arg("x", '{"a": 1}'), arg("y", "5")), "", [("now", '{"x":{"a":1},"y":"5"}')]),
    # A value may hold any tag but its own.
    (
        call("read", arg("path", "<tool_call>a</tool_call><arg_key>b</arg_key><arg_value>")),
        "",
        [("read", '{"path":"<tool_call>a</tool_call><arg_key>b</arg_key><arg_value>"}')],
    ),
    (call("read", arg("path", "a</arg_valu</arg_value")), "", [("read", '{"path":"a</arg_valu</arg_value"}')]),
    # Names.
    (call("READ", arg("path", "x")), "", [("read", '{"path":"x"}')]),
    (call("other_tool-1", arg("a", "1")), "", [("other_tool-1", '{"a":"1"}')]),
    (call("my.tool v2"), "", [("my.tool v2", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), WELL_FORMED)
def test_well_formed(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for ended in (True, False):
        assert read([text], ended=ended) == ((content, calls), ["ok"] * len(calls))
    assert read(list(text)) == ((content, calls), ["ok"] * len(calls))


PROSE = [
    "The tag <tool_call> opens a call.",
    "Write `<tool_call>` and then `</tool_call>`.",
    "<tool_call>\n",
    "<tool_call>",
    "<tool_call>two words</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call> </tool_call>",
    "<tool_call><arg_key>a</arg_key></tool_call>",
    "<tool_call>" + "x" * 65 + "</tool_call>",
    "<tool_call>näme</tool_call>",
    "<tool_call>a.b</tool_call>",
    "<tool_call>now<b></tool_call>",
    "<tool_call>unknown",
    "<tool_call>path</arg_key><arg_value>x</arg_value></tool_call>",
    "<tool_call>" + " " * 600 + "now</tool_call>",
    "<tool_call>" + " " * 514 + '{"name": "now"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"x": "<tool_call>"}}</tool_call>',
    "</tool_call></arg_value><arg_key>",
    "<tool_call></arg_key>",
    "<tool_call>read",
    "<tool_call>read</arg_key><arg_value>x</arg_value></tool_call>",
    "a < b, <tool, <tool_call",
    '<tool_call>{"a": 1}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": []}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {}',
    "<tool_call>[]</tool_call>",
    "<tool_call>" + "[" * 70_000 + "</tool_call>",
    '{"name": "now", "arguments": {}}',
]


@pytest.mark.parametrize("text", PROSE, ids=range(len(PROSE)))
def test_markup_that_is_only_spoken_of_is_text(text: str) -> None:
    for prose in (text, f"So: {text} {text}"):
        assert read([prose]) == read([prose[:600], *prose[600:2000], prose[2000:]]) == ((prose, []), [])
        assert read(list(prose[:600]), ended=False)[0][1] == []
        assert read([prose], ended=False) == ((prose, []), [])


def test_a_call_after_a_mention() -> None:
    assert read([f"Use <tool_call> like this: <tool_call>{READ}"]) == (
        ("Use <tool_call> like this: <tool_call>", [IS_READ]),
        ["ok"],
    )


MENDED = [
    # `<arg_key>` is missing.
    ("<tool_call>read path</arg_key><arg_value>/a b</arg_value></tool_call>", [IS_READ]),
    ("<tool_call>readpath</arg_key><arg_value>/a b</arg_value></tool_call>", [IS_READ]),
    ("<tool_call>readmepath</arg_key><arg_value>/a b</arg_value></tool_call>", [("readme", '{"path":"/a b"}')]),
    (
        call("read", arg("path", "/a b"), "\nlines</arg_key><arg_value>3</arg_value>"),
        [("read", '{"path":"/a b","lines":3}')],
    ),
    # `<arg_value>` is missing.
    (call("read", "<arg_key>path</arg_key>/a b</arg_value>"), [IS_READ]),
    (call("read", "<arg_key>path</arg_key>\n/a b</arg_value>"), [IS_READ]),
    (call("read", "<arg_key>path</arg_key><b>x</arg_value>"), [("read", '{"path":"<b>x"}')]),
    (call("read", "<arg_key>path</arg_key></arg_value>"), [("read", '{"path":""}')]),
    (call("read", arg("path", "x"), "<arg_key>lines</arg_key> 4</arg_value>"), [("read", '{"path":"x","lines":4}')]),
    # `</tool_call>` is missing before the next call.
    ("<tool_call>read" + arg("path", "/a b") + READ, [IS_READ, IS_READ]),
    # The call is JSON.
    ('<tool_call>\n{"name": "read", "arguments": {"path": "/a b"}}\n</tool_call>', [IS_READ]),
    ('<tool_call>{"name": "Read", "arguments": "{\\"path\\": \\"/a b\\"}"}</tool_call>', [IS_READ]),
    (
        '<tool_call>[{"name": "now"}, {"name": "read", "parameters": {"path": "/a b"}}]</tool_call>',
        [("now", "{}"), IS_READ],
    ),
]


@pytest.mark.parametrize(("text", "calls"), MENDED)
def test_slips_are_mended(text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        (content, found), results = read(pieces)
        assert (content, found) == ("", calls)
        assert "repaired" in results and {"ok", "repaired"}.issuperset(results)


@pytest.mark.parametrize("end", ["", "\n", "</tool", " </tool_call"])
def test_the_end_of_the_reply_closes_a_call_that_has_all_it_needs(end: str) -> None:
    assert read(["<tool_call>read" + arg("path", "/a b") + end]) == (("", [IS_READ]), ["repaired"])
    if not end.strip():
        assert read(["<tool_call>now" + end]) == (("", [("now", "{}")]), ["repaired"])


UNFINISHED = [
    # (text, whether the model ended it, content, arguments)
    ("<tool_call>read" + arg("path", "/a b"), False, "", '{"path":"/a b"'),
    ("<tool_call>write" + arg("path", "/a b"), True, "", '{"path":"/a b"'),
    ("<tool_call>other" + arg("path", "/a b"), True, "", '{"path":"/a b"'),
    ("<tool_call>read<arg_key>path</arg_key><arg_value>/a", True, "", '{"path":"/a'),
    ("<tool_call>read<arg_key>path</arg_key><arg_value>/a</arg_v", False, "", '{"path":"/a</arg_v'),
    ("<tool_call>read<arg_key>lines</arg_key><arg_value>1}", False, "", '{"lines":"1}'),
    ("<tool_call>write<arg_key>tags</arg_key><arg_value>[1, 2]", False, "", '{"tags":"[1, 2]'),
    ("<tool_call>read<arg_key>pa", False, "", "{"),
    ("<tool_call>read<arg_key>pa", True, "<arg_key>pa", "{"),
    ("<tool_call>read<arg_key>path</arg_key>", True, "<arg_key>path</arg_key>", "{"),
    ("<tool_call>read<arg_key>path</arg_key>x", False, "", "{"),
    (
        "<tool_call>read<arg_key>path</arg_key>x</tool_call> a</arg_value>",
        True,
        "<arg_key>path</arg_key>x</tool_call> a</arg_value>",
        "{",
    ),
    # Nonsense in the middle is text, and so is what follows.
    ("<tool_call>read" + arg("path", "x") + "oops, sorry", True, "oops, sorry", '{"path":"x"'),
    ("<tool_call>read" + arg("path", "x") + "oops</tool_call>", True, "oops</tool_call>", '{"path":"x"'),
    (call("read", arg("path", "x"), "<b>"), True, "<b></tool_call>", '{"path":"x"'),
    (call("read", arg("path", "x"), arg("path", "y")), True, arg("path", "y") + "</tool_call>", '{"path":"x"'),
    (call("read", arg("", "y")), True, arg("", "y") + "</tool_call>", "{"),
    (call("read", "<arg_key>a</arg_key>"), True, "<arg_key>a</arg_key></tool_call>", "{"),
    (call("read", "<arg_key>a</arg_key>x"), True, "<arg_key>a</arg_key>x</tool_call>", "{"),
    (call("read", "<arg_key>a<b></arg_key>"), True, "<arg_key>a<b></arg_key></tool_call>", "{"),
    ("<tool_call>read<arg_key>" + "k" * 2000, True, "<arg_key>" + "k" * 2000, "{"),
]


@pytest.mark.parametrize(("text", "ended", "content", "arguments"), UNFINISHED)
def test_unfinished_calls_cannot_be_run(text: str, ended: bool, content: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        (found, calls), results = read(pieces, ended=ended)
        assert found == content and [call[1] for call in calls] == [arguments]
        assert results in (["malformed"], ["truncated"])
    with pytest.raises(ValueError, match=r"."):
        json.loads(arguments)


def test_a_call_after_an_unfinished_one() -> None:
    text = "<tool_call>write" + arg("path", "x") + READ
    assert read([text]) == (("", [("write", '{"path":"x"'), IS_READ]), ["malformed", "ok"])


def test_what_cannot_be_a_head_is_not_held() -> None:
    for text in ("<tool_call>" + " " * 600, "<tool_call> is a tag", "<tool_call>`"):
        assert message(CallParser(TOOLS).feed("." + text))[0] == "." + text


def test_a_name_that_was_cut_off_is_no_call() -> None:
    assert read(["<tool_call>now"], ended=False) == (("<tool_call>now", []), [])


def test_a_call_after_a_broken_one() -> None:
    text = call("read", arg("path", "x"), "oops") + READ
    assert read([text]) == (("oops</tool_call>", [("read", '{"path":"x"'), IS_READ]), ["malformed", "ok"])


def test_only_the_first_call() -> None:
    text = f"Now: {READ} and {call('now')}"
    parser = CallParser(TOOLS, only_first=True)
    parts = parser.feed(text) + parser.finish(ended=False)
    assert message(parts) == ("Now: ", [IS_READ])
    assert parser.first_end == text.index(" and") and not parser.in_text
    both = '<tool_call>[{"name": "now"}, {"name": "readme"}]</tool_call>'
    assert read([both], only_first=True)[0] == ("", [("now", "{}")])


def test_the_name_and_every_piece_of_a_string_come_at_once() -> None:
    parser = CallParser(TOOLS)
    assert parser.feed("<tool_call>write") == []
    assert parser.feed("<arg_key>") == [CallStart(0, "write")]
    assert parser.feed("path</arg_key><arg_value>") == [CallArguments(0, '{"path":"')]
    assert parser.feed('a"') == [CallArguments(0, 'a\\"')]
    assert parser.feed("b</") == [CallArguments(0, "b")]
    assert parser.feed("c") == [CallArguments(0, "</c")]
    assert parser.feed("</arg_value><arg_key>tags</arg_key><arg_value>[1,") == [CallArguments(0, '","tags":')]
    assert parser.feed("2]</arg_value>") == [CallArguments(0, "[1,2]")]
    assert parser.feed("</tool_call>") == [CallArguments(0, "}")]


def test_a_long_value_is_passed_on_and_not_kept() -> None:
    parser = CallParser(TOOLS)
    parser.feed("<tool_call>write<arg_key>text</arg_key><arg_value>")
    for _ in range(20_000):
        (part,) = parser.feed("0123456789abcdef")
        assert part == CallArguments(0, "0123456789abcdef")
        assert len(parser._buffer) < 16 and not parser._value


# --- any text, any cut

WORDS = st.sampled_from(
    [
        *TAGS,
        "now",
        "read",
        "readpath",
        "path",
        "lines",
        "other",
        " ",
        "\n",
        "<",
        "</",
        '{"name": "now"}',
        "é🙂",
        '"',
        "\\",
        "12",
        "[1",
        "<think>",
        READ,
        call("now"),
        arg("path", "x"),
        arg("lines", "2"),
    ]
)
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=24).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.booleans(), st.booleans())
def test_any_cut_of_any_text_gives_the_same_message(pieces: list[str], ended: bool, only_first: bool) -> None:
    whole = read(["".join(pieces)], ended=ended, only_first=only_first)
    assert read(pieces, ended=ended, only_first=only_first) == whole
    assert read(list("".join(pieces)), ended=ended, only_first=only_first) == whole


@given(cut_texts(), st.booleans())
def test_complete_calls_have_an_object_of_arguments_and_others_none(pieces: list[str], ended: bool) -> None:
    (_, calls), results = read(pieces, ended=ended)
    for (name, arguments), result in zip(calls, results, strict=True):
        assert name
        if result in ("ok", "repaired"):
            assert isinstance(json.loads(arguments), dict)
        else:
            with pytest.raises(ValueError, match=r"."):
                json.loads(arguments)


@given(cut_texts())
def test_text_is_kept_in_its_place(pieces: list[str]) -> None:
    """Every part of the content stands in the text where its start says, in order and without overlap."""
    parser, text = CallParser(TOOLS), "".join(pieces)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish(ended=True)
    end = 0
    for part in parts:
        if isinstance(part, Text):
            assert part.start >= end and text[part.start :].startswith(part.text)
            end = part.start + len(part.text)


LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1)


@given(st.lists(LETTERS, max_size=10))
def test_text_without_tags_is_never_touched(words: list[str]) -> None:
    text = "<".join(words)
    (content, calls), _ = read(list(text), ended=False)
    assert not calls and (content == text or not text.strip())


NAMES = st.text(st.sampled_from("abcXYZ_-019"), min_size=1, max_size=64)
KEYS = LETTERS.map(str.strip).filter(bool)
VALUES = LETTERS | st.integers() | st.booleans() | st.lists(st.integers()) | st.dictionaries(LETTERS, st.none())


@given(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3), st.data())
def test_calls_come_back_from_the_template(template: ChatTemplate, made: list[Any], data: st.DataObject) -> None:
    """The template writes calls into a prompt; read as a reply, they are what was written."""
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
    named = dict(made)
    tools = [
        tool(name, **{key: {"type": kinds[type(value)]} for key, value in args.items()}) for name, args in named.items()
    ]
    calls = [{"id": str(i), "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(named.items())]
    text = template.render([{"role": "assistant", "content": "", "tool_calls": calls}], add_generation_prompt=False)
    text = text.partition("</think>")[2]
    parser = CallParser(OfferedTools(tools))
    at = data.draw(st.integers(0, len(text)))
    content, found = message(parser.feed(text[:at]) + parser.feed(text[at:]) + parser.finish(ended=True))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == list(named.items())


# --- calls in a think block that is never closed


def think(pieces: Sequence[str], *, closed: bool = False) -> tuple[str, Message]:
    thoughts = ThoughtCalls(TOOLS)
    text = "".join(thoughts.feed(piece) for piece in pieces)
    if closed:
        return text + thoughts.close(), ("", [])
    rest, parts, _ = thoughts.finish()
    return text + rest, message(parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "calls"),
    [
        (f"I must look. {READ}", "I must look. ", [IS_READ]),
        (f"I must look. {READ}\n{call('now')}\n", "I must look. ", [IS_READ, ("now", "{}")]),
        (f"Not {READ} but\n{call('now')}", f"Not {READ} but\n", [("now", "{}")]),
        ("Now <tool_call>now", "Now ", [("now", "{}")]),
        (f"The tag <tool_call> and {call('now')}", "The tag <tool_call> and ", [("now", "{}")]),
        ("<tool_call>read<arg_key>x" + READ, "<tool_call>read<arg_key>x", [IS_READ]),
        (f"I could {READ} or not", f"I could {READ} or not", []),
        (call("write", arg("path", "x")) + "<tool_call>", call("write", arg("path", "x")) + "<tool_call>", []),
        (
            "<tool_call>read<arg_key>path</arg_key><arg_value>x",
            "<tool_call>read<arg_key>path</arg_key><arg_value>x",
            [],
        ),
        ("<tool_c", "<tool_c", []),
        ("", "", []),
    ],
)
def test_calls_at_the_end_of_an_open_think_block(text: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert think(pieces) == (reasoning, ("", calls))
        assert think(pieces, closed=True) == (text, ("", []))


@given(cut_texts())
def test_any_cut_of_any_thought_gives_the_same(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = think([text])
    assert think(pieces) == whole == think(list(text))
    assert text.startswith(whole[0]) and (whole[1][1] or whole[0] == text)
    assert think(pieces, closed=True)[0] == text


@pytest.mark.parametrize("begin", ["", '<tool_call>{"', "<tool_call>read<arg_key>path</arg_key>"])
@pytest.mark.parametrize(
    "loop", ["<tool_call>", '<tool_call>{"', "<tool_call>read<arg_key>", "<tool_call> ", READ + " or "]
)
def test_a_model_that_repeats_itself_is_not_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch, begin: str, loop: str
) -> None:
    """Text of a trial that came to nothing is scanned once more for the next, but only what lies behind its slip."""
    fed = 0

    class Counting(CallParser):
        def feed(self, text: str) -> list[Part]:
            nonlocal fed
            fed += len(text)
            return super().feed(text)

    monkeypatch.setattr("tfglm.server.thoughts.CallParser", Counting)
    text = begin + loop * 2000
    for pieces in ([text], [text[i : i + 5] for i in range(0, len(text), 5)]):
        fed = 0
        thoughts = ThoughtCalls(TOOLS)
        for piece in pieces:
            thoughts.feed(piece)
        assert 0 < fed < 8 * len(text)


def test_thinking_flows_on_behind_a_mention() -> None:
    thoughts = ThoughtCalls(TOOLS)
    assert thoughts.feed(f"I could {READ}") == "I could "
    assert thoughts.feed(" or") == f"{READ} or"
    assert thoughts.feed(" wait") == " wait"
