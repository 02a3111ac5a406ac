"""`tfglm check quality | needle | tools` against servers that know everything, nothing, only the past, or break."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from fake_openai import Body, Fake, Say, served

from tfglm.checks.problem import Problem
from tfglm.checks.suite import CATEGORIES, suite, tool_calls
from tfglm.cli.main import main

LEVELS = [0, 2, 4]


def known(problems: list[Problem]) -> Callable[[Body], Problem]:
    """Finds the problem that a request asks."""
    table = {json.dumps([list(p.messages), list(p.tools)]): p for p in problems}
    return lambda body: table[json.dumps([body["messages"], body.get("tools", [])])]


def right(problem: Problem) -> Say:
    return Say(problem.answer, "Let me think: 1, 2, 3.", tuple((call.name, call.arguments) for call in problem.calls))


def quality_problems() -> list[Problem]:
    return list(suite(list(CATEGORIES), LEVELS, 2, 0))


def oracle() -> Fake:
    find = known(quality_problems())
    return Fake(lambda body: right(find(body)))


def liar() -> Fake:
    return Fake(lambda body: Say("The answer is 123456789: {}", calls=(("lie", "{}"),) if "tools" in body else ()))


def quality(fake: Fake, *options: str) -> int:
    with served(fake) as url:
        return main(["check", "quality", url, "--level", "0,2,4", "--count", "2", *options])


def test_a_server_that_knows_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, file = oracle(), tmp_path / "found.json"
    assert quality(fake, "--threshold", "1", "--json", str(file), "--thinking", "on", "--api-key", "secret") == 0
    found = json.loads(file.read_text())
    asked = len(CATEGORIES) * len(LEVELS) * 2
    assert found["summary"]["all"]["right"] == found["summary"]["all"]["answered"] == len(fake.bodies) == asked
    assert {result["outcome"] for result in found["results"]} == {"right"}
    assert {result["reasoning"] for result in found["results"]} == {"Let me think: 1, 2, 3."}
    assert len({result["id"] for result in found["results"]}) == asked
    assert {body["temperature"] for body in fake.bodies} == {0.0}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in fake.bodies)
    assert set(fake.keys) == {"Bearer secret"}
    assert f"{asked}/{asked}" in capsys.readouterr().out


def test_a_server_that_knows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality(liar(), "--threshold", "0.01") == 1
    assert quality(liar()) == 0
    out = capsys.readouterr().out
    assert "all: 0.0 % right, below 1.0 %" in out and "no reply" not in out


def test_an_answer_in_the_reasoning_is_none() -> None:
    find = known(quality_problems())
    thinker = Fake(lambda body: Say("Well.", right(find(body)).content))
    assert quality(thinker, "--only", "arithmetic,ledger,json,python", "--threshold", "0.01") == 1


def test_reasoning_that_the_server_left_in_the_content_is_parted() -> None:
    find = known(quality_problems())
    leaky = Fake(lambda body: Say(f"<think>It is 7.</think>{find(body).answer}"))
    assert quality(leaky, "--only", "arithmetic,ledger", "--threshold", "1") == 0


def test_a_threshold_of_one_category(capsys: pytest.CaptureFixture[str]) -> None:
    find = known(quality_problems())

    def reply(body: Body) -> Say:
        problem = find(body)
        return Say("no") if problem.category == "json" else right(problem)

    assert quality(Fake(reply), "--threshold", "ledger=1", "--threshold", "0.8") == 0
    assert quality(Fake(reply), "--threshold", "json=0.5") == 1
    assert "json: 0.0 % right, below 50.0 %" in capsys.readouterr().out
    assert quality(Fake(reply), "--threshold", "jsno=0.5") == 3
    assert "--threshold jsno: there is no such line, only questions" in capsys.readouterr().err


def test_two_servers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one knows nothing of arithmetic: six discordant pairs, p = 2 / 2^6."""
    find, file = known(quality_problems()), tmp_path / "found.json"

    def reply(body: Body) -> Say:
        problem = find(body)
        return Say("0.5") if problem.category == "arithmetic" else right(problem)

    with served(Fake(reply)) as other:
        assert quality(oracle(), "--against", other, "--json", str(file)) == 0
    compared = json.loads(file.read_text())["against"]["comparison"]
    assert compared["arithmetic"] == {"both": 0, "only_a": 6, "only_b": 0, "neither": 0, "left_out": 0, "p": 2 / 2**6}
    assert compared["ledger"]["both"] == 6 and compared["ledger"]["p"] == 1.0
    assert compared["all"]["both"] == 30 and compared["all"]["only_a"] == 6 and compared["all"]["p"] == 2 / 2**6
    assert "0.0312" in capsys.readouterr().out


