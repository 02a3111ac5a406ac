"""Where checks and chat look for a server, and what they say where there is none."""

import asyncio
import socket

import aiohttp
import pytest

from tfglm.checks.address import base_url, reason
from tfglm.cli.main import main


@pytest.mark.parametrize("given", ["localhost:8888", "http://localhost:8888/", "http://localhost:8888/v1/"])
def test_an_address_may_lack_its_scheme(given: str) -> None:
    assert base_url(given) == "http://localhost:8888"
    assert base_url("https://models.example/glm/v1") == "https://models.example/glm"


def test_why_nothing_answers_is_said_in_the_systems_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(url: str) -> None:
        async with aiohttp.ClientSession() as session, session.get(url):
            pass

    with pytest.raises(aiohttp.ClientError) as refused:
        asyncio.run(get("http://127.0.0.1:9"))
    assert reason(refused.value) == "connection refused"

    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)  # a resolver may take its time, or know every name
    with pytest.raises(aiohttp.ClientError) as unknown:
        asyncio.run(get("http://no-such-host.invalid"))
    assert reason(unknown.value) == "name or service not known"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["needle", "--lengths", "long"], "'long' is no list of tokens such as 2k,8k,64k"),
        (["quality", "--level", "easy"], "'easy' is no list of levels 0 to 4"),
        (["quality", "--level", "9"], "'9' is no list of levels 0 to 4"),
    ],
)
def test_a_list_that_is_none_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", *arguments, "http://127.0.0.1:9"])
    assert says in capsys.readouterr().err
