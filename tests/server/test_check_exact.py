"""`tfglm check exact` against servers that are honest, and against servers that cheat in one way each."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from tfglm.cli.check import cases
from tfglm.cli.main import main

Body = dict[str, Any]


class Honest:
    """Replies by a hash of the request; subclasses cheat."""

    sha = True

    def __init__(self) -> None:
        self.running = 0

    def text(self, body: Body) -> str:
        key = (body["messages"][0]["content"], body["temperature"], body["seed"], body["max_tokens"])
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def tokens(self, body: Body) -> int:
        return 64

    def drafted(self, body: Body) -> int:
        return 5 if body.get("draft", True) else 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.running += 1
        await asyncio.sleep(0.01)
        text, tokens = self.text(body), self.tokens(body)
        self.running -= 1
        reply: Body = {
            "choices": [{"message": {"content": text}, "finish_reason": "length"}],
            "usage": {"completion_tokens": tokens},
            "timings": {"draft_n": self.drafted(body)},
        }
        if self.sha:
            reply["tfglm"] = {"token_sha": hashlib.sha256(text.encode()).hexdigest()}
        return web.json_response(reply)


class ChangesDrafted(Honest):
    def text(self, body: Body) -> str:
        text = super().text(body)
        return text[:40] + "!" if body.get("draft", True) and body["temperature"] == 1.0 else text


class ChangesTogether(Honest):
    def text(self, body: Body) -> str:
        return super().text(body) + ("?" if self.running > 1 else "")


class CountsTwice(Honest):
    def tokens(self, body: Body) -> int:
        return 65 if body.get("draft", True) else 64


class DraftsAnyway(Honest):
    def drafted(self, body: Body) -> int:
        return 3


class NeverDrafts(Honest):
    def drafted(self, body: Body) -> int:
        return 0


class Plain(Honest):
    sha = False


@contextmanager
def served(server: Honest) -> Iterator[str]:
    """The server on a thread of its own, at the yielded address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def begin() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def check(server: Honest, *options: str) -> int:
    with served(server) as url:
        return main(["check", "exact", url, *options])


@pytest.mark.parametrize("kind", [Honest, Plain])
def test_an_honest_server_passes(kind: Callable[[], Honest], capsys: pytest.CaptureFixture[str]) -> None:
    assert check(kind(), "--repeat", "2") == 0
    out = capsys.readouterr().out
    count = len(cases())
    assert out.count(f"drafted alone: {count}/{count} equal") == out.count(f"together: {count}/{count} equal") == 2
    assert "DIFFERENT" not in out and "says little" not in out


def test_a_reply_that_drafting_changes_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ChangesDrafted()) == 1
    out = capsys.readouterr().out
    assert out.count("DIFFERENT (at character 40") == 4 and f"alone: {len(cases()) - 2}/{len(cases())}" in out


def test_a_reply_that_company_changes_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ChangesTogether()) == 1
    out = capsys.readouterr().out
    assert f"alone: {len(cases())}/{len(cases())}" in out and f"together: {len(cases())}/" not in out


def test_tokens_counted_otherwise_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(CountsTwice()) == 1
    assert "the same text of 64 and 65 tokens" in capsys.readouterr().out


def test_a_server_that_drafts_when_told_not_to_cannot_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(DraftsAnyway()) == 1
    assert "E_CHECK" in capsys.readouterr().err


def test_a_server_that_never_drafts_passes_with_a_remark(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(NeverDrafts()) == 0
    assert "says little" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "exact", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
