"""Tool calls over HTTP with a scripted engine: stream and whole reply, OpenAI's client, log-probabilities, ends."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChunkEvent
from scripted import MODEL, finished
from test_chat import events, metrics_page

from tfglm.engine.api import Delta, Event, FinishReason, Started, TokenLogprob
from tfglm.engine.text import ReplyText
from tfglm.engine.tokenizer import Tokenizer
from tfglm.server.reply import CallPiece, ChatReply, TextPiece

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city"],
    "$defs": {"Days": {"type": "integer"}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich ☃</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
ARGUMENTS = '{"city":"Zürich ☃","days":3}'
NOW = "<tool_call>now</tool_call>"
FLY = "<tool_call>fly<arg_key>to</arg_key><arg_value>7</arg_value></tool_call>"
END = "<|observation|>"


def script(tokenizer: Tokenizer, text: str, reason: FinishReason = "stop", **options: Any) -> list[Event]:
    """The events that the engine makes of a reply's tokens, one a token. options: of ReplyText."""
    reader = ReplyText(tokenizer, silent=[tokenizer.id_of(END) or 0], **options)
    made: list[Event] = [Started(1.0)]
    tokens = tokenizer.encode(text)
    for n, token in enumerate(tokens, 1):
        channel = reader.channel
        piece = reader.feed(token)
        made.append(Delta(channel, piece, (token,), (TokenLogprob(token, -float(n)),)))
        if reader.stopped_by is not None:
            break
    rest = reader.finish()
    if rest:
        made.append(Delta(reader.channel, rest))
    return [*made, finished(reason, tokens=len(tokens), stop=reader.stopped_by)]


def whole(reply: dict[str, Any]) -> dict[str, Any]:
    """The choice of a whole reply, its calls' ids checked and left out."""
    (choice,) = reply["choices"]
    for call in choice["message"].get("tool_calls", []):
        name = call.pop("id")
        assert name.startswith("call_") and len(name) == 29 and int(name[5:], 16) >= 0
        assert call.pop("type") == "function"
    return dict(choice)


