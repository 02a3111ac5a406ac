"""Problems of the kinds that `tfglm check` asks, from other seeds, with their answers and the steps to them."""

from __future__ import annotations

import importlib
import json
from random import Random

from tfglm.checks import arithmetic, ledger, needle, questions, structured, tools
from tfglm.checks.problem import Problem
from training.data.conversation import EFFORTS, Conversation, Turn
from training.data.exchange import Exchange, pick


def exchange(rng: Random) -> Exchange:
    """A problem that one reply without calls answers, of the level the model is made for or the one above."""
    kind = rng.random()
    if kind < 0.34:
        problem = arithmetic.make(rng, 0 if rng.random() < 0.7 else 1)
    elif kind < 0.58:
        problem = ledger.make(rng, 0 if rng.random() < 0.85 else 1)
    elif kind < 0.78:
        problem = questions.make(rng, 0 if rng.random() < 0.8 else 1)
    else:
        problem = structured.make(rng, 0 if rng.random() < 0.7 else 1)
    return _answered(problem, rng)


def code(rng: Random) -> Exchange | None:
    """A function to write, as the code suite asks for it; None while there is no such suite."""
    try:
        module = importlib.import_module("tfglm.checks.code")
    except ModuleNotFoundError:
        return None
    return _answered(module.make(rng, 0 if rng.random() < 0.75 else 1), rng)


def needles(rng: Random, characters: int) -> Exchange:
    """About 42 characters make a sentence of filler."""
    kind = pick(rng, "single", "corrected", "recall", "recall")
    sentences = max(8, characters // 42)
    problem = needle.of_kind(rng, kind, sentences, rng.random(), level=rng.choice((0, 0, 1)))
    text = str(problem.messages[0]["content"])
    if kind == "recall":
        return Exchange(text, "I go through the words one by one.", problem.answer)
    name = next(word for word in reversed(text.split()) if word.strip("?.") in needle.NOUNS).strip("?.")
    return Exchange(text, f"The code for {name} is {problem.answer}.", problem.answer)


def tool_calls(rng: Random) -> Conversation:
    problem = tools.make(rng, 0 if rng.random() < 0.7 else 1)
    effort = rng.choice(EFFORTS) if rng.random() < 0.5 else None
    turns: list[Turn] = []
    for message in problem.messages:
        calls = tuple(
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        thought = ""
        if calls and effort and rng.random() < 0.5:
            thought = f"I call {calls[0][0]}."
        turns.append(Turn(message["role"], message["content"] or "", thought, calls))
    wanted = tuple((call.name, json.loads(call.arguments)) for call in problem.calls)
    thought = ""
    if effort:
        thought = f"I call {' and '.join(name for name, _ in wanted)}." if wanted else "No call is needed now."
    turns.append(Turn("assistant", "" if wanted else problem.answer, thought, wanted))
    return Conversation(turns, effort, problem.tools)


def _answered(problem: Problem, rng: Random) -> Exchange:
    prompt = str(problem.messages[-1]["content"])
    if not problem.steps:
        return Exchange(prompt, pick(rng, "I answer directly.", "That is simple."), problem.answer)
    aloud = problem.answer if "\n" not in problem.steps else f"{problem.steps}\n{problem.answer}"
    return Exchange(prompt, problem.steps, problem.answer, aloud)
