"""Small Python functions with hidden tests. Level 0: one line. Level 4: little machines and searches with a twist.

Every task is a sentence and a reference function; the tests are the reference's own results on inputs from the seed. A
reply's code runs in the sandbox, which never sees what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tfglm.checks import sandbox
from tfglm.checks.problem import RIGHT, Grade, Problem, Reply, code, dumps, invalid, same, shown, user, wrong
from tfglm.checks.python_tasks import LEVELS, Task

TESTS = 12
_SHORT = (
    "Write a Python function {sig} that returns {what}.",
    "Python: {sig} returns {what}.",
    "Define {sig} in Python; it returns {what}.",
)
_LONG = "Write a Python function `{sig}`. {what} Reply with the code alone."


def make(rng: Random, level: int) -> Problem:
    while True:
        task: Task = rng.choice(LEVELS[level])(rng)
        signature = f"{task.name}({', '.join(task.parameters)})"
        source = f"def {signature}:\n" + "\n".join(f"    {line}" if line else "" for line in task.body.splitlines())
        calls = _tests(Random(rng.getrandbits(64)), task, source)
        if calls:
            break
    prompt = (rng.choice(_SHORT) if level == 0 else _LONG).format(sig=signature, what=task.what)
    key = f"{signature} {task.what}" if task.name in ("f", "process") else ""
    return Problem("python", task.name if level else "line", key, (user(prompt),),
                   grader(source, task.name, calls), answer=f"```python\n{source}\n```")  # fmt: skip


def _tests(rng: Random, task: Task, source: str) -> list[list[Any]]:
    """Inputs of which no one result, such as an empty list, covers more than three quarters; none if none are found."""
    for _ in range(10):
        calls = [task.inputs(rng) for _ in range(TESTS)]
        results = [dumps(result) for result in _results(source, task.name, calls)]
        if 4 * max(map(results.count, results)) <= 3 * TESTS:
            return calls
    return []


def grader(source: str, function: str, calls: list[list[Any]]) -> Callable[[Reply], Grade]:
    """Grades by what `source`, the reference, returns. Grading raises sandbox.SandboxError where code cannot be run."""

    def grade(reply: Reply) -> Grade:
        answer = code(reply.content, function)
        if answer is None:
            return invalid(f"no definition of {function} in {shown(reply.content)}")
        ran = sandbox.run(answer, function, calls)
        if ran.error:
            return invalid(ran.error)
        for arguments, found, expected in zip(calls, ran.values, _results(source, function, calls), strict=True):
            if not same(found, expected):
                told = ", ".join(map(dumps, arguments))
                return wrong(f"{function}({told[:80]}) is {dumps(found)[:60]} instead of {dumps(expected)[:60]}")
        return RIGHT

    return grade


def _results(source: str, function: str, calls: list[list[Any]]) -> list[Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)  # the reference is this project's own text
    copies: list[list[Any]] = json.loads(json.dumps(calls))
    return [json.loads(json.dumps(scope[function](*arguments))) for arguments in copies]
