"""`tfglm chat`: talk to a running server in the terminal, over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from tfglm.checks.address import base_url, reason
from tfglm.errors import TfglmError
from tfglm.settings import Settings, env_name

if TYPE_CHECKING:
    import aiohttp

HELP = "/think on|off|low|high|max   /reset   /quit   (Ctrl-C stops a reply, Ctrl-D leaves)"
THINKING: dict[str, dict[str, Any]] = {
    "on": {"chat_template_kwargs": {"enable_thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "low": {"reasoning_effort": "low"},
    "high": {"reasoning_effort": "high"},
    "max": {"reasoning_effort": "max"},
}
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), 0xFFFD
)
"""What a reply must not do to a terminal: control characters become pictures of themselves."""
CONNECT_SECONDS = 5
SILENCE_SECONDS = 900
"""The server sends a comment every few seconds; this is for those who turned that off."""


class ChatError(TfglmError):
    """The server cannot be reached or refuses."""

    code = "E_CHAT"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server",
        description=f"Talk to a running server. Commands: {HELP}. Input may also be piped, one message a line.",
    )
    url = f"http://{Settings.host}:{Settings.port}"
    parser.add_argument("--url", default=url, help=f"where the server listens (default: {url})")
    parser.add_argument("--model", help="model to ask for (default: the one that is served)")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply, thinking included")
    parser.add_argument("--no-think", action="store_true", help="start with thinking off")
    parser.add_argument("--api-key", help=f"key to send (default: {env_name('api_key')})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until /quit or the end of input; returns the exit status. Raises ChatError."""
    key = args.api_key or os.environ.get(env_name("api_key"), "").split(",")[0].strip()
    client = Client(base_url(args.url), key)
    model = args.model or asyncio.run(client.served_model())
    limits = {"max_tokens": args.max_tokens} if args.max_tokens is not None else {}
    conversation = Conversation(client, model, args.system, "off" if args.no_think else None, limits)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history of input())

        print(f"{model} at {client.url}\n{HELP}")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return 0
        try:
            conversation.take(line)
        except ChatError as error:
            # A terminal goes on after a refusal; a script must learn of it.
            if not interactive:
                raise
            print(f"tfglm: {error}", file=sys.stderr)


class Conversation:
    """The messages so far and how the next one is answered."""

    def __init__(
        self, client: Client, model: str, system: str | None, thinking: str | None, limits: dict[str, int]
    ) -> None:
        self._client, self._model, self._thinking, self._limits = client, model, thinking, limits
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = list(self._opening)

    def take(self, line: str) -> None:
        """One line of input: a command or a message."""
        command, _, value = line.partition(" ")
        if command == "/reset":
            self._messages = list(self._opening)
            note("the conversation starts anew")
        elif command == "/think" and value.strip() in THINKING:
            self._thinking = value.strip()
            note(f"thinking: {self._thinking}")
        elif command.startswith("/"):
            print(HELP)
        elif line:
            self._ask(line)

    def _ask(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        thinking = THINKING.get(self._thinking or "", {})
        body = {"model": self._model, "messages": messages, **self._limits, **thinking}
        printer = Printer()
        try:
            asyncio.run(self._client.reply(body, printer))
        except KeyboardInterrupt:
            # What was said stays said; the next message can refer to it.
            printer.close("stopped")
        self._messages = [*messages, {"role": "assistant", "content": printer.answer}]


def note(text: str) -> None:
    """A dimmed remark; on a terminal only, since it is no part of a reply."""
    if sys.stdout.isatty():
        print(f"\x1b[2m({text})\x1b[0m", flush=True)


class Printer:
    """Writes a reply as it comes. Thinking is dimmed on a terminal and left out elsewhere."""

    def __init__(self) -> None:
        self.answer = ""
        self._colour = sys.stdout.isatty()
        self._dimmed = False

    def thinking(self, text: str) -> None:
        if self._colour:
            self._dim(True)
            self._write(text.translate(CONTROLS))

    def content(self, text: str) -> None:
        if self._dimmed:
            self._write("\n")
        self._dim(False)
        self.answer += text
        self._write(text.translate(CONTROLS) if self._colour else text)

    def close(self, why: str) -> None:
        self._dim(False)
        self._write("\n")
        note(why)

    def _dim(self, on: bool) -> None:
        if on != self._dimmed:
            self._write("\x1b[2m" if on else "\x1b[0m")
            self._dimmed = on

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Client:
    """The two requests that a chat needs."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def served_model(self) -> str:
        """Name of the model that the server has. Raises ChatError."""
        async for data in self._request("GET", "/v1/models", None):
            return str(json.loads(data)["data"][0]["id"])
        raise ChatError(f"{self.url} lists no model")

    async def reply(self, body: dict[str, Any], printer: Printer) -> None:
        """Streams one reply into `printer`. Raises ChatError when it ends in an error."""
        buffer = b""
        async for data in self._request("POST", "/v1/chat/completions", {**body, "stream": True}):
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    self._event(json.loads(event.removeprefix(b"data: ")), printer)

    def _event(self, chunk: dict[str, Any], printer: Printer) -> None:
        if "error" in chunk:
            printer.close("broken off")
            raise ChatError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                printer.thinking(delta["reasoning_content"])
            if delta.get("content"):
                printer.content(delta["content"])
            if choice["finish_reason"]:
                timings = chunk["timings"]
                rate = timings["predicted_per_second"]
                printer.close(f"{choice['finish_reason']}, {timings['predicted_n']} tokens, {rate:.1f} tok/s")

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        """The body of a good answer, in pieces for a POST and whole for a GET."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    raise ChatError(await _refusal(response))
                if method == "GET":
                    yield await response.read()
                    return
                async for data in response.content.iter_any():
                    yield data
        except aiohttp.ClientPayloadError:
            raise ChatError(f"the server at {self.url} broke off in the middle of a reply") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ChatError(
                f"no server answers at {self.url} ({reason(error)}); "
                "start one with 'tfglm serve', or say where it is with --url"
            ) from None


async def _refusal(response: aiohttp.ClientResponse) -> str:
    try:
        message = (await response.json())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.reason
    return f"the server answered {response.status}: {message}"
