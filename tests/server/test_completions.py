"""Raw completions over HTTP with a scripted engine."""

from __future__ import annotations

import json

import pytest
from scripted import CONTEXT, MODEL, finished

from tfglm.engine.api import Delta, Failed, PromptLogprobs, Started, TokenLogprob

PATH = "/v1/completions"
REPLY = [Started(1.0), Delta("answer", "<think>ja", (300, 301)), Delta("answer", " 好", (302,)), finished("length")]


async def complete(api, **fields):
    return await api.post(PATH, {"model": MODEL, "prompt": "Once", **fields})


async def stream(api, **fields):
    body = {"model": MODEL, "prompt": "Once", "stream": True, **fields}
    async with api.session.post(api.url + PATH, json=body) as response:
        *lines, done, end = (await response.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_whole_and_streamed(make_api, tokenizer):
    api = await make_api(REPLY)
    status, reply = await complete(api)
    assert status == 200 and reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("<think>ja 好", "length", None)
    assert reply["usage"]["completion_tokens"] == 4
    request = api.engine.requests[0]
    assert list(request.prompt) == tokenizer.encode("Once")
    assert (request.split_reasoning, request.starts_in_reasoning) == (False, False)
    assert request.max_tokens == CONTEXT - len(request.prompt)
    chunks = await stream(api, stream_options={"include_usage": True})
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == choice["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == reply["usage"]


async def test_forms_of_the_prompt(make_api, tokenizer):
    api = await make_api(REPLY)
    ids = tokenizer.encode("<|user|>hi")
    for prompt in ("<|user|>hi", ["<|user|>hi"], ids, [ids]):
        status, _ = await complete(api, prompt=prompt)
        assert status == 200
    assert [list(request.prompt) for request in api.engine.requests] == [ids] * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 10**9]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, 10**1000]}, "prompt[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 3}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": 1}, "echo"),
    ],
)
async def test_refused(make_api, fields, param):
    api = await make_api()
    status, body = await complete(api, **fields)
    assert (status, body["error"]["param"]) == (400, param), body
    assert not api.engine.requests


async def test_too_long(make_api):
    api = await make_api()
    status, body = await complete(api, prompt=[5] * 100, max_tokens=CONTEXT)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"{CONTEXT + 100} tokens (100 in the prompt, {CONTEXT} in the completion)" in body["error"]["message"]


async def test_logprobs_in_the_legacy_shape(make_api, tokenizer):
    # The bytes of one three-byte character, one token each, so that offsets stand still inside it.
    parts = [tokenizer.encode("好")[i] for i in range(len(tokenizer.encode("好")))]
    a = tokenizer.encode("a")[0]
    tokens = [a, *parts, a]
    entries = tuple(TokenLogprob(token, -1.0 - i, ((token, -1.0 - i),)) for i, token in enumerate(tokens))
    half = 1 + len(parts) // 2
    script = [
        Delta("answer", "a", tuple(tokens[:half]), entries[:half]),
        Delta("answer", "好a", tuple(tokens[half:]), entries[half:]),
        Delta("answer", "", (tokenizer.id_of("<|user|>"),), (TokenLogprob(tokenizer.id_of("<|user|>"), -9.0),)),
        finished(),
    ]
    api = await make_api(script)
    logprobs = (await complete(api, logprobs=1))[1]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in entries]
    assert logprobs["tokens"][0] == logprobs["tokens"][-1] == "a"
    assert logprobs["text_offset"] == [0, *[1] * len(parts), 2]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[entry.logprob] for entry in entries]
    assert api.engine.requests[0].logprobs == 1 and api.engine.requests[0].prompt_logprobs is None
    pieces = [c["choices"][0]["logprobs"] for c in await stream(api, logprobs=1)]
    for name, values in logprobs.items():
        assert [value for piece in pieces if piece for value in piece[name]] == values


async def test_echo_with_logprobs_scores_the_prompt(make_api, tokenizer):
    """What evaluation harnesses send: the prompt's own log-probabilities, no new text."""
    ids = tokenizer.encode("Once upon")
    scores = (None, *(TokenLogprob(token, -2.0, ((token, -2.0),)) for token in ids[1:]))
    api = await make_api([Started(1.0), PromptLogprobs(scores), finished("length", tokens=0)])
    status, reply = await complete(api, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    assert status == 200
    choice = reply["choices"][0]
    assert choice["text"] == "Once upon"
    assert choice["logprobs"]["token_logprobs"] == [None] + [-2.0] * (len(ids) - 1)
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == "Once upon"
    offsets = choice["logprobs"]["text_offset"]
    assert ["Once upon"[i:j] for i, j in zip(offsets, [*offsets[1:], None], strict=True)] == choice["logprobs"][
        "tokens"
    ]
    request = api.engine.requests[0]
    assert (request.max_tokens, request.prompt_logprobs, request.logprobs) == (0, 1, 1)


async def test_echo_alone(make_api):
    api = await make_api(REPLY)
    assert (await complete(api, echo=True))[1]["choices"][0]["text"] == "Once<think>ja 好"
    assert "".join(c["choices"][0]["text"] for c in await stream(api, echo=True)) == "Once<think>ja 好"
    assert api.engine.requests[0].prompt_logprobs is None
    await complete(api, echo=True, max_tokens=0)
    assert api.engine.requests[-1].prompt_logprobs == 0


async def test_failures(make_api):
    api = await make_api([Delta("answer", "so", (300,)), Failed("E_INTERNAL", "broke")])
    assert (await complete(api))[0] == 500
    assert (await stream(api))[-1]["error"]["message"] == "broke"
