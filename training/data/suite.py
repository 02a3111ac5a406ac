"""Problems of the kinds that `tfglm check` asks, from other seeds, with their answers and the steps to them."""

from __future__ import annotations

import json
from random import Random

from tfglm.checks import needle
from tfglm.checks.problem import Problem
from tfglm.checks.suite import TEST_NUMBERS, problem
from training.data.conversation import EFFORTS, Conversation, Turn
from training.data.exchange import Exchange, pick


def exchange(rng: Random) -> Exchange:
    """A problem that one reply without calls answers, of the level the model is made for or the one above."""
    category = rng.choices(("arithmetic", "ledger", "questions", "json", "python"), (30, 22, 16, 18, 14))[0]
    return _answered(_training(rng, category, 0.72), rng)


def _training(rng: Random, category: str, easy: float) -> Problem:
    """easy: the share of level 0. The split of the suite keeps what its test set asks out of these numbers."""
    return problem(category, TEST_NUMBERS + rng.getrandbits(48), 0 if rng.random() < easy else 1)


def needles(rng: Random, characters: int) -> Exchange:
    """About 42 characters make a sentence of filler."""
    kind = pick(rng, "single", "corrected", "recall", "recall")
    sentences = max(8, characters // 42)
    made = needle.of_kind(rng, kind, sentences, rng.random(), level=rng.choice((0, 0, 1)))
    text = str(made.messages[0]["content"])
    if kind == "recall":
        return Exchange(text, "I go through the words one by one.", made.answer)
    name = next(word for word in reversed(text.split()) if word.strip("?.") in needle.NOUNS).strip("?.")
    return Exchange(text, f"The code for {name} is {made.answer}.", made.answer)


def tool_calls(rng: Random) -> Conversation:
    made = _training(rng, "tools", 0.65)
    effort = rng.choice(EFFORTS) if rng.random() < 0.5 else None
    turns: list[Turn] = []
    for message in made.messages:
        calls = tuple(
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        thought = ""
        if calls and effort and rng.random() < 0.5:
            thought = f"I call {calls[0][0]}."
        turns.append(Turn(message["role"], message["content"] or "", thought, calls))
    wanted = tuple((call.name, json.loads(call.arguments)) for call in made.calls)
    thought = ""
    if effort:
        thought = f"I call {' and '.join(name for name, _ in wanted)}." if wanted else "No call is needed now."
    turns.append(Turn("assistant", "" if wanted else made.answer, thought, wanted))
    return Conversation(turns, effort, made.tools)


def _answered(made: Problem, rng: Random) -> Exchange:
    prompt = str(made.messages[-1]["content"])
    if not made.steps:
        return Exchange(prompt, pick(rng, "I answer directly.", "That is simple."), made.answer)
    aloud = made.answer if "\n" not in made.steps else f"{made.steps}\n{made.answer}"
    return Exchange(prompt, made.steps, made.answer, aloud)
