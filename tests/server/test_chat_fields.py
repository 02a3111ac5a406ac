"""Every wrong field is answered 400 with its name, and never reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import CONTEXT, MODEL

from tfglm.engine.api import ContextLengthError, NotServingError, QueueFullError

USER = {"role": "user", "content": "hi"}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER] * 20_001}, "messages"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [USER, calling(5)]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER, calling([{}])]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": "x"}]}, "messages[1].tool_calls"),
    ({"messages": [USER, {"role": "assistant", "reasoning_content": 3}]}, "messages[1].reasoning_content"),
    ({"messages": [USER, {"role": "assistant", "function_call": {}}]}, "messages[1].function_call"),
    ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**300}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**4299}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"thinking_budget": 100}, "thinking_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"tools": "x"}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": 1}, "reasoning_effort"),
    ({"reasoning": {"effort": []}}, "reasoning.effort"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"enable_thinking": 1}, "enable_thinking"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"draft": 0}, "draft"),
    ({"stop": ["a", "b" * 10_001]}, "stop[1]"),
    ({"stop_token_ids": list(range(1025)), "min_tokens": 1}, "stop_token_ids"),
    ({"ignore_eos": "true"}, "ignore_eos"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
async def test_refused(make_api, fields, param):
    api = await make_api()
    status, body = await api.chat(**fields)
    assert (status, body["error"]["param"]) == (400, param), body
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert len(body["error"]["message"]) < 500
    assert not api.engine.requests


async def test_missing_fields_are_named(make_api):
    api = await make_api()
    for body, param in (({"messages": [USER]}, "model"), ({"model": MODEL}, "messages")):
        status, reply = await api.post("/v1/chat/completions", body)
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, "missing_required_parameter")


async def test_unknown_model(make_api):
    api = await make_api()
    status, body = await api.chat(model="gpt-4")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(("fields", "completion"), [({"max_tokens": CONTEXT}, CONTEXT), ({"max_tokens": 2**62}, 2**62)])
async def test_what_does_not_fit_names_both_numbers(make_api, tokenizer, fields, completion):
    api = await make_api()
    status, body = await api.chat(**fields)
    prompt = len(tokenizer.encode("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>hi<|assistant|><think>"))
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"].startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the messages, {completion} in the completion)."
    )


async def test_a_prompt_that_fills_the_window(make_api):
    api = await make_api()
    status, body = await api.chat(messages=[{"role": "user", "content": "word " * CONTEXT}])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_refusals_of_the_engine(make_api):
    api = await make_api()
    for refusal, status, code, retry in (
        (QueueFullError("64 requests wait", 7), 429, "queue_full", "7"),
        (NotServingError("draining"), 503, "not_serving", "5"),
        (ContextLengthError("too long"), 400, "context_length_exceeded", None),
    ):
        api.engine.refuse = refusal
        for stream in (False, True):
            body = {"model": MODEL, "messages": [USER], "stream": stream}
            async with api.session.post(api.url + "/v1/chat/completions", json=body) as response:
                reply = await response.json()
                assert (response.status, reply["error"]["code"]) == (status, code)
                assert response.headers.get("Retry-After") == retry


async def test_accepted_without_effect(make_api):
    """What benchmarks and SDKs send on every request."""
    api = await make_api()
    for fields in (
        {"stop": [], "min_tokens": 4, "max_tokens": 4, "ignore_eos": True, "temperature": 0},
        {"max_tokens": 5.0, "seed": 7.0},
        {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "store": True, "service_tier": "auto"},
        {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "verbosity": "low", "prediction": None},
        {"thinking": "adaptive", "guided_json": None, "functions": [], "modalities": ["text"]},
        {"response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "draft": False},
        {"top_k": -1, "logit_bias": {}, "logprobs": False},
    ):
        status, body = await api.chat(**fields)
        assert status == 200, body
