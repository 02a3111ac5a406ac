"""Everything that is not a reply: models, health, keys, metrics, tokens, unknown routes."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import CONTEXT, MODEL, finished

from tfglm import __version__
from tfglm.engine.api import Delta, Started

NEEDED = [
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:iteration_tokens_total_sum",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:engine_sleep_state",
    "vllm:request_success_total",
    "tfglm:client_disconnections_total",
    "tfglm:queue_rejected_total",
    "tfglm:rounds_total",
]


async def test_models(make_api):
    api = await make_api()
    status, listed = await api.get("/v1/models")
    assert (status, listed["object"]) == (200, "list")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "tfglm")
    assert model["max_model_len"] == model["context_length"] == CONTEXT
    assert await api.get(f"/v1/models/{MODEL}") == (200, model)
    for unknown in ("gpt-4", "org/model", "tiny/"):
        status, body = await api.get(f"/v1/models/{unknown}")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_health_follows_the_server(make_api, tokenizer, template):
    api = await make_api(loaded=False)
    for path in ("/health", "/v1/health", "/ping"):
        assert await api.get(path) == (503, {"status": "loading"})
    for path in ("/v1/models", "/props"):
        status, body = await api.get(path)
        assert (status, body["error"]["code"], body["error"]["type"]) == (503, "loading", "overloaded_error")
    async with api.session.post(api.url + "/v1/chat/completions", json={}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert (await api.get("/version")) == (200, {"version": __version__})
    async with api.session.get(api.url + "/metrics") as response:
        assert response.status == 200

    api = await make_api()
    status, body = await api.get("/health")
    assert (status, body["status"]) == (200, "ok")
    assert (body["running"], body["waiting"], body["step_age_s"]) == (0, 0, 0.0)
    api.engine.state = "failed"
    assert (await api.get("/health"))[1]["status"] == "failed"
    assert (await api.chat())[1]["error"]["code"] == "engine_failed"
    api.engine.state = "ready"
    api.state.draining = True
    status, body = await api.get("/health")
    assert (status, body["status"]) == (503, "draining")
    assert (await api.chat())[1]["error"]["code"] == "draining"


async def test_keys(make_api):
    api = await make_api(api_key="first, second")
    for headers in (
        {},
        {"Authorization": "Bearer third"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer \u00e9"},
        {"x-api-key": ""},
        {"x-api-key": "first, second"},
    ):
        for path in ("/v1/models", "/metrics", "/props", "/nowhere", "/openapi.json"):
            async with api.session.get(api.url + path, headers=headers) as response:
                body = await response.json()
                assert (response.status, body["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert await api.get("/health", headers=headers) == (200, {"status": "ok"})
    for headers in ({"Authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"}):
        assert (await api.get("/v1/models", headers=headers))[0] == 200
        assert "running" in (await api.get("/health", headers=headers))[1]


async def test_metrics_are_well_formed_and_complete(make_api):
    api = await make_api([Started(2.0), Delta("answer", "a", (300,)), Delta("answer", "b", (301, 302)), finished()])
    await api.chat()
    async with api.session.get(api.url + "/v1/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page = await response.text()
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            samples.setdefault(sample.name, []).append(sample)
    assert set(NEEDED) <= set(samples)
    assert not [name for name in samples if name.endswith("_created")]
    for name, found in samples.items():
        if name.endswith("_bucket"):
            (last,) = [sample.value for sample in found if sample.labels["le"] == "+Inf"]
            assert last == samples[name.removesuffix("_bucket") + "_count"][0].value
    assert samples["vllm:inter_token_latency_seconds_count"][0].value == 2
    assert samples["vllm:request_generation_tokens_sum"][0].value == 4


async def test_tokens_are_those_that_a_chat_would_run(make_api, tokenizer):
    api = await make_api()
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({}, {"reasoning_effort": "low"}, {"enable_thinking": False}, {"tools": tools}):
        messages = [{"role": "user", "content": "grüß 好"}]
        status, reply = await api.post("/tokenize", {"messages": messages, **fields, "return_token_strs": True})
        assert status == 200 and reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == CONTEXT
        assert (await api.chat(messages=messages, **fields))[0] == 200
        assert list(api.engine.requests[-1].prompt) == reply["tokens"]
        assert len(reply["token_strs"]) == reply["count"] and reply["token_strs"][0] == "[gMASK]"
        status, text = await api.post("/v1/detokenize", {"tokens": reply["tokens"]})
        assert status == 200 and text["prompt"].endswith(
            "<think></think>" if "enable_thinking" in fields else "<think>"
        )
    status, reply = await api.post("/v1/tokenize", {"prompt": "<|user|>好", "add_special_tokens": True})
    assert reply == {
        "count": len(reply["tokens"]),
        "max_model_len": CONTEXT,
        "tokens": reply["tokens"],
        "token_strs": None,
    }
    assert reply["tokens"] == tokenizer.encode("<|user|>好")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**40]}, "tokens[0]"),
    ],
)
async def test_tokenize_refusals(make_api, path, body, param):
    api = await make_api()
    status, reply = await api.post(path, body)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_unknown_routes_and_methods(make_api):
    api = await make_api()
    for path in ("/", "/v1", "/slots", "/get_server_info", "/v1/embeddings", "/v1/chat/completions/"):
        status, body = await api.get(path)
        assert (status, body["error"]["code"]) == (404, "not_found")
    for method, path in (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("OPTIONS", "/health")):
        async with api.session.request(method, api.url + path) as response:
            body = await response.json()
            assert (response.status, body["error"]["code"]) == (405, "method_not_allowed")
            assert response.headers["Allow"]


async def test_request_ids(make_api):
    api = await make_api()
    for path in ("/health", "/nowhere", "/v1/models"):
        async with api.session.get(api.url + path, headers={"x-request-id": "mine-1"}) as response:
            assert response.headers["x-request-id"] == "mine-1"
        async with api.session.get(api.url + path, headers={"x-request-id": "a b\u00e9" * 100}) as response:
            assert response.headers["x-request-id"].startswith("req_")


async def test_props(make_api):
    status, props = await (await make_api()).get("/props")
    assert status == 200
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    assert props["default_generation_settings"]["params"]["top_p"] == 0.95
    assert "[gMASK]" in props["chat_template"]
