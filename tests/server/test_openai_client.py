"""The real server in its own process, a synthetic checkpoint, and OpenAI's own client."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from processes import ServerProcess

from tfglm.engine.tokenizer import Tokenizer

WINDOW = 8192
HI = [{"role": "user", "content": "Tell me about the sea."}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
IDLE_SECONDS = 1.0


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    command = ("-m", "tfglm.cli.main", "serve", checkpoint, "--port", "0", "--threads", "1", "--prefill-rows", "64")
    with ServerProcess(*command, environ={"TFGLM_MAX_TOKENS": "64"}) as server:
        yield server.wait_for(r"(http://[\d.]+:\d+)")


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {**OFF, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HI, "max_tokens": 24, "temperature": 0, **fields}, extra_body=extra
    )


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/health", timeout=10) as response:
        return json.load(response)


def idle_after(url: str) -> float:
    """Seconds until nothing runs and nothing waits."""
    begin = time.monotonic()
    while (now := health(url))["running"] + now["waiting"]:
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    return time.monotonic() - begin


def soon_idle(url: str, leave: Callable[[], None]) -> bool:
    """Whether the engine is idle within a second of a client's leaving, in one of three tries: others may load the
    machine, and a reply or a prompt that ran on would take many seconds every time."""
    for _ in range(3):
        leave()
        if idle_after(url) <= IDLE_SECONDS:
            return True
    return False


def test_models(client, url):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.model_extra["max_model_len"]) == ("tiny", "tfglm", WINDOW)
    assert client.models.retrieve("tiny") == model
    assert health(url)["status"] == "ok"


def test_a_whole_reply_and_its_usage(client, url):
    reply = ask(client)
    (choice,) = reply.choices
    assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
    assert choice.message.content
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 24 and usage.completion_tokens_details.reasoning_tokens == 0
    body = {"messages": HI, **OFF}
    request = urllib.request.Request(url + "/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["count"] == usage.prompt_tokens


@pytest.mark.parametrize("thinking", [True, False])
def test_a_stream_is_the_whole_reply_in_pieces(client, thinking):
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
    whole = ask(client, extra_body=extra)
    text = {"content": "", "reasoning_content": ""}
    chunks = list(ask(client, extra_body=extra, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        delta = chunk.choices[0].delta
        text["content"] += delta.content or ""
        text["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
    message = whole.choices[0].message
    assert text["content"] == message.content
    assert text["reasoning_content"] == (message.model_extra or {}).get("reasoning_content", "")
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    # How many tokens were drafted may differ from run to run; the tokens may not.
    assert chunks[-2].model_extra["tfglm"]["token_sha"] == whole.model_extra["tfglm"]["token_sha"]
    assert bool(text["reasoning_content"]) is thinking


def test_stop_strings_cut_the_answer(client):
    text = ask(client).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    reply = ask(client, stop=[stop, "never said \u2603"])
    assert reply.choices[0].message.content == text[: text.find(stop)]
    assert (reply.choices[0].finish_reason, reply.choices[0].model_extra["stop_reason"]) == ("stop", stop)


def test_the_same_seed_gives_the_same_reply(client):
    def sampled(**fields: Any) -> str:
        return ask(client, temperature=1.0, **fields).model_extra["tfglm"]["token_sha"]

    first = sampled(seed=7)
    assert sampled(seed=7) == first == sampled(seed=7, extra_body={"draft": False})
    assert len({sampled(seed=seed) for seed in range(5)}) > 1
    assert sampled() == sampled()


def test_logprobs(client):
    reply = ask(client, logprobs=True, top_logprobs=3, max_tokens=8)
    content = reply.choices[0].logprobs.content
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == reply.choices[0].message.content
    )
    for entry in content:
        assert len(entry.top_logprobs) == 3
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and sum(map(math.exp, logprobs)) <= 1 + 1e-6
        # Greedy: the token that was taken is the best one.
        assert (entry.logprob, entry.bytes) == (logprobs[0], entry.top_logprobs[0].bytes)


def test_two_at_once_are_what_they_are_alone(client):
    requests = [{"seed": seed, "temperature": 1.0, "max_tokens": 40} for seed in (1, 2)]
    alone = [ask(client, **request).choices[0].message.content for request in requests]
    together: dict[int, str] = {}

    def run(i: int) -> None:
        together[i] = ask(client, **requests[i]).choices[0].message.content

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [together[0], together[1]] == alone


def test_leaving_in_the_middle_of_a_reply(client, url):
    def leave() -> None:
        stream = ask(client, stream=True, max_tokens=6000, temperature=1.0, extra_body={"ignore_eos": True})
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
        assert health(url)["running"] == 1
        stream.close()

    assert soon_idle(url, leave)


def test_leaving_in_the_middle_of_a_prompt(client, url):
    """The stream is open before the prompt is read; closing it ends the reading, not only the reply."""
    before = health(url)["prompt_tokens"]
    words = [{"role": "user", "content": "sea salt and wind " * 800}]

    def leave() -> None:
        stream = ask(client, stream=True, messages=words, max_tokens=1)
        assert health(url)["running"] == 1
        stream.close()

    assert soon_idle(url, leave)
    assert health(url)["prompt_tokens"] == before


def test_leaving_without_a_stream(client, url):
    body = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 6000, "ignore_eos": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    def leave() -> None:
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head.encode() + body)
            while not health(url)["running"]:
                time.sleep(0.01)

    assert soon_idle(url, leave)


def test_a_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * WINDOW}])
    error = caught.value
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert f"maximum context length is {WINDOW} tokens" in error.message and "you requested" in error.message


def test_two_megabytes(client, url, tokenizer: Tokenizer):
    text = "The quick brown fox — jumps over 13 lazy dogs.\n" * 43_000
    assert len(text.encode()) > 2_000_000
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": text}])
    assert caught.value.code == "context_length_exceeded"
    body = json.dumps({"prompt": text}).encode()
    request = urllib.request.Request(url + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        tokens = json.load(response)["tokens"]
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_types(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(("body", "status"), [(b'{"model": "tiny", ', b"400"), (b"", b"400")])
def test_malformed_json(url, body, status):
    assert post_raw(url, body, chunked=False).startswith(b"HTTP/1.1 " + status)
    assert post_raw(url, body, chunked=True).startswith(b"HTTP/1.1 " + status)


def test_chunked_bodies(client, url):
    body = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 24, "temperature": 0, **OFF}).encode()
    answer = post_raw(url, body, chunked=True)
    assert answer.startswith(b"HTTP/1.1 200")
    reply = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert reply["choices"][0]["message"]["content"] == ask(client).choices[0].message.content


def test_completions(client):
    first = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=16, temperature=0)
    pieces = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=16, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == first.choices[0].text
    scored = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "Once upon a time" == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    assert scored.usage.completion_tokens == 0


def test_the_counters_have_moved(client, url):
    before = health(url)
    reply = ask(client)
    with urllib.request.urlopen(url + "/metrics") as response:
        page = response.read().decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    total = before["generation_tokens"] + reply.usage.completion_tokens
    assert float(values['vllm:generation_tokens_total{model_name="tiny"}']) == total
    assert float(values['vllm:iteration_tokens_total_sum{model_name="tiny"}']) > total
    # Prompt chunks are forwards too.
    rounds = float(values['tfglm:rounds_total{model_name="tiny"}'])
    assert float(values['vllm:iteration_tokens_total_count{model_name="tiny"}']) > rounds > 0


def post_raw(url: str, body: bytes, *, chunked: bool) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    if chunked:
        pieces = [body[i : i + 11] for i in range(0, len(body), 11)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        head += "Transfer-Encoding: chunked\r\n\r\n"
    else:
        head += f"Content-Length: {len(body)}\r\n\r\n"
    answer = b""
    with socket.create_connection((host, int(port)), 60) as sock:
        sock.sendall(head.encode() + body)
        while data := sock.recv(65536):
            answer += data
    return answer