def added_up(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a client makes of a stream's chunks."""
    message: dict[str, Any] = {"content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    ids = set()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        assert len(delta) <= 1 or set(delta) == {"role", "content"}
        for field, value in delta.items():
            if field == "tool_calls":
                (call,) = value
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    ids.add(call["id"])
                    calls.append({"function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            else:
                message[field] = message.get(field, "") + value
    assert len(ids) == len(calls)
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {"message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"], "logprobs": logprobs}


def called(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]


IS_WEATHER, IS_NOW = ("get_weather", ARGUMENTS), ("now", "{}")
CASES: list[tuple[str, FinishReason, str | None, list[tuple[str, str]], str]] = [
    (WEATHER + END, "stop", None, [IS_WEATHER], "tool_calls"),
    (NOW + WEATHER + NOW + END, "stop", None, [IS_NOW, IS_WEATHER, IS_NOW], "tool_calls"),
    ("Let me see: " + WEATHER + " So.", "stop", "Let me see:  So.", [IS_WEATHER], "tool_calls"),
    ("One writes <tool_call> first.", "stop", "One writes <tool_call> first.", [], "stop"),
    (FLY, "stop", None, [("fly", '{"to":"7"}')], "tool_calls"),
    (WEATHER.removesuffix("</tool_call>") + END, "stop", None, [IS_WEATHER], "tool_calls"),
    (WEATHER[:62], "length", None, [("get_weather", '{"city":"Zürich')], "length"),
    (WEATHER + "<tool_call>get_weather<arg_key>ci", "length", None, [IS_WEATHER, ("get_weather", "{")], "length"),
    ("<tool_call>get_w", "length", "<tool_call>get_w", [], "length"),
    ("plain", "stop", "plain", [], "stop"),
    ("", "stop", "", [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason", "content", "calls", "ending"), CASES, ids=range(len(CASES)))
async def test_stream_and_whole_reply(make_api, tokenizer, text, reason, content, calls, ending):
    api = await make_api(script(tokenizer, text, reason))
    choice = whole((await api.chat(tools=TOOLS))[1])
    expected = {"role": "assistant", "content": content, "refusal": None}
    assert choice["message"] == expected | ({"tool_calls": called(*calls)} if calls else {})
    assert choice["finish_reason"] == ending
    streamed = added_up(events(await api.chat_stream(tools=TOOLS)))
    assert streamed["message"] == choice["message"] and streamed["finish_reason"] == ending


async def test_without_tools_markup_is_text(make_api, tokenizer):
    api = await make_api(script(tokenizer, WEATHER))
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = whole((await api.chat(**fields))[1])
        assert (choice["message"]["content"], choice["finish_reason"]) == (WEATHER, "stop")
        assert "tool_calls" not in choice["message"]
    _, reply = await api.post("/v1/completions", {"model": MODEL, "prompt": "x", "tools": TOOLS})
    assert reply["choices"][0]["text"] == WEATHER


async def test_the_events_of_a_call(make_api, tokenizer):
    """The name first, then its arguments as they come, whole characters only, then an empty delta."""
    api = await make_api(script(tokenizer, WEATHER + END))
    first, name, *pieces, last = [chunk["choices"][0] for chunk in events(await api.chat_stream(tools=TOOLS))]
    assert first["delta"] == {"role": "assistant", "content": ""}
    (call,) = name["delta"]["tool_calls"]
    assert call == {
        "index": 0,
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    texts = [piece["delta"]["tool_calls"][0]["function"]["arguments"] for piece in pieces]
    assert texts[0] == '{"city":"' and texts[-1] == "}" and "3" in texts and "".join(texts) == ARGUMENTS
    assert len(texts) > 6 and all(texts)
    assert last["delta"] == {} and last["finish_reason"] == "tool_calls"


# --- thinking


def thinking(tokenizer: Tokenizer, text: str, reason: FinishReason = "stop") -> list[Event]:
    return script(tokenizer, text, reason, starts_in_reasoning=True)


@pytest.mark.parametrize(
    ("text", "reason", "reasoning", "content", "calls"),
    [
        ("Hm.</think>" + WEATHER + END, "stop", "Hm.", None, [IS_WEATHER]),
        (f"I could {NOW} now.</think>{WEATHER}", "stop", f"I could {NOW} now.", None, [IS_WEATHER]),
        (f"I will {NOW}</think>Yes.", "stop", f"I will {NOW}", "Yes.", []),
        (f"Hm. {WEATHER}{NOW}" + END, "stop", "Hm. ", None, [IS_WEATHER, IS_NOW]),
        (f"Hm. {WEATHER} wait", "stop", f"Hm. {WEATHER} wait", f"Hm. {WEATHER} wait", []),
        (f"Hm. {WEATHER}", "length", f"Hm. {WEATHER}", "", []),
        (f"Hm. {WEATHER[:60]}", "length", f"Hm. {WEATHER[:60]}", "", []),
    ],
)
async def test_thinking(make_api, tokenizer, text, reason, reasoning, content, calls):
    api = await make_api(thinking(tokenizer, text, reason))
    choice = whole((await api.chat(tools=TOOLS))[1])
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert message.get("tool_calls", []) == called(*calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else reason)
    streamed = added_up(events(await api.chat_stream(tools=TOOLS)))
    assert streamed["message"] == message | {"role": "assistant"}


# --- OpenAI's own client


async def test_openai_client(make_api, tokenizer):
    api = await make_api(script(tokenizer, "Well. " + WEATHER + NOW + END))
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            names = [event.type async for event in stream if not isinstance(event, ChunkEvent)]
            streamed = await stream.get_final_completion()
    assert names.count("tool_calls.function.arguments.done") == 2
    for choice in (reply.choices[0], streamed.choices[0]):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well. "
        found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert found == [IS_WEATHER, IS_NOW]
        assert len({call.id for call in choice.message.tool_calls or []}) == 2


async def test_a_conversation_goes_on_with_the_results(make_api, tokenizer):
    """Our own message, sent back by OpenAI's client with its results, becomes the prompt that the format asks for."""
    api = await make_api(thinking(tokenizer, "Hm.</think>Well.\n" + WEATHER + NOW + END))
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        assert message.tool_calls is not None
        results = [{"role": "tool", "tool_call_id": c.id, "content": c.id} for c in message.tool_calls]
        # Results in the wrong order: their ids say whose they are.
        messages = [*messages, message.model_dump(exclude_none=True), *reversed(results)]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    prompt = tokenizer.decode(api.engine.requests[1].prompt)
    ids = [call.id for call in message.tool_calls]
    assert prompt.endswith(
        f"<|user|>hi<|assistant|><think>Hm.</think>Well.{WEATHER}{NOW}<|observation|>"
        f"<tool_response>{ids[0]}</tool_response><tool_response>{ids[1]}</tool_response><|assistant|><think>"
    )
    assert prompt.startswith(tokenizer.decode(api.engine.requests[0].prompt).removesuffix("<|assistant|><think>"))


async def test_a_call_that_was_cut_off_is_sent_back_as_it_came(make_api, tokenizer):
    """An agent answers it with its parser's error, and the model sees what it wrote."""
    api = await make_api(script(tokenizer, NOW + WEATHER[:70], "length"))
    _, reply = await api.chat(tools=TOOLS)
    message = reply["choices"][0]["message"]
    whole, cut = message["tool_calls"]
    text = cut["function"]["arguments"]
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(text)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": said}
        for call, said in ((whole, "noon"), (cut, "no valid JSON"))
    ]
    status, _ = await api.chat(messages=[{"role": "user", "content": "hi"}, message, *results])
    assert status == 200
    assert tokenizer.decode(api.engine.requests[1].prompt).endswith(
        f"{NOW}<tool_call>get_weather<arg_key>arguments</arg_key><arg_value>{text}</arg_value></tool_call>"
        "<|observation|><tool_response>noon</tool_response><tool_response>no valid JSON</tool_response>"
        "<|assistant|><think>"
    )


# --- log-probabilities


def content_text(entries: list[Any]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Zürich: " + WEATHER + " ☃!" + END, "Zürich:  ☃!"),
        ("A <tool_call> is ☃ a tag" + NOW, "A <tool_call> is ☃ a tag"),
        (NOW + END, ""),
        ("<tool_call>now<b>é</tool_call>", "<tool_call>now<b>é</tool_call>"),
    ],
)
async def test_logprobs_leave_markup_out(make_api, tokenizer, text, content):
    api = await make_api(script(tokenizer, text))
    choice = whole((await api.chat(tools=TOOLS, logprobs=True))[1])
    entries = choice["logprobs"]["content"]
    assert (choice["message"]["content"] or "") == content == content_text(entries)
    # The scripted log-probability of a token is its place: these are the tokens of the text that was sent.
    tokens = tokenizer.encode(text)
    places = [-int(entry["logprob"]) - 1 for entry in entries]
    assert [list(tokenizer.token_bytes(tokens[at])) for at in places] == [entry["bytes"] for entry in entries]
    assert places == sorted(places)
    streamed = added_up(events(await api.chat_stream(tools=TOOLS, logprobs=True)))
    assert streamed["logprobs"] == entries


async def test_logprobs_of_a_stop_string(make_api, tokenizer):
    """Tokens of the stop string are listed, as they are without tools, unless they end a call."""
    for text, expected in (("one two three", "one two"), (WEATHER[:60] + " two", "")):
        events_made = script(tokenizer, text, stop=["two"])
        api = await make_api(events_made)
        choice = whole((await api.chat(tools=TOOLS, logprobs=True, stop="two"))[1])
        assert content_text(choice["logprobs"]["content"]) == expected
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "two"


# --- one call only


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_ends_the_reply(make_api, tokenizer, gate, stream):
    """The engine is told to stop; what it says until then is counted and not sent."""
    first = script(tokenizer, "So: " + WEATHER)[:-1]
    more = script(tokenizer, " and " + NOW)[1:-1]
    api = await make_api([*first, *more, gate, Delta("answer", "never", (300,)), finished("stop", tokens=99)])
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        chunks = events(await api.chat_stream(**fields))
        found, digest = added_up(chunks), chunks[-1]["tfglm"]["token_sha"]
    else:
        _, reply = await api.chat(**fields)
        found, digest = whole(reply), reply["tfglm"]["token_sha"]
        # The scripted engine counts four tokens when it is cancelled.
        assert reply["usage"]["completion_tokens"] == 4
    assert found["message"]["content"] == "So: " and found["message"]["tool_calls"] == called(IS_WEATHER)
    assert found["finish_reason"] == "tool_calls"
    assert api.engine.cancelled[api.engine.requests[0].id].is_set()
    _, page = await metrics_page(api)
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in page
    assert "tfglm:client_disconnections_total" in page and 'disconnections_total{model_name="tiny"} 0.0' in page
    # However late it stopped, the digest is that of the reply's own tokens.
    alone = await make_api(script(tokenizer, "So: " + WEATHER))
    assert digest == (await alone.chat(tools=TOOLS))[1]["tfglm"]["token_sha"]


async def test_one_call_of_a_reply_without_any(make_api, tokenizer):
    api = await make_api(script(tokenizer, "No call."))
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    reply = (await api.chat(**fields))[1]
    assert whole(reply)["message"]["content"] == "No call." and whole(reply)["finish_reason"] == "stop"
    assert reply["tfglm"]["token_sha"] == (await api.chat())[1]["tfglm"]["token_sha"]


async def test_one_call_of_an_open_think_block(make_api, tokenizer):
    api = await make_api(thinking(tokenizer, "Hm." + WEATHER + NOW + END))
    message = whole((await api.chat(tools=TOOLS, parallel_tool_calls=False))[1])["message"]
    assert message["tool_calls"] == called(IS_WEATHER) and message["reasoning_content"] == "Hm."


# --- tool_choice


def listed(api: Any, tokenizer: Tokenizer) -> list[str]:
    """The tools that the last prompt lists."""
    prompt = tokenizer.decode(api.engine.requests[-1].prompt)
    if "<tools>\n" not in prompt:
        return []
    return [
        json.loads(line)["name"] for line in prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    ]


NAMED_NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["get_weather", "now"]),
        ("auto", ["get_weather", "now"]),
        ("none", []),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_NOW]}}, ["now"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, ["now"]),
    ],
)
async def test_the_tools_that_are_offered(make_api, tokenizer, choice, names):
    api = await make_api(script(tokenizer, "ok"))
    status, body = await api.chat(tools=TOOLS, tool_choice=choice)
    assert status == 200, body
    assert listed(api, tokenizer) == names


