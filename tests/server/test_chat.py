"""Chat replies over HTTP with a scripted engine: shapes, reasoning, log-probabilities, what reaches the engine."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from scripted import CONTEXT, MODEL, finished

from tfglm.engine.api import Delta, Failed, Progress, SamplingParams, Started, TokenLogprob

REPLY = [
    Started(1.0),
    Progress(4, 7),
    Delta("reasoning", "hm, ", (300,)),
    Delta("reasoning", "", (301,)),
    Delta("reasoning", "yes", (302,)),
    Delta("answer", "grü", (303,)),
    Delta("answer", "ß 你好 🙂 \u2028 e\u0301", (304, 305)),
    finished(tokens=6, reasoning=3),
]
ANSWER = "grüß 你好 🙂 \u2028 e\u0301"


def events(lines: list[str]) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]


async def test_whole_reply(make_api):
    api = await make_api(REPLY)
    status, reply = await api.chat()
    assert status == 200
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion" and reply["model"] == MODEL
    (choice,) = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "reasoning_content": "hm, yes",
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 6, 13)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    # 5 gaps in 30 ms, 7 prompt tokens in 20 ms: the figures of the scripted timings.
    assert reply["timings"]["predicted_per_second"] == 166.667
    assert reply["timings"]["prompt_per_second"] == 350.0
    digest = hashlib.sha256(struct.pack("<6I", *range(300, 306))).hexdigest()
    assert reply["tfglm"]["token_sha"] == digest


async def test_stream_has_the_documented_order(make_api):
    api = await make_api(REPLY)
    lines = await api.chat_stream(stream_options={"include_usage": True})
    chunks = events(lines)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in middle:
        (field,) = chunk["choices"][0]["delta"]
        assert field in ("content", "reasoning_content")
    assert all(c["choices"][0]["finish_reason"] is None for c in (first, *middle))
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 13
    assert all(c["usage"] is None for c in (first, *middle, last))


async def test_stream_adds_up_to_the_whole_reply(make_api):
    api = await make_api(REPLY)
    message = (await api.chat())[1]["choices"][0]["message"]
    text = {"content": "", "reasoning_content": ""}
    for chunk in events(await api.chat_stream()):
        for name, piece in chunk["choices"][0]["delta"].items():
            if name != "role":
                text[name] += piece
    assert text == {name: message[name] for name in text}


async def test_usage_chunk_only_when_asked(make_api):
    api = await make_api(REPLY)
    for lines in (await api.chat_stream(), await api.chat_stream(stream_options={"include_usage": False})):
        assert all(chunk["choices"] and "usage" not in chunk for chunk in events(lines))


async def test_line_separators_never_split_an_event(make_api):
    """Clients that use str.splitlines on the stream must still see whole events."""
    api = await make_api(REPLY)
    for line in await api.chat_stream():
        assert len(line.splitlines()) == 1


async def test_reasoning_can_be_left_out(make_api):
    api = await make_api(REPLY)
    message = (await api.chat(include_reasoning=False))[1]["choices"][0]["message"]
    assert message["content"] == ANSWER and "reasoning_content" not in message
    for chunk in events(await api.chat_stream(include_reasoning=False)):
        assert "reasoning_content" not in chunk["choices"][0]["delta"]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_never_closes_is_delivered_as_content(make_api, stream):
    api = await make_api([Started(1.0), Delta("reasoning", "it is 42", (300,)), finished("stop", reasoning=4)])
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(await api.chat_stream())]
        assert deltas[1:] == [{"reasoning_content": "it is 42"}, {"content": "it is 42"}, {}]
    else:
        message = (await api.chat())[1]["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("it is 42", "it is 42")
    _, page = await metrics_page(api)
    assert f'tfglm:unclosed_think_total{{model_name="{MODEL}"}} 1.0' in page


async def test_thinking_cut_by_the_limit_is_not_an_answer(make_api):
    api = await make_api([Started(1.0), Delta("reasoning", "it is 42", (300,)), finished("length", reasoning=4)])
    status, reply = await api.chat(max_tokens=4)
    assert status == 200
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "it is 42")
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_empty_answer_after_closed_thinking_stays_empty(make_api, tokenizer):
    end = tokenizer.id_of("</think>")
    api = await make_api([Delta("reasoning", "hm", (300,)), Delta("reasoning", "", (end,)), finished("stop")])
    message = (await api.chat())[1]["choices"][0]["message"]
    assert message["content"] == ""


async def test_stop_string_is_reported(make_api):
    api = await make_api([Delta("answer", "one", (300,)), finished("stop", stop="two")])
    choice = (await api.chat(stop=["two"]))[1]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert api.engine.requests[0].stop == ("two",)


async def test_logprobs_of_the_answer_only(make_api, tokenizer):
    eos, half = tokenizer.id_of("<|user|>"), tokenizer.encode("é")[0]
    a = tokenizer.encode("a")[0]
    entries = [TokenLogprob(token, -0.5, ((token, -0.5), (half, -2.0))) for token in (a, half, eos)]
    script = [
        Delta("reasoning", "hm", (a,), (TokenLogprob(a, -9.0),)),
        Delta("answer", "a", (a,), (entries[0],)),
        Delta("answer", "", (half, eos), tuple(entries[1:])),
        finished(),
    ]
    api = await make_api(script)
    choice = (await api.chat(logprobs=True, top_logprobs=2))[1]["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -0.5]
    assert content[0]["token"] == "a" and content[0]["bytes"] == [97]
    raw = tokenizer.token_bytes(half)
    assert content[1]["bytes"] == list(raw)
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [[97], list(raw)]
    assert api.engine.requests[0].logprobs == 2
    streamed = [
        entry
        for chunk in events(await api.chat_stream(logprobs=True, top_logprobs=2))
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_what_reaches_the_engine(make_api, tokenizer):
    api = await make_api(REPLY)
    fields: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
        "presence_penalty": -0.3, "logit_bias": {"5": -100}, "seed": -3, "max_tokens": 50, "min_tokens": 2,
        "ignore_eos": True, "stop": "x", "stop_token_ids": [9], "include_stop_str_in_output": True, "draft": False,
    }  # fmt: skip
    await api.chat(**fields)
    request = api.engine.requests[0]
    assert request.sampling == SamplingParams(0.0, 0.5, 7, 0.1, 1.1, 0.2, -0.3, {5: -100.0}, -3)
    assert (request.max_tokens, request.min_tokens, request.ignore_eos) == (50, 2, True)
    assert (request.stop, request.stop_token_ids, request.include_stop_in_output) == (("x",), (9,), True)
    assert (request.draft, request.logprobs, request.split_reasoning, request.starts_in_reasoning) == (
        False, None, True, True,
    )  # fmt: skip
    text = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>hi<|assistant|><think>"
    assert list(request.prompt) == tokenizer.encode(text)


async def test_nothing_asked_means_the_defaults(make_api):
    api = await make_api(REPLY, max_tokens=100)
    nulls = dict.fromkeys(
        ["temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "n", "tools",
         "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "response_format",
         "chat_template_kwargs",
         "reasoning_effort", "draft", "ignore_eos", "min_tokens", "frequency_penalty"]
    )  # fmt: skip
    for fields in ({}, nulls, {"stop": [], "min_tokens": 0, "unknown_field": {"x": 1}, "user": "u", "metadata": {}}):
        status, _ = await api.chat(**fields)
        assert status == 200
    assert [request.sampling for request in api.engine.requests] == [SamplingParams(temperature=1.0, top_p=0.95)] * 3
    assert {request.max_tokens for request in api.engine.requests} == {100}


async def test_the_default_budget_is_cut_to_the_window(make_api):
    api = await make_api(REPLY)
    await api.chat()
    (request,) = api.engine.requests
    assert request.max_tokens == CONTEXT - len(request.prompt)


async def test_max_completion_tokens_wins(make_api):
    api = await make_api(REPLY)
    await api.chat(max_tokens=5, max_completion_tokens=9)
    assert api.engine.requests[0].max_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine(make_api, stream):
    api = await make_api([Started(1.0), Delta("answer", "so ", (300,)), Failed("E_MEMORY", "no page left")])
    if not stream:
        status, body = await api.chat()
        assert status == 500 and body["error"]["code"] == "E_MEMORY" and body["error"]["type"] == "server_error"
        return
    *_, last = events(await api.chat_stream())
    assert last["error"] == {"message": "no page left", "type": "server_error", "param": None, "code": "E_MEMORY"}


async def test_counters_move_while_tokens_stream(make_api, gate):
    api = await make_api([Started(1.0), Delta("answer", "a", (300, 301)), gate, finished()])
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with api.session.post(api.url + "/v1/chat/completions", json=body) as response:
        while b'"content":"a"' not in await response.content.readuntil(b"\n\n"):
            pass
        _, page = await metrics_page(api)
        assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 2.0' in page
        assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 1.0' in page
        gate.set()
        await response.read()
    _, page = await metrics_page(api)
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in page
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0' in page


async def metrics_page(api: Any) -> tuple[int, str]:
    async with api.session.get(api.url + "/metrics") as response:
        return response.status, await response.text()
