"""The real HTTP application over a scripted engine, with the tokenizer and template of a synthetic checkpoint."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from scripted import CONTEXT, MODEL, Api, FakeEngine

from tfglm.checkpoint.synth import write_checkpoint
from tfglm.engine.tokenizer import Tokenizer
from tfglm.server.info import ModelInfo
from tfglm.server.run import make_runner
from tfglm.server.state import Served, ServerState
from tfglm.server.template import ChatTemplate
from tfglm.settings import Settings


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / MODEL
    write_checkpoint(folder, "tiny", 0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


@pytest.fixture(scope="session")
def template(checkpoint: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(checkpoint)


ApiMaker = Callable[..., Any]


@pytest_asyncio.fixture
async def make_api(tokenizer: Tokenizer, template: ChatTemplate) -> AsyncIterator[ApiMaker]:
    """Starts applications on free ports: `await make_api(script=[...], loaded=True, **settings)`."""
    opened: list[tuple[web.AppRunner, aiohttp.ClientSession]] = []

    async def make(script: list[Any] | None = None, *, loaded: bool = True, **settings: Any) -> Api:
        engine = FakeEngine() if script is None else FakeEngine(script)
        state = ServerState(replace(Settings(), **settings))
        if loaded:
            state.open(Served(engine, tokenizer, template, ModelInfo(MODEL, CONTEXT)))
        runner = make_runner(state, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        session = aiohttp.ClientSession()
        opened.append((runner, session))
        return Api(session, f"http://127.0.0.1:{runner.addresses[0][1]}", state, engine, runner)

    yield make
    for runner, session in opened:
        await session.close()
        await runner.cleanup()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a script until the test opens it."""
    event = threading.Event()
    yield event
    event.set()