def allowed(**fields: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": fields}


@pytest.mark.parametrize(
    ("choice", "param", "code"),
    [
        ("required", "tool_choice", "unsupported_parameter"),
        (NAMED_NOW, "tool_choice", "unsupported_parameter"),
        ("sometimes", "tool_choice", "invalid_value"),
        ({"type": "web_search"}, "tool_choice", "invalid_value"),
        (7, "tool_choice", "invalid_value"),
        ([], "tool_choice", "invalid_value"),
        (allowed(mode="required", tools=[NAMED_NOW]), "tool_choice.allowed_tools.mode", "unsupported_parameter"),
        (allowed(mode="x", tools=[NAMED_NOW]), "tool_choice.allowed_tools.mode", "invalid_value"),
        (allowed(mode="auto", tools=[]), "tool_choice.allowed_tools.tools", "invalid_value"),
        (allowed(mode="auto"), "tool_choice.allowed_tools.tools", "invalid_value"),
        (allowed(tools=[NAMED_NOW, {"name": 1}]), "tool_choice.allowed_tools.tools[1]", "invalid_value"),
        (allowed(tools=["now"]), "tool_choice.allowed_tools.tools[0]", "invalid_value"),
        (allowed(tools=[{"name": "then"}]), "tool_choice.allowed_tools.tools[0]", "invalid_value"),
        ({"type": "allowed_tools", "allowed_tools": "x"}, "tool_choice.allowed_tools", "invalid_value"),
    ],
)
async def test_choices_that_are_refused(make_api, choice, param, code):
    api = await make_api()
    status, body = await api.chat(tools=TOOLS, tool_choice=choice)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code), body
    assert not api.engine.requests