# --- servers that fail


def test_failures_are_named_and_are_no_wrong_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third reply is a failure of another sort; the others are right."""
    find, file = known(quality_problems()), tmp_path / "found.json"
    faults = [
        lambda: web.json_response({"error": {"message": "the queue is full"}}, status=503),
        lambda: web.Response(text="<html>bad gateway</html>", status=502),
        lambda: web.Response(text="not json"),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response({"choices": [{"message": {"tool_calls": [{"function": {"name": "f"}}]}}]}),
    ]
    turn = iter(range(1000))

    def reply(body: Body) -> Say | web.Response:
        at = next(turn)
        return faults[at // 3 % len(faults)]() if at % 3 == 2 else right(find(body))

    assert quality(Fake(reply), "--concurrency", "1", "--json", str(file), "--threshold", "1") == 3
    summary = json.loads(file.read_text())["summary"]["all"]
    assert summary["errors"] == 12 and summary["answered"] == summary["right"] == 24 and summary["score"] == 1.0
    out = capsys.readouterr().out
    for told in ("status 503: the queue is full", "status 502", "no JSON object", "another shape"):
        assert told in out


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("quality", "needle", "tools"):
        assert main(["check", kind, "http://127.0.0.1:9"]) == 3
        assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_a_server_that_dies_is_not_asked_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(lambda body: web.json_response({"error": {"message": "wrong key"}}, status=401))
    assert quality(fake, "--concurrency", "1", "--threshold", "0.5") == 3
    assert len(fake.bodies) == 5
    out = capsys.readouterr().out
    assert "5 × status 401: wrong key" in out and "31 × not asked after too many errors" in out


def test_a_reply_that_takes_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(Fake):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            raise AssertionError

    with served(Slow(lambda body: Say())) as url:
        assert (
            main(["check", "quality", url, "--only", "json", "--level", "0", "--count", "1", "--timeout", "0.3"]) == 3
        )
    assert "1 × no whole reply within 0.3 s" in capsys.readouterr().out


def test_a_reply_at_its_limit_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert quality(Fake(lambda body: Say("Let me see", cut=True)), "--json", str(file), "--only", "ledger,tools") == 0
    summary = json.loads(file.read_text())["summary"]
    assert summary["all"]["cut"] == summary["all"]["answered"] == 12 and summary["all"]["errors"] == 0


# --- needles: the servers read the text themselves, knowing nothing of how it was made


def codes(text: str) -> dict[str, list[int]]:
    """The values of each key in the order in which the text tells them."""
    found: dict[str, list[int]] = {}
    for key, value in re.findall(r"code for (\w+) (?:is|has changed to) (\d+)", text):
        found.setdefault(key, []).append(int(value))
    return found


def reader(which: int) -> Callable[[Body], Say]:
    """Tells each key's last (-1) or first (0) value."""

    def reply(body: Body) -> Say:
        text, _, question = body["messages"][0]["content"].rpartition("\n\n")
        found = codes(text)
        if "List the codes" in question:
            keys = question.split("for: ")[1].rstrip(".").split(", ")
            return Say("\n".join(f"- **{key}**: {found[key][which]}" for key in keys))
        [key] = [key for key in found if re.search(rf"\b{key}\b", question)]
        return Say(f"It is {found[key][which]}.")

    return reply


def needle(fake: Fake, file: Path, *options: str) -> tuple[int, Body]:
    with served(fake) as url:
        code = main(["check", "needle", url, "--lengths", "1k,3k", "--count", "4", "--json", str(file), *options])
    return code, json.loads(file.read_text())


