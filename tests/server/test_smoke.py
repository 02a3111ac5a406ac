"""The request that a server makes of itself before it says that it is ready."""

from __future__ import annotations

import threading

import pytest
from scripted import CONTEXT, MODEL, FakeEngine, finished

from tfglm.engine.api import Failed, Started
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import ConfigError
from tfglm.server import smoke
from tfglm.server.info import ModelInfo
from tfglm.server.state import Served
from tfglm.server.template import ChatTemplate


@pytest.fixture
def served(tokenizer: Tokenizer, template: ChatTemplate) -> Served:
    return Served(FakeEngine([Started(0.0), finished()]), tokenizer, template, ModelInfo(MODEL, CONTEXT))


def test_it_is_a_rendered_greeting(served: Served) -> None:
    smoke.smoke(served)
    [request] = served.engine.requests
    assert "<|user|>Hello<|assistant|>" in served.tokenizer.decode(request.prompt)
    assert (request.max_tokens, request.sampling.temperature) == (4, 0.0)


def test_an_engine_that_fails_is_told(served: Served) -> None:
    served.engine.script = [Started(0.0), Failed("E_INTERNAL", "a kernel failed")]
    with pytest.raises(smoke.SmokeError, match="the first request failed: E_INTERNAL: a kernel failed"):
        smoke.smoke(served)


def test_an_engine_that_says_nothing_is_told(
    served: Served, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "SECONDS", 0.05)
    served.engine.script = [gate]
    with pytest.raises(smoke.SmokeError, match="no progress"):
        smoke.smoke(served)


def test_a_window_without_room_is_told(served: Served, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    tiny = Served(served.engine, tokenizer, template, ModelInfo(MODEL, 8))
    with pytest.raises(ConfigError, match=r"--context is 8; .* at least \d+ are needed"):
        smoke.smoke(tiny)
