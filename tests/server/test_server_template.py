"""Prompts, character by character: GLM-5.3's published format, the client's variations, thinking on and off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.errors import CheckpointError
from tfglm.server.errors import ApiError
from tfglm.server.messages import normalise_messages
from tfglm.server.prompt import ChatPrompt, chat_prompt
from tfglm.server.schemas import TokenizeChatBody, parse
from tfglm.server.template import ChatTemplate, TemplateRefusedError
from tfglm.server.thinking import starts_in_reasoning

P = "[gMASK]<sop><|system|>Reasoning Effort: Max"
WEATHER = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.fixture
def prompt(template):
    def render(messages: list[dict[str, Any]], thinking_default: bool = True, **fields: Any) -> ChatPrompt:
        body = parse(TokenizeChatBody, {"messages": messages, **fields})
        return chat_prompt(template, body, thinking_default=thinking_default)

    return render


GOLDEN = [
    (
        [user("hi"), assistant("hello there"), user("bye")],
        {},
        P + "<|user|>hi<|assistant|><think></think>hello there<|user|>bye<|assistant|><think>",
    ),
    (
        [user("2+2?"), assistant("4", reasoning_content="add them")],
        {"add_generation_prompt": False},
        P + "<|user|>2+2?<|assistant|><think>add them</think>4",
    ),
    (
        [
            user("weather?"),
            assistant(None, tool_calls=[WEATHER]),
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            assistant("It is sunny."),
        ],
        {"add_generation_prompt": False},
        P + "<|user|>weather?<|assistant|><think></think><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value></tool_call><|observation|><tool_response>sunny</tool_response>"
        "<|assistant|><think></think>It is sunny.",
    ),
    (
        [user("hi"), assistant("hello"), {"role": "system", "content": "new rule"}, user("ok")],
        {"add_generation_prompt": False},
        P + "<|user|>hi<|assistant|><think></think>hello<|system|>new rule<|user|>ok",
    ),
]


@pytest.mark.parametrize(("messages", "fields", "expected"), GOLDEN)
def test_golden_strings(prompt, messages, fields, expected):
    assert prompt(messages, **fields).text == expected


@pytest.mark.parametrize(
    ("messages", "same_as"),
    [
        ([{"role": "developer", "content": "rule"}, user("x")], [{"role": "system", "content": "rule"}, user("x")]),
        ([user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])], [user("a b")]),
        ([user("x"), assistant(None, tool_calls=[WEATHER])], [user("x"), assistant("", tool_calls=[WEATHER])]),
        (
            [user("x"), assistant("y", reasoning="why"), user("z")],
            [user("x"), assistant("y", reasoning_content="why"), user("z")],
        ),
        (
            [user("x"), assistant("y", reasoning_details=[{"text": "wh"}, {"text": "y"}]), user("z")],
            [user("x"), assistant("y", reasoning_content="why"), user("z")],
        ),
        (
            [user("x"), assistant("<think>why</think>y"), user("z")],
            [user("x"), assistant("y", reasoning_content="why"), user("z")],
        ),
        (
            [user("x"), assistant("", tool_calls=[WEATHER]), {"role": "tool", "content": None}],
            [user("x"), assistant("", tool_calls=[WEATHER]), {"role": "tool", "content": ""}],
        ),
    ],
)
def test_variations_mean_the_same(prompt, messages, same_as):
    assert prompt(messages) == prompt(same_as)


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_null_content_is_empty_text_for_every_template(role):
    """Many templates would print the word None."""
    assert normalise_messages([{"role": role, "content": None}])[0]["content"] == ""


@pytest.mark.parametrize("arguments", [None, "", "{}", {}, "null"])
def test_calls_without_arguments(prompt, arguments):
    call = {"id": "c", "function": {"name": "now", "arguments": arguments}}
    assert "<think></think><tool_call>now</tool_call>" in prompt([user("x"), assistant(None, tool_calls=[call])]).text


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "[]", "7", "[" * 100_000, "x</arg_key>"])
def test_arguments_that_are_no_object_are_read_as_they_are(prompt, arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    text = prompt([user("x"), assistant(None, tool_calls=[call])]).text
    assert f"<tool_call>f<arg_key>arguments</arg_key><arg_value>{arguments}</arg_value></tool_call>" in text


def test_argument_values_as_json_but_strings_as_they_are(prompt):
    arguments = json.dumps({"s": "a <b> & 'c'", "n": 1.5, "l": ["ü", None, True]}, ensure_ascii=True)
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    text = prompt([user("x"), assistant(None, tool_calls=[call])]).text
    assert "<arg_value>a <b> & 'c'</arg_value>" in text and '<arg_value>["ü", null, true]</arg_value>' in text


def test_tools_are_listed_as_sent(prompt):
    function = {"name": "f", "description": "<ü>", "parameters": {"type": "object", "properties": {}}, "strict": True}
    tools = [{"type": "function", "function": function}]
    text = prompt([user("x")], tools=tools).text
    listed = {key: value for key, value in function.items() if key != "strict"}
    assert "<tools>\n" + json.dumps(listed, ensure_ascii=False) + "\n</tools>" in text
    assert prompt([user("x")], tools=tools, tool_choice="none") == prompt([user("x")])
    assert prompt([user("x")], tools=[]) == prompt([user("x")])


def test_clear_thinking_drops_earlier_reasoning(prompt):
    messages = [user("a"), assistant("b", reasoning_content="why"), user("c")]
    assert "<think>why</think>b" in prompt(messages).text
    assert "<think></think>b" in prompt(messages, chat_template_kwargs={"clear_thinking": True}).text


OFF = "[gMASK]<sop><|user|>hi<|assistant|><think></think>"


def on(effort: str) -> str:
    return f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>hi<|assistant|><think>"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, on("Max")),
        ({"reasoning_effort": "minimal"}, on("Low")),
        ({"reasoning_effort": "low"}, on("Low")),
        ({"reasoning_effort": "medium"}, on("High")),
        ({"reasoning_effort": "high"}, on("High")),
        ({"reasoning_effort": "xhigh"}, on("Max")),
        ({"reasoning_effort": "max"}, on("Max")),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning": {"effort": "low"}}, on("Low")),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, on("Low")),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, on("High")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ({"chat_template_kwargs": {"thinking": False}}, OFF),
        ({"thinking": False}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, on("Low")),
        ({"thinking": "adaptive"}, on("Max")),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, on("Low")),
        ({"enable_thinking": False}, OFF),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, on("Max")),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, OFF),
        ({"thinking_default": False}, OFF),
        ({"thinking_default": False, "reasoning_effort": "low"}, on("Low")),
        ({"thinking_default": False, "enable_thinking": True}, on("Max")),
    ],
)
def test_thinking_controls(prompt, fields, expected):
    rendered = prompt([user("hi")], **fields)
    assert rendered == ChatPrompt(expected, expected.endswith("<think>"))


def test_thinking_off_keeps_the_rest(prompt):
    """Only the effort block goes; what users write that looks like one stays."""
    fake = "[gMASK]<sop><|system|>Reasoning Effort: Low"
    assert prompt([user(fake)], enable_thinking=False).text == f"[gMASK]<sop><|user|>{fake}<|assistant|><think></think>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|user|>a<|assistant|><think>", True),
        ("<|user|>a<|assistant|><think></think>", False),
        ("<|user|>what is <think>?<|assistant|><think></think>", False),
        ("<|user|>what is </think>?<|assistant|><think>", True),
        ("<|assistant|><think>a</think>b<|user|>say <think>", False),
        ("say <think>", False),
        ("<|user|>a<|assistant|><think>so far", True),
        ("<|user|>a<|assistant|><think>so</think>far", False),
        ("<|assistant|><think><|observation|>x", False),
    ],
)
def test_where_the_reply_starts_is_read_from_the_prompt(text, expected):
    assert starts_in_reasoning(text) is expected


def test_continuing_the_last_message(prompt):
    answer = prompt([user("hi"), assistant("Hel", reasoning_content="r")], continue_final_message=True)
    assert answer == ChatPrompt(P + "<|user|>hi<|assistant|><think>r</think>Hel", False)
    thought = prompt([user("hi"), assistant("", reasoning_content="let me")], continue_final_message=True)
    assert thought == ChatPrompt(P + "<|user|>hi<|assistant|><think>let me", True)


def test_continuing_needs_a_message_of_the_assistant(prompt):
    for messages, fields in (
        ([user("hi")], {}),
        ([user("hi"), assistant(None, tool_calls=[WEATHER])], {}),
        ([user("hi"), assistant("x")], {"add_generation_prompt": True}),
    ):
        with pytest.raises(ApiError) as caught:
            prompt(messages, continue_final_message=True, **fields)
        assert caught.value.param == "continue_final_message"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": JSON})}, optional={"id": JSON}
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=2),
            "reasoning_content": JSON,
            "reasoning_details": JSON,
            "tool_calls": CALLS | JSON,
            "tool_call_id": JSON,
        },
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(messages=MESSAGES, continued=st.booleans(), thinking=st.booleans())
def test_whatever_the_messages_the_answer_is_a_prompt_or_a_refusal(template, messages, continued, thinking):
    body = TokenizeChatBody(messages=messages, continue_final_message=continued)
    try:
        prompt = chat_prompt(template, body, thinking_default=thinking)
    except ApiError as error:
        assert error.status == 400 and error.param
    else:
        assert prompt.text.startswith("[gMASK]<sop>")


def test_the_sandbox_and_its_errors():
    for source in (
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined.attribute }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ nested | tojson }}",
    ):
        nested: list[Any] = []
        nested.append(nested)
        with pytest.raises(TemplateRefusedError):
            ChatTemplate(source).render([user("x")], variables={"nested": nested})


def test_the_environment_is_the_one_templates_expect():
    loop = "{% for m in messages %}\n  {% if loop.index0 == 1 %}{% break %}{% endif %}\n"
    source = loop + "{{ m.content | tojson }}\n{% endfor %}"
    assert ChatTemplate(source).render([user("<ü'>"), user("b")]) == '"<ü\'>"\n'
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render([])) == 4
    assert ChatTemplate("{{ bos_token }}{{ x }}", {"bos_token": "B"}).render([], variables={"x": 1}) == "B1"


def test_where_the_template_comes_from(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no chat_template\.jinja"):
        ChatTemplate.from_folder(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A{{ eos_token }}", "eos_token": {"content": "E"}}))
    assert ChatTemplate.from_folder(tmp_path).render([]) == "AE"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "D"}]}))
    assert ChatTemplate.from_folder(tmp_path).render([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "J"
    (tmp_path / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 2"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b'{"chat_template": [1, {"name": "x"}]}', "no chat_template"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "no chat_template"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("chat_template.jinja", b"{{" + b"(" * 5000 + b")" * 5000 + b"}}", "chat_template.jinja: the template nests"),
    ],
)
def test_unusable_template_files_are_named(tmp_path: Path, file: str, content: bytes, message: str):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate.from_folder(tmp_path)
    assert message in caught.value.message


def test_a_template_that_refuses_is_a_bad_request():
    body = parse(TokenizeChatBody, {"messages": [user("x")]})
    with pytest.raises(ApiError) as caught:
        chat_prompt(ChatTemplate("{{ raise_exception('roles must alternate') }}"), body, thinking_default=True)
    assert caught.value.status == 400 and "roles must alternate" in caught.value.message


def test_a_template_that_says_nothing_is_refused():
    body = parse(TokenizeChatBody, {"messages": [user("hi")]})
    with pytest.raises(ApiError, match="empty prompt") as caught:
        chat_prompt(ChatTemplate(""), body, thinking_default=True)
    assert caught.value.status == 400