@pytest.mark.parametrize("tokenizes", [True, False])
def test_needles_have_the_lengths_asked_for(tokenizes: bool, tmp_path: Path) -> None:
    code, found = needle(Fake(reader(-1), tokenizes=tokenizes), tmp_path / "found.json", "--threshold", "1")
    assert code == 0 and found["summary"]["all"]["right"] == 2 * 3 * 4
    for result in found["results"]:
        assert abs(result["prompt_tokens"] - result["length"]) < 0.04 * result["length"]
    assert [r["depth"] for r in found["results"] if r["kind"] == "single"][:4] == [0.0, 1 / 3, 2 / 3, 1.0]


def test_outdated_values_are_failures_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = needle(Fake(reader(0)), tmp_path / "found.json", "--threshold", "single=1", "--threshold", "0.9")
    assert code == 1
    summary = found["summary"]
    assert summary["single"]["score"] == 1.0 and summary["corrected"]["outdated"] == 8
    assert summary["recall"]["outdated"] == 8 and summary["recall"]["score"] == 11 / 16
    out = capsys.readouterr().out
    assert "44/64" in out and "all: 56.2 % right, below 90.0 %" in out


def test_a_length_without_room_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Fake(reader(-1), tokenizes=True)) as url:
        assert main(["check", "needle", url, "--lengths", "100"]) == 3
    assert "of 100 tokens has no room for its keys; the least is" in capsys.readouterr().err


def test_a_server_that_counts_no_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    class Silent(Fake):
        def count(self, body: Body) -> int:
            return 0

    with served(Silent(reader(-1))) as url:
        assert main(["check", "needle", url, "--lengths", "2k"]) == 3
    assert "it needs /tokenize or usage.prompt_tokens" in capsys.readouterr().err


# --- tool calls


def tool_problems() -> list[Problem]:
    return list(tool_calls([0, 3], 3, 0))


def tools(fake: Fake, *options: str) -> int:
    with served(fake) as url:
        return main(["check", "tools", url, "--level", "0,3", "--count", "3", *options])


def test_right_calls_whole_and_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    find = known(tool_problems())
    fake = Fake(lambda body: right(find(body)))
    assert tools(fake, "--threshold", "1") == 0
    assert sum(body.get("stream", False) for body in fake.bodies) == len(fake.bodies) / 2 == 36
    assert "36/36" in capsys.readouterr().out
    assert any(ord(c) > 127 for body in fake.bodies for c in json.dumps(body["messages"], ensure_ascii=False))


def test_streamed_calls_that_differ_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    find = known(tool_problems())

    def reply(body: Body) -> Say:
        problem = find(body)
        said = right(problem)
        if body.get("stream") and problem.kind == "nested":
            said.calls = ((said.calls[0][0], said.calls[0][1][:-1]),)
        return said

    assert tools(Fake(reply)) == 1
    out = capsys.readouterr().out
    assert "streamed calls differ from whole ones in 6: tools/nested/0/0" in out and "no reply" not in out


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (b"", "the stream broke off without a finish_reason"),
        (b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n', "broke off before [DONE]"),
        (b'data: {"error": {"message": "out of luck"}}\n\ndata: [DONE]\n\n', "ended with an error: out of luck"),
        (b"data: [DONE]\n\n", "the stream broke off without a finish_reason"),
        (b"data: {broken\n\ndata: [DONE]\n\n", "no JSON object: b'{broken'"),
        (b'data: {"choices": [{"delta": {"tool_calls": [{}]}}]}\n\n', "an event of another shape"),
    ],
)
def test_a_stream_that_breaks_is_no_answer(tail: bytes, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    find = known(tool_problems())
    start = b'data: {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": null}]}\n\n'

    def reply(body: Body) -> Say | web.Response:
        return web.Response(body=start + tail) if body.get("stream") else right(find(body))

    assert tools(Fake(reply), "--threshold", "1", "--concurrency", "1") == 3
    out = capsys.readouterr().out
    assert "no reply: 5 × " in out and told in out and "below" not in out


def test_a_connection_that_is_cut_while_it_streams(capsys: pytest.CaptureFixture[str]) -> None:
    find = known(tool_problems())

    class Cutter(Fake):
        async def stream(self, request: web.Request, said: Say, usage: Body) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"choices": [{"index": 0, "delta": {"content": "hel')
            assert request.transport is not None
            request.transport.abort()
            return response

    assert tools(Cutter(lambda body: right(find(body))), "--concurrency", "1") == 3
    assert "no reply: 5 × " in capsys.readouterr().out
