"""The chat template of synthetic checkpoints against strings of the published chat format."""

import itertools
import json
from importlib.resources import files
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

P = "[gMASK]<sop><|system|>Reasoning Effort: Max"


class Refused(Exception):
    pass


def _refuse(message: str) -> None:
    raise Refused(message)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
ENVIRONMENT.globals["raise_exception"] = _refuse
TEMPLATE = ENVIRONMENT.from_string(
    files("tfglm.checkpoint").joinpath("data/chat_template.jinja").read_text(encoding="utf-8")
)


def render(*messages: dict[str, Any], **variables: Any) -> str:
    return TEMPLATE.render(messages=list(messages), **variables)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: Any, id: Any = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: Any, id: Any = None) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id}


def test_published_examples() -> None:
    assert render(user("hi"), assistant("hello there"), user("bye"), add_generation_prompt=True) == (
        f"{P}<|user|>hi<|assistant|><think></think>hello there<|user|>bye<|assistant|><think>"
    )
    assert render(user("2+2?"), assistant("4", reasoning_content="add them")) == (
        f"{P}<|user|>2+2?<|assistant|><think>add them</think>4"
    )
    assert render(
        user("weather?"),
        assistant("", tool_calls=[call("get_weather", {"city": "Paris"}, "a")]),
        tool("sunny", "a"),
        assistant("It is sunny."),
    ) == (
        f"{P}<|user|>weather?<|assistant|><think></think><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value></tool_call><|observation|><tool_response>sunny</tool_response>"
        "<|assistant|><think></think>It is sunny."
    )
    assert render(assistant("hello"), {"role": "system", "content": "new rule"}, user("ok")) == (
        f"{P}<|assistant|><think></think>hello<|system|>new rule<|user|>ok"
    )


@pytest.mark.parametrize(
    ("effort", "word"),
    [("low", "Low"), ("high", "High"), ("max", "Max"), ("medium", "Max"), ("LOW", "Max"), ("", "Max"), (None, "Max")],
)
def test_effort(effort: object, word: str) -> None:
    assert render(reasoning_effort=effort) == f"[gMASK]<sop><|system|>Reasoning Effort: {word}"


def test_effort_is_optional() -> None:
    assert render() == P
    assert render(add_generation_prompt=False) == P


TOOLS_HEAD = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def test_tools() -> None:
    """Wrapped and bare tools; the client's key order; strict dropped at the top only; JSON as Python writes it."""
    schema = {
        "type": "object",
        "properties": {"strict": {"type": "string", "description": "<é>"}},
        "n": [1.5, None, True],
    }
    tools = [
        {"type": "function", "function": {"parameters": schema, "strict": True, "name": "f", "description": "näh"}},
        {"name": "bare", "description": 'it\'s "x"'},
    ]
    assert render(user("q"), tools=tools) == (
        P + TOOLS_HEAD + '{"parameters": {"type": "object", "properties": {"strict": {"type": "string", "description": '
        '"<é>"}}, "n": [1.5, null, true]}, "name": "f", "description": "näh"}\n'
        '{"name": "bare", "description": "it\'s \\"x\\""}\n' + TOOLS_TAIL + "<|user|>q"
    )
    assert render(user("q"), tools=[]) == render(user("q"), tools=None) == f"{P}<|user|>q"


def test_deferred_tools_appear_when_a_result_names_them() -> None:
    tools = [{"type": "function", "function": {"name": n, "defer_loading": n != "a"}} for n in "abc"]
    shown = render(
        tool([{"type": "tool_reference", "name": "c"}, {"type": "tool_reference", "name": "b"}]), tools=tools
    )
    assert shown == (
        P + TOOLS_HEAD + '{"name": "a"}\n' + TOOLS_TAIL + "<|observation|><tool_response><tools>\n"
        '{"name": "c"}\n{"name": "b"}\n</tools></tool_response>'
    )


def test_calls() -> None:
    """Text goes verbatim, everything else as JSON; content comes first, stripped; calls stand back to back."""
    calls = [
        call("f", {"s": ' "quoted" <b>\n', "i": 1, "x": 1.0, "b": True, "n": None, "l": ["é", {"k": 2}], "e": ""}),
        {"name": "bare", "arguments": {}},
    ]
    assert render(assistant(" \n on it \n", tool_calls=calls)) == (
        f'{P}<|assistant|><think></think>on it<tool_call>f<arg_key>s</arg_key><arg_value> "quoted" <b>\n</arg_value>'
        "<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>x</arg_key><arg_value>1.0</arg_value>"
        "<arg_key>b</arg_key><arg_value>true</arg_value><arg_key>n</arg_key><arg_value>null</arg_value>"
        '<arg_key>l</arg_key><arg_value>["é", {"k": 2}]</arg_value><arg_key>e</arg_key><arg_value></arg_value>'
        "</tool_call><tool_call>bare</tool_call>"
    )


@pytest.mark.parametrize("arguments", ['{"a": 1}', None, [1]])
def test_arguments_must_be_an_object(arguments: object) -> None:
    with pytest.raises(Refused, match="arguments"):
        render(assistant("", tool_calls=[call("f", arguments)]))


def results(*messages: dict[str, Any]) -> str:
    shown = render(*messages)
    return shown[shown.index("<|observation|>") :].replace("<tool_response>", "(").replace("</tool_response>", ")")


ASKED = assistant("", tool_calls=[call("f", {}, "a"), call("f", {}, "B"), call("f", {}, "b")])


