"""Asks a server all problems of a suite, some at a time, and grades the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfglm.checks.client import Server, ServerError
from tfglm.checks.problem import Grade, Json, Problem, Reply, judge

GIVE_UP = 5
"""Errors a request at a time, one after the other with no reply between them, after which the rest is not asked."""
NOT_ASKED = "not asked after too many errors"


@dataclass(frozen=True)
class Result:
    """What came of a problem: a grade, or the error that kept it from being answered."""

    problem: Problem
    grade: Grade | None
    reply: Reply | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.grade is not None and self.grade.outcome == "right"

    def as_json(self) -> Json:
        found: Json = {"id": self.problem.id, "kind": self.problem.kind, "seconds": round(self.seconds, 3)}
        if self.grade is None or self.reply is None:
            return found | {"error": self.error}
        return found | {
            "outcome": self.grade.outcome,
            "score": round(self.grade.score, 4),
            "detail": self.grade.detail,
            "content": self.reply.content,
            "reasoning": self.reply.reasoning,
            "calls": [{"name": call.name, "arguments": call.arguments} for call in self.reply.calls],
            "finish": self.reply.finish,
            "prompt_tokens": self.reply.prompt_tokens,
            "completion_tokens": self.reply.completion_tokens,
        }


async def ask_all(
    server: Server,
    problems: Sequence[Problem],
    concurrency: int,
    on_result: Callable[[Result], None] = lambda result: None,
    *,
    stream: bool = False,
) -> list[Result]:
    """One result a problem, in order. Errors of the server end up in results; those of the check are raised."""
    results: dict[int, Result] = {}
    waiting = iter(range(len(problems)))
    failed = 0

    async def work() -> None:
        nonlocal failed
        for at in waiting:
            if failed >= GIVE_UP * concurrency:
                result = Result(problems[at], None, error=NOT_ASKED)
            else:
                result = await _ask(server, problems[at], stream)
                failed = failed + 1 if result.error else 0
            results[at] = result
            on_result(result)

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(problems)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return [results[at] for at in range(len(problems))]


async def _ask(server: Server, problem: Problem, stream: bool) -> Result:
    begun = time.monotonic()
    try:
        reply = await server.ask(problem, stream=stream)
    except ServerError as error:
        return Result(problem, None, error=error.message, seconds=time.monotonic() - begun)
    seconds = time.monotonic() - begun
    # In a thread, since grading code waits for a process.
    return Result(problem, await asyncio.to_thread(judge, problem, reply), reply, seconds=seconds)
