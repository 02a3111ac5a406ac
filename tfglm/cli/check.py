"""`tfglm check exact URL`: whether a running server's drafted replies are its serial ones, alone and together.

The checks of what a model knows (`needle`, `quality`, `tools`) are in tfglm.cli.check_suite.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfglm.checks.address import base_url, reason
from tfglm.checks.errors import CheckError
from tfglm.cli import check_suite
from tfglm.settings import env_name

if TYPE_CHECKING:
    import aiohttp

SEED = 7
SECONDS = 1800
LONG_LINES = 180

_CODE = """def total(prices, tax_rate):
    result = 0
    for price in prices:
        result = result + price * (1 + tax_rate)
    return result


def average(prices, tax_rate):
    return total(prices, tax_rate) / len(prices)
"""


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    temperature: float = 0.0
    thinking: bool = False


def cases() -> list[Case]:
    """Greedy and sampled, with and without thinking, code and prose, an edit that copies, and a long context."""
    log = "\n".join(f"{n:04}: sensor {n * 37 % 101} reports {n * 7919 % 1000} units" for n in range(LONG_LINES))
    return [
        Case("code", "Write a Python function that merges two sorted lists."),
        Case("prose", "Describe a harbour town in winter."),
        Case("haiku", "Write a haiku about rain on a tin roof.", temperature=1.0),
        Case("reasoning", "A train leaves at 9:40 and arrives at 13:05. How long is the journey?", 1.0, thinking=True),
        Case("shell", "A bash one-liner that counts the lines of all .py files below a folder.", 0.7, thinking=True),
        Case("edit", f"Repeat this code with `tax_rate` renamed to `rate`, and nothing else:\n\n{_CODE}"),
        Case("long", f"{log}\n\nRepeat lines 0100 to 0110 of this log, then say which sensor reported most.", 0.3),
    ]


@dataclass(frozen=True)
class Answer:
    """What must not differ, and how many drafts the server says it verified (None if it does not say)."""

    text: tuple[str, str]
    finish: str
    tokens: int
    digest: str
    drafted: int | None

    def same(self, other: Answer) -> bool:
        return (self.text, self.finish, self.tokens, self.digest) == (
            other.text,
            other.finish,
            other.tokens,
            other.digest,
        )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("check", help="check a running server", description="Check a running server.")
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    exact = kinds.add_parser(
        "exact",
        help="compare drafted replies with serial ones",
        description='Ask the same questions with "draft": false and with drafts, one at a time and all together, and '
        "compare the replies. Exits with 1 on any difference. Any server with an OpenAI-compatible API that takes a "
        "`draft` field will do.",
    )
    exact.add_argument("url", metavar="URL", help="where the server listens, such as http://127.0.0.1:8888")
    exact.add_argument("--tokens", type=int, default=200, metavar="N", help="length of the replies (default: 200)")
    exact.add_argument("--repeat", type=int, default=1, metavar="N", help="how often to do it all (default: 1)")
    exact.add_argument("--model", help="model to ask for (default: the one that is served)")
    exact.add_argument("--api-key", help=f"key to send (default: {env_name('api_key')})")
    exact.set_defaults(run=run)
    check_suite.add_parsers(kinds)


def run(args: argparse.Namespace) -> int:
    """0 if every reply is the serial one, 1 if one is not. Raises CheckError."""
    key = args.api_key or os.environ.get(env_name("api_key"), "").split(",")[0].strip()
    return asyncio.run(_check(base_url(args.url), args.model, key, args.tokens, args.repeat))


async def _check(url: str, model: str | None, key: str, tokens: int, repeat: int) -> int:
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            name = model or await _served(session, url)
            right = [await _round(_Client(session, url, name, tokens)) for _ in range(repeat)]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CheckError(f"{url} does not answer: {reason(error)}") from None
    return 0 if all(right) else 1


async def _served(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        if response.status != 200:
            raise CheckError(f"{url}/v1/models answers {response.status}: {(await response.text())[:200]}")
        return str((await response.json())["data"][0]["id"])


class _Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, tokens: int) -> None:
        self._session, self._url, self._model, self._tokens = session, url, model, tokens

    async def ask(self, case: Case, *, draft: bool) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": case.prompt}],
            "temperature": case.temperature,
            "seed": SEED,
            "max_tokens": self._tokens,
            "chat_template_kwargs": {"enable_thinking": case.thinking},
        }
        if not draft:
            body["draft"] = False
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise CheckError(f"case {case.name}: the server answers {response.status}: {await response.text()}")
            reply = await response.json()
        [choice] = reply["choices"]
        message = choice["message"]
        return Answer(
            text=(message.get("reasoning_content") or "", message.get("content") or ""),
            finish=choice["finish_reason"],
            tokens=reply["usage"]["completion_tokens"],
            digest=reply.get("tfglm", {}).get("token_sha", ""),
            drafted=reply.get("timings", {}).get("draft_n"),
        )


async def _round(client: _Client) -> bool:
    """All comparisons once; whether all were equal."""
    asked = cases()
    serial = [await client.ask(case, draft=False) for case in asked]
    if any(answer.drafted for answer in serial):
        raise CheckError(
            'the server drafts although asked not to ("draft": false), so there is nothing to compare with'
        )
    alone = [await client.ask(case, draft=True) for case in asked]
    together = list(await asyncio.gather(*(client.ask(case, draft=True) for case in asked)))
    for case, plain, first, second in zip(asked, serial, alone, together, strict=True):
        told = "" if first.drafted is None else f", {first.drafted} drafts verified"
        print(f"{case.name:10} {plain.tokens:5} tokens{told}: {_verdict(plain, first)} alone, {_verdict(plain, second)}"
              " together")  # fmt: skip
    if all(answer.drafted == 0 for answer in alone):
        print("the server drafted nothing, so that its replies are equal says little")
    return all([_count("drafted alone", serial, alone), _count("drafted together", serial, together)])


def _verdict(serial: Answer, drafted: Answer) -> str:
    if serial.same(drafted):
        return "equal"
    for kind, (a, b) in zip(("reasoning", "answer"), zip(serial.text, drafted.text, strict=True), strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"DIFFERENT (at character {at} of the {kind}: {a[at : at + 20]!r} became {b[at : at + 20]!r})"
    return f"DIFFERENT (the same text of {serial.tokens} and {drafted.tokens} tokens, {serial.finish}/{drafted.finish})"


def _count(what: str, serial: Sequence[Answer], drafted: Sequence[Answer]) -> bool:
    equal = sum(a.same(b) for a, b in zip(serial, drafted, strict=True))
    print(f"{what}: {equal}/{len(serial)} equal to serial")
    return equal == len(serial)