def test_results_follow_the_order_of_the_calls() -> None:
    assert results(ASKED, tool("3", "b"), tool("1", "a"), tool("2", "B")) == "<|observation|>(1)(2)(3)"
    assert results(ASKED, tool("3", "b"), tool("1", "a")) == "<|observation|>(1)(3)"


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, tool("x", "b"), tool("y")],
        [ASKED, tool("x", "b"), tool("y", "")],
        [ASKED, tool("x", "b"), tool("y", "b")],
        [ASKED, tool("x", "b"), tool("y", "other")],
        [ASKED, tool("x", "b"), tool("y", 7)],
        [ASKED, user("no"), tool("x", "b"), tool("y", "a")],
        [tool("x", "b"), tool("y", "a")],
        [
            assistant("", tool_calls=[call("f", {}, "a"), call("f", {}, "b"), call("f", {}, "a")]),
            tool("x", "b"),
            tool("y", "a"),
        ],
        [
            assistant("", tool_calls=[call("f", {}, "a"), call("f", {}, "b"), call("f", {})]),
            tool("x", "b"),
            tool("y", "a"),
        ],
        [
            assistant("", tool_calls=[call("f", {}, "a"), call("f", {}, "b"), call("f", {}, [])]),
            tool("x", "b"),
            tool("y", "a"),
        ],
    ],
    ids=[
        "no id",
        "empty id",
        "id twice",
        "unknown id",
        "number",
        "not after",
        "first",
        "call twice",
        "call without",
        "list",
    ],
)
def test_results_that_cannot_be_told_apart_keep_their_order(messages: list[dict[str, Any]]) -> None:
    assert results(*messages) == "<|observation|>(x)(y)"


def test_one_observation_a_run() -> None:
    shown = results(ASKED, tool("1", "a"), tool("2", "B"), user("go on"), tool("3"))
    assert shown == "<|observation|>(1)(2)<|user|>go on<|observation|>(3)"


def test_several_results_in_one_message() -> None:
    many = tool([{"output": "3", "tool_call_id": "b"}, {"output": [{"type": "text", "text": "1"}], "id": "a"}])
    assert results(ASKED, many, tool("2", "B")) == "<|observation|>(1)(2)(3)"
    assert results(ASKED, tool([{"output": "x"}, {"output": "y", "id": "a"}])) == "<|observation|>(x)(y)"


def test_content_parts() -> None:
    parts = [
        {"type": "text", "text": " a "},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "image"},
        {"type": "video"},
        {"type": "input_audio"},
        "b",
        {"type": "text", "text": "c\n"},
    ]
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    video = "<|begin_of_video|><|video|><|end_of_video|>"
    audio = "<|begin_of_audio|><|end_of_audio|>"
    assert render(user(parts)) == f"{P}<|user|> a {image}{image}{video}{audio}bc\n"
    assert render(tool([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).endswith(
        "<tool_response>ab</tool_response>"
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content(content: object) -> None:
    assert render(user(content), assistant(content), tool(content)) == (
        f"{P}<|user|><|assistant|><think></think><|observation|><tool_response></tool_response>"
    )
    assert render({"role": "user"}) == f"{P}<|user|>"


@pytest.mark.parametrize("content", [{"text": "x"}, 5])
def test_content_of_another_kind(content: object) -> None:
    with pytest.raises(Refused, match="message content"):
        render(user(content))


def test_user_text_is_not_stripped() -> None:
    assert render(user(" \n x <&> \n")) == f"{P}<|user|> \n x <&> \n"


def test_reasoning_kept_and_dropped() -> None:
    chat = [
        user("a"),
        assistant("1", reasoning_content="r1"),
        user("b"),
        assistant("", reasoning_content="r2", tool_calls=[call("f", {}, "a")]),
        tool("t", "a"),
        assistant("3", reasoning_content="r3"),
    ]
    tail = "r2</think><tool_call>f</tool_call><|observation|><tool_response>t</tool_response>"
    tail += "<|assistant|><think>r3</think>3"
    for keep in ({}, {"clear_thinking": False}):
        assert (
            render(*chat, **keep) == f"{P}<|user|>a<|assistant|><think>r1</think>1<|user|>b<|assistant|><think>{tail}"
        )
    assert render(*chat, clear_thinking=True) == (
        f"{P}<|user|>a<|assistant|><think></think>1<|user|>b<|assistant|><think>{tail}"
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("<think>why</think>\n\nbecause ", "<think>why</think>because"),
        ("why</think>because", "<think>why</think>because"),
        ("x<think>a<think>b</think>c</think>d", "<think>b</think>d"),
        ("a <think> b", "<think></think>a <think> b"),
    ],
)
def test_reasoning_inside_the_content(content: str, shown: str) -> None:
    assert render(assistant(content)) == f"{P}<|assistant|>{shown}"


def test_given_reasoning_beats_the_content() -> None:
    shown = render(assistant("a</think>b", reasoning_content=""))
    assert shown == f"{P}<|assistant|><think></think>a</think>b"
    assert render(assistant("b", reasoning_content=None)) == f"{P}<|assistant|><think></think>b"


def test_unknown_roles_are_skipped() -> None:
    assert (
        render(user("a"), {"role": "developer", "content": "x"}, {"role": "critic"}, user("b"))
        == f"{P}<|user|>a<|user|>b"
    )


def test_earlier_turns_render_the_same_when_a_chat_goes_on() -> None:
    """What lets a prompt cache resume: each turn only appends."""
    chat = [user("a"), assistant("1", reasoning_content="r"), user("b"), assistant("2"), tool("x"), user("c")]
    shown = [render(*chat[:n], add_generation_prompt=False) for n in range(len(chat) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(shown))