# --- figures and garbage


async def test_calls_are_counted_by_how_they_ended(make_api, tokenizer):
    text = WEATHER + "<tool_call>now<arg_key>x</tool_call>" + '<tool_call>{"name":"now"}</tool_call>' + WEATHER[:60]
    api = await make_api(script(tokenizer, text, "length"))
    _, before = await metrics_page(api)
    assert before.count("tfglm:tool_call_parse_total{") == 4
    await api.chat(tools=TOOLS)
    await api.chat_stream(tools=TOOLS)
    _, page = await metrics_page(api)
    for result in ("ok", "malformed", "repaired", "truncated"):
        assert f'tfglm:tool_call_parse_total{{model_name="{MODEL}",result="{result}"}} 2.0' in page


GARBAGE = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>",
         "<|user|>", "now", "city", "\n", WEATHER, NOW]
    ) | st.text(max_size=6),
    max_size=12,
).map("".join)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GARBAGE, st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]), st.integers(1, 5))
def test_garbage_in_rounds_of_any_size(
    tokenizer: Tokenizer, text: str, thinks: bool, one_call: bool, reason: FinishReason, size: int
) -> None:
    """Nothing raises; rounds of several tokens give the message of single tokens; every byte listed was sent."""
    made = script(tokenizer, text, reason, starts_in_reasoning=thinks)
    deltas = [event for event in made if isinstance(event, Delta)]
    rounds: list[Delta] = []
    for n, delta in enumerate(deltas):
        if rounds and rounds[-1].channel == delta.channel and n % size:
            last = rounds.pop()
            tokens, logprobs = last.token_ids + delta.token_ids, last.logprobs + delta.logprobs
            delta = Delta(delta.channel, last.text + delta.text, tokens, logprobs)
        rounds.append(delta)
    messages = []
    for events_fed in (made, [*rounds, made[-1]]):
        reply = ChatReply(
            tokenizer,
            starts_in_reasoning=thinks,
            include_reasoning=True,
            logprobs=True,
            tools=TOOLS,
            one_call=one_call,
        )
        pieces = [piece for event in events_fed for piece in reply.feed(event)]
        content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece) and piece.field == "content")
        entries = [e for piece in pieces if isinstance(piece, TextPiece) for e in piece.logprobs or ()]
        calls = [(p.index, p.name, p.arguments) for p in pieces if isinstance(p, CallPiece)]
        arguments = [
            "".join(text for i, _, text in calls if i == index)
            for index in range(1 + max((i for i, *_ in calls), default=-1))
        ]
        names = [name for _, name, _ in calls if name]
        assert len(names) == len(arguments) and (not one_call or reply.calls.count("ok") <= 1)
        listed_bytes = bytes(byte for entry in entries for byte in entry["bytes"]).decode("utf-8", "replace")
        if not reply.unclosed:
            assert listed_bytes == content
        messages.append((content, names, arguments, entries, reply.finish_reason, reply.digest.hex()))
    assert messages[0] == messages[1]


async def test_a_stop_string_closes_no_call(make_api, tokenizer):
    text = WEATHER.removesuffix("</tool_call>")
    api = await make_api([*script(tokenizer, text)[:-1], finished("stop", stop="x")])
    choice = whole((await api.chat(tools=TOOLS, stop="x"))[1])
    assert choice["message"]["tool_calls"] == called(("get_weather", ARGUMENTS[:-1]))
    assert choice["finish_reason"] == "stop"


async def test_the_only_call_may_end_at_the_limit(make_api, tokenizer):
    api = await make_api(script(tokenizer, WEATHER, "length"))
    assert whole((await api.chat(tools=TOOLS))[1])["finish_reason"] == "length"
    assert whole((await api.chat(tools=TOOLS, parallel_tool_calls=False))[1])["finish_reason"] == "tool_calls"
