"""Reckoning: sums column by column where numbers are long, chains step by step, products by parts, comparisons."""

from __future__ import annotations

from random import Random

from tfglm.checks.suite import held_out
from tfglm.checks.words import ITEMS, NAMES
from training.data.exchange import Exchange, pick

_ASK = (
    "{} = ?",
    "What is {}?",
    "Calculate {}.",
    "Work out {}.",
    "How much is {}?",
    "{}",
    "Compute {}.",
    "What does {} make?",
)
_SAY = ("{}", "{}", "The result is {}.", "The answer is {}.", "It is {}.", "That makes {}.")


def chain(rng: Random) -> Exchange:
    """Two to six terms; most with numbers below 100. None that the test set of `tfglm check quality` may ask."""
    while True:
        text, steps, value = _terms(rng)
        if not held_out(text):
            return _reply(rng, text, steps, value)


def _terms(rng: Random) -> tuple[str, list[str], int]:
    top = rng.choice((20, 99, 99, 99, 999, 999))
    count = rng.choice((2, 2, 3, 3, 4, 4, 5, 6)) if top < 999 else rng.choice((2, 3, 4, 5, 6))
    value = rng.randint(1, top)
    text, steps = str(value), []
    signed = rng.random() < 0.4
    for _ in range(count - 1):
        minus = rng.random() < 0.5 and (signed or value > 0)
        term = rng.randint(1, top if signed or not minus else min(value, top))
        after = value - term if minus else value + term
        sign = "-" if minus else "+"
        text += f" {sign} {term}"
        steps.append(f"{value} {sign} {term} = {after}")
        value = after
    return text, steps, value


def product(rng: Random) -> Exchange:
    """a * b by the digits of the larger, with what it takes to add them up."""
    a, b = rng.randint(2, 99), rng.randint(2, 12)
    if rng.random() < 0.5:
        a = rng.randint(2, 12)
    text = f"{a} * {b}" if rng.random() < 0.7 else f"{a} times {b}"
    return _reply(rng, text, _times(a, b), a * b)


def mixed(rng: Random) -> Exchange:
    """A product and a sum, with or without brackets: what binds first is reckoned first."""
    a, b, c = rng.randint(2, 60), rng.randint(2, 12), rng.randint(1, 99)
    form = rng.randrange(4)
    if form == 0:
        return _reply(rng, f"{a} * {b} + {c}", [*_times(a, b), f"{a * b} + {c} = {a * b + c}"], a * b + c)
    if form == 1:
        return _reply(rng, f"{c} + {a} * {b}", [*_times(a, b), f"{c} + {a * b} = {a * b + c}"], a * b + c)
    if form == 2:
        return _reply(rng, f"({a} + {c}) * {b}", [f"{a} + {c} = {a + c}", *_times(a + c, b)], (a + c) * b)
    return _reply(rng, f"{a} * {b} - {c}", [*_times(a, b), f"{a * b} - {c} = {a * b - c}"], a * b - c)


def compare(rng: Random) -> Exchange:
    count, top = rng.choice((2, 2, 3, 4, 5)), rng.choice((99, 999))
    values = rng.sample(range(1, top + 1), count)
    word, best = rng.choice((("largest", max(values)), ("smallest", min(values))))
    if count == 2:
        word = {"largest": "larger", "smallest": "smaller"}[word]
        while held_out(f"{word} {values[0]} {values[1]}"):
            values = rng.sample(range(1, top + 1), 2)
        best = max(values) if word == "larger" else min(values)
        question = pick(
            rng, f"Which is {word}, {values[0]} or {values[1]}?", f"Which number is {word}: {values[0]} or {values[1]}?"
        )
        thinking = f"{max(values)} is more than {min(values)}."
    else:
        shown = ", ".join(map(str, values))
        question = pick(rng, f"Which is the {word} of {shown}?", f"What is the {word} number in this list: {shown}?")
        order = sorted(values)
        thinking = f"In order: {', '.join(map(str, order))}."
    return Exchange(question, thinking, str(best))


def sort(rng: Random) -> Exchange:
    values = rng.sample(range(1, rng.choice((50, 100, 1000))), rng.randint(3, 7))
    up = rng.random() < 0.7
    shown = ", ".join(map(str, values))
    result = ", ".join(map(str, sorted(values, reverse=not up)))
    question = f"Sort these numbers{' from small to large' if up else ' from large to small'}: {shown}"
    return Exchange(question, f"The {'smallest' if up else 'largest'} comes first.", result)


def story(rng: Random) -> Exchange:
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    a, b, c = rng.randint(2, 60), rng.randint(1, 40), rng.randint(1, 20)
    form = rng.randrange(4)
    if form == 0:
        text, value = f"{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?", a + b
        steps = [f"{a} + {b} = {value}"]
    elif form == 1:
        b = rng.randint(1, a)
        text, value = f"{name} has {a} {item} and gives {b} to {other}. How many {item} are left?", a - b
        steps = [f"{a} - {b} = {value}"]
    elif form == 2:
        b = rng.randint(2, 10)
        text, value = f"There are {b} boxes with {a} {item} each. How many {item} are there?", a * b
        steps = _times(a, b)
    else:
        text = f"{name} has {a} {item}, {other} has {b} and then gets {c} more. How many do they have together?"
        value = a + b + c
        steps = [f"{b} + {c} = {b + c}", f"{a} + {b + c} = {value}"]
    return _reply(rng, text, steps, value, asked=True)


def _times(a: int, b: int) -> list[str]:
    """The steps of a * b, b at most 12."""
    if a <= 12 and b <= 12:
        return [f"{a} * {b} = {a * b}"]
    if a <= 12:
        a, b = b, a
    parts = [part for part in (a // 100 * 100, a // 10 % 10 * 10, a % 10) if part]
    steps = [f"{part} * {b} = {part * b}" for part in parts] if len(parts) > 1 else []
    total = parts[0] * b if len(parts) > 1 else 0
    for part in parts[1:]:
        steps.append(f"{total} + {part * b} = {total + part * b}")
        total += part * b
    return [*steps, f"{a} * {b} = {a * b}"]


def _reply(rng: Random, text: str, steps: list[str], value: int, *, asked: bool = False) -> Exchange:
    prompt = text if asked else rng.choice(_ASK).format(text)
    if rng.random() < 0.2:
        prompt += pick(
            rng, " End your reply with the result.", " Give only the number.", " Think first.", " Show the steps."
        )
    say = rng.choice(_SAY).format(value)
    aloud = say if len(steps) == 1 else "\n".join([*steps, say])
    return Exchange(prompt, "\n".join(steps), say, aloud)
