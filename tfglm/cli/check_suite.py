"""`tfglm check needle | quality | tools URL`: what a served model knows and can do, from seeded problems."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfglm import __version__
from tfglm.settings import env_name

if TYPE_CHECKING:
    import aiohttp

    from tfglm.checks.client import Server
    from tfglm.checks.problem import Problem
    from tfglm.checks.report import Tally
    from tfglm.checks.run import Result

BELOW, INCOMPLETE = 1, 3
"""Exit codes: a share below its threshold, or calls that differ when streamed; replies that a server failed to give."""

_EXITS = (
    " Exits with 0, with 1 if a share lies below its --threshold, with 3 if the server failed to give replies: those "
    "are named and never count as wrong."
)


def add_parsers(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_needle(kinds)
    _add_quality(kinds)
    _add_tools(kinds)


def _add_needle(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "needle",
        help="recall of keys in long texts",
        description="Ask for keys that lie far back in long texts: one, one with a later correction, and 16 at once of "
        "which five were corrected." + _EXITS,
    )
    lengths = "tokens of the prompts; k is 1024 (default: 2k,8k)"
    parser.add_argument("--lengths", type=_lengths, default="2k,8k", metavar="LIST", help=lengths)
    parser.add_argument("--count", type=_positive, default=5, metavar="N", help="texts a length and kind (default: 5)")
    level = "0: codes of three digits, 1: of five (default: 1)"
    parser.add_argument("--level", type=int, choices=(0, 1), default=1, help=level)
    _add_common(parser, _needle)


def _add_quality(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "quality",
        help="a fixed suite, one server or two compared",
        description="Ask questions, arithmetic, ledgers, Python with hidden tests, JSON and tool calls of rising "
        "difficulty." + _EXITS,
    )
    parser.add_argument("--against", metavar="URL", help="a second server to compare with on the same problems")
    parser.add_argument("--against-model", metavar="NAME", help="its model (default: the one that is served)")
    only = "categories: questions, arithmetic, ledger, python, json, tools (default: all)"
    parser.add_argument("--only", type=_categories, metavar="LIST", help=only)
    level = "difficulty from 0, for models of ten million parameters, to 4 (default: 0-4)"
    parser.add_argument("--level", type=_levels, default="0-4", metavar="LIST", help=level)
    count = "problems a category and level (default: 10)"
    parser.add_argument("--count", type=_positive, default=10, metavar="N", help=count)
    _add_common(parser, _quality)


def _add_tools(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "tools",
        help="tool calls, whole and streamed",
        description="Ask for single, parallel, nested and no calls, and what follows a result, each whole and "
        "streamed." + _EXITS,
    )
    parser.add_argument("--level", type=_levels, default="0,2", metavar="LIST", help="difficulty 0 to 4 (default: 0,2)")
    count = "problems a kind and level (default: 5)"
    parser.add_argument("--count", type=_positive, default=5, metavar="N", help=count)
    _add_common(parser, _tools)


def _add_common(parser: argparse.ArgumentParser, check: _Check) -> None:
    parser.add_argument("url", metavar="URL", help="where the server listens, such as http://127.0.0.1:8888")
    parser.add_argument("--model", help="model to ask for (default: the one that is served)")
    parser.add_argument("--api-key", help=f"key to send (default: {env_name('api_key')})")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="which problems, 0 to 999 (default: 0)")
    parser.add_argument("--concurrency", type=_positive, default=4, metavar="N", help="requests at a time (default: 4)")
    parser.add_argument("--thinking", choices=("on", "off"), help="default: as the server has it")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    parser.add_argument("--max-tokens", type=_positive, default=4096, metavar="N", help="of a reply (default: 4096)")
    timeout = "seconds a reply may take (default: 900)"
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help=timeout)
    threshold = "least share that must be right, of everything or of one category, kind or length"
    parser.add_argument(
        "--threshold", type=_threshold, action="append", default=[], metavar="[NAME=]SHARE", help=threshold
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and replies there")
    parser.set_defaults(run=partial(_run, check=check))


_Check = Callable[[argparse.Namespace, "aiohttp.ClientSession", "Server"], Coroutine[Any, Any, int]]


def _run(args: argparse.Namespace, check: _Check) -> int:
    from tfglm.checks.errors import CheckError

    try:
        return asyncio.run(_checked(args, check))
    except CheckError as error:
        if args.verbose:
            raise
        print(f"tfglm: {error}", file=sys.stderr)
        return INCOMPLETE


async def _checked(args: argparse.Namespace, check: _Check) -> int:
    import aiohttp

    from tfglm.checks.client import connect
    from tfglm.checks.errors import CheckError

    if args.json and not args.json.parent.is_dir():
        raise CheckError(f"--json: there is no folder {args.json.parent}")
    key = args.api_key or os.environ.get(env_name("api_key"), "").split(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # A connection a request: one that is kept may be closed by the server just when the next request is sent.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        return await check(args, session, await connect(session, args.url, args.model, _options(args)))


def _options(args: argparse.Namespace) -> Any:
    from tfglm.checks.client import Options

    thinking = None if args.thinking is None else args.thinking == "on"
    return Options(args.temperature, args.seed, args.max_tokens, thinking, args.timeout)


async def _needle(args: argparse.Namespace, session: aiohttp.ClientSession, server: Server) -> int:
    from tfglm.checks.lengths import needles
    from tfglm.checks.needle import KINDS
    from tfglm.checks.report import needle_table, tally

    _refuse_unknown(args, [*KINDS, *map(str, args.lengths)])
    placed = await needles(server, args.lengths, args.count, args.seed, args.level)
    results = await _asked(server, [item.problem for item in placed], args.concurrency)
    _print(needle_table(f"{server.model}: keys recalled", placed, results))
    lines = {name: tally(x for x in results if x.problem.kind == name) for name in KINDS}
    for length in args.lengths:
        found = tally(x for item, x in zip(placed, results, strict=True) if item.length == length)
        lines[str(length)] = found
    extra = [{"length": item.length, "depth": item.depth} for item in placed]
    return _end(args, server, results, lines, extra=extra)


async def _quality(args: argparse.Namespace, session: aiohttp.ClientSession, server: Server) -> int:
    from tfglm.checks import sandbox
    from tfglm.checks.client import connect
    from tfglm.checks.report import comparison, comparison_json, comparison_table, quality_table, tally
    from tfglm.checks.suite import CATEGORIES, suite

    categories = args.only or list(CATEGORIES)
    _refuse_unknown(args, categories)
    if "python" in categories:
        sandbox.run("def f(): return 1", "f", [[]])  # refuses now what it would refuse for every answer
    other = args.against and await connect(session, args.against, args.against_model, _options(args))
    problems = list(suite(categories, args.level, args.count, args.seed))
    results = await _asked(server, problems, args.concurrency)
    _print(quality_table(f"{'A: ' if other else ''}{server.model} at {server.url}", results))
    more: dict[str, Any] = {}
    others: list[Result] = []
    if other:
        others = await _asked(other, problems, args.concurrency)
        _print(quality_table(f"B: {other.model} at {other.url}", others))
        found = comparison(results, others)
        _print(comparison_table(found))
        more["against"] = {"url": other.url, "model": other.model, "comparison": comparison_json(found),
                           "results": [result.as_json() for result in others]}  # fmt: skip
    lines = {name: tally(x for x in results if x.problem.category == name) for name in categories}
    return _end(args, server, results, lines, others=others, more=more)


async def _tools(args: argparse.Namespace, session: aiohttp.ClientSession, server: Server) -> int:
    from tfglm.checks.report import streamed_alike, tally, tools_table
    from tfglm.checks.suite import tool_calls
    from tfglm.checks.tools import KINDS

    _refuse_unknown(args, KINDS)
    problems = list(tool_calls(args.level, args.count, args.seed))
    whole = await _asked(server, problems, args.concurrency)
    streamed = await _asked(server, problems, args.concurrency, stream=True)
    _print(tools_table(f"{server.model}: tool calls", whole, streamed))
    results = [*whole, *streamed]
    lines = {name: tally(x for x in results if x.problem.kind == name) for name in KINDS}
    differ = [x.problem.id for x, y in zip(whole, streamed, strict=True) if streamed_alike(x, y) is False]
    if differ:
        print(f"streamed calls differ from whole ones in {len(differ)}: {', '.join(differ[:10])}")
    extra = [{"streamed": at >= len(whole)} for at in range(len(results))]
    return max(_end(args, server, results, lines, extra=extra, more={"streamed_otherwise": differ}), int(bool(differ)))


async def _asked(
    server: Server, problems: Sequence[Problem], concurrency: int, *, stream: bool = False
) -> list[Result]:
    from rich.console import Console
    from rich.progress import Progress

    from tfglm.checks.run import ask_all

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(server.url, total=len(problems))
        return await ask_all(server, problems, concurrency, lambda result: progress.advance(task), stream=stream)


def _print(table: Any) -> None:
    from rich.console import Console

    # A narrow terminal wraps lines; rich would leave out figures.
    whole = Console(width=1000).measure(table).maximum
    console = Console(width=max(whole, Console().width))
    console.print(table)
    console.print()


def _end(
    args: argparse.Namespace, server: Server, results: Sequence[Result], lines: dict[str, Tally], *,
    extra: Sequence[dict[str, Any]] = (), others: Sequence[Result] = (), more: dict[str, Any] | None = None,
) -> int:  # fmt: skip
    """Errors and shares too low are told, the file is written; returns the exit code."""
    from tfglm.checks.report import error_lines, percent, tally

    lines = {**lines, "all": tally(results)}
    if args.json:
        settings = {name: getattr(args, name, None) for name in
                    ("seed", "level", "lengths", "count", "thinking", "temperature", "max_tokens")}  # fmt: skip
        found = {
            "check": args.kind, "tfglm": __version__, "url": server.url, "model": server.model, "settings": settings,
            "summary": {name: line.as_json() for name, line in lines.items()},
            "results": [x.as_json() | (extra[at] if extra else {}) for at, x in enumerate(results)],
            **(more or {}),
        }  # fmt: skip
        args.json.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    errors = error_lines([*results, *others])
    for line in errors:
        print(f"no reply: {line}")
    low = False
    for name, least in args.threshold:
        share = lines[name].share
        if share is None or share < least:
            low = True
            print(f"{name}: {percent(share)} % right, below {percent(least)} %")
    return INCOMPLETE if errors else BELOW if low else 0


def _refuse_unknown(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Before anything is asked."""
    from tfglm.checks.errors import CheckError

    for name, _ in args.threshold:
        if name not in (*names, "all"):
            raise CheckError(f"--threshold {name}: there is no such line, only {', '.join(names)} and all")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _seed(text: str) -> int:
    from tfglm.checks.suite import SEEDS

    value = int(text)
    if not 0 <= value < SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..{SEEDS - 1}")
    return value


def _lengths(text: str) -> list[int]:
    from tfglm.checks.lengths import parsed

    try:
        return parsed(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of tokens such as 2k,8k,64k") from None


def _levels(text: str) -> list[int]:
    """`0`, `0,2` or `0-4`."""
    from tfglm.checks.suite import LEVELS

    found: set[int] = set()
    with contextlib.suppress(ValueError):
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    if not found or not found <= set(range(LEVELS)):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of levels 0 to {LEVELS - 1}")
    return sorted(found)


def _categories(text: str) -> list[str]:
    from tfglm.checks.suite import CATEGORIES

    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in CATEGORIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CATEGORIES)}")
    return list(dict.fromkeys(found))


def _threshold(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition("=")
    value = float(share)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{share} is no share between 0 and 1")
    return name or "all", value
