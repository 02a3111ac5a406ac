"""Short questions with one checkable answer, by rule; a few facts of closed lists from level 2 on."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from random import Random

from tfglm.checks.problem import Problem, choice_grader, number_grader, user, word_grader
from tfglm.checks.words import ATOMIC_NUMBERS, CAPITALS, COLOURS, DAYS, ITEMS, MONTHS, NAMES, NOUNS

ENDING = " Answer with the {} only."

_Found = tuple[str, str, str, str]
"""kind of grading (number, word, or choices with | between), key, question, answer"""


def make(rng: Random, level: int) -> Problem:
    form, key, question, answer = rng.choice(_LEVELS[level])(rng)
    if form == "number":
        grade = number_grader(int(answer))
    elif form == "word":
        grade = word_grader(answer)
    else:
        grade = choice_grader(answer, form.split("|"))
    prompt = question + ENDING.format("number" if form == "number" else "word")
    return Problem("questions", form if "|" not in form else "choice", key, (user(prompt),), grade, answer=answer)


def _larger(rng: Random) -> _Found:
    a, b = rng.sample(range(1, 100), 2)
    word = rng.choice(("larger", "smaller"))
    return "number", f"{word} {a} {b}", f"Which is {word}, {a} or {b}?", str((max if word == "larger" else min)(a, b))


def _next_day(rng: Random) -> _Found:
    at, step = rng.randrange(7), rng.choice((1, -1))
    question = f"Which day comes right {'after' if step == 1 else 'before'} {DAYS[at]}?"
    return "|".join(DAYS), "", question, DAYS[(at + step) % 7]


def _colour(rng: Random) -> _Found:
    items, colours = rng.sample(NOUNS, 3), rng.sample(COLOURS, 3)
    at = rng.randrange(3)
    facts = ", ".join(f"the {i} is {c}" for i, c in zip(items, colours, strict=True))
    text = f"{facts[0].upper()}{facts[1:]}. What colour is the {items[at]}?"
    return "|".join(COLOURS), text, text, colours[at]


def _count(rng: Random) -> _Found:
    name, n, m, item = rng.choice(NAMES), rng.randint(2, 40), rng.randint(1, 20), rng.choice(ITEMS)
    text = f"{name} has {n} {item} and buys {m} more. How many {item} has {name} now?"
    return "number", text, text, str(n + m)


def _sorted(rng: Random) -> _Found:
    values = rng.sample(range(10, 1000), 5)
    word = rng.choice(("second largest", "second smallest", "middle"))
    at = {"second largest": 3, "second smallest": 1, "middle": 2}[word]
    text = f"Which is the {word} of {', '.join(map(str, values))}?"
    return "number", text, text, str(sorted(values)[at])


def _later_day(rng: Random) -> _Found:
    at, step = rng.randrange(7), rng.randint(2, 60)
    return (
        "|".join(DAYS),
        f"{at} {step}",
        f"Today is {DAYS[at]}. Which day is it in {step} days?",
        DAYS[(at + step) % 7],
    )


def _alphabet(rng: Random) -> _Found:
    words = rng.sample(NOUNS, 5)
    text = f"Which of these words comes first in the alphabet: {', '.join(words)}?"
    return "|".join(words), text, text, min(words)


def _duration(rng: Random) -> _Found:
    start, minutes = rng.randint(0, 900), rng.randint(31, 530)
    end = start + minutes
    text = (
        f"A train leaves at {start // 60:02}:{start % 60:02} and arrives at {end // 60:02}:{end % 60:02} the same day. "
        "How many minutes does it travel?"
    )
    return "number", text, text, str(minutes)


def _letters(rng: Random) -> _Found:
    words = rng.sample(NOUNS, 3)
    letter = rng.choice("aeinort")
    text = f'How often does the letter "{letter}" occur in "{" ".join(words)}"?'
    return "number", text, text, str("".join(words).count(letter))


def _capital(rng: Random) -> _Found:
    country = rng.choice(sorted(CAPITALS))
    return "|".join(sorted(CAPITALS.values())), "", f"What is the capital of {country}?", CAPITALS[country]


def _atom(rng: Random) -> _Found:
    element = rng.choice(sorted(ATOMIC_NUMBERS))
    return "number", "", f"What is the atomic number of {element}?", str(ATOMIC_NUMBERS[element])


def _backwards(rng: Random) -> _Found:
    word = rng.choice(NOUNS)
    return "word", word, f'Write the word "{word}" backwards.', word[::-1]


def _days_between(rng: Random) -> _Found:
    first = datetime.date(rng.randint(1990, 2040), rng.randint(1, 12), rng.randint(1, 28))
    days = rng.randint(40, 700)
    last = first + datetime.timedelta(days=days)
    text = f"How many days are there from {_date(first)} to {_date(last)}, not counting the first?"
    return "number", text, text, str(days)


def _base(rng: Random) -> _Found:
    value = rng.randint(200, 60000)
    text = f"What is the hexadecimal number {value:X} in decimal?"
    return "number", text, text, str(value)


def _ranking(rng: Random) -> _Found:
    names = rng.sample(NAMES, 6)
    pairs = list(itertools.pairwise(names))
    rng.shuffle(pairs)
    facts = " ".join(f"{a} is older than {b}." if rng.random() < 0.5 else f"{b} is younger than {a}." for a, b in pairs)
    at = rng.randint(1, 4)
    text = f"{facts} Who is number {at + 1} by age, the oldest being number 1?"
    return "|".join(names), text, text, names[at]


def _weekday(rng: Random) -> _Found:
    date = datetime.date(rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28))
    return "|".join(DAYS), str(date), f"Which day of the week is {_date(date)}?", DAYS[date.weekday()]


def _power(rng: Random) -> _Found:
    base, exponent, modulus = rng.randint(3, 99), rng.randint(20, 400), rng.choice((97, 100, 101, 1000))
    text = f"What is the remainder of {base} to the power of {exponent} divided by {modulus}?"
    return "number", text, text, str(pow(base, exponent, modulus))


def _paths(rng: Random) -> _Found:
    width, height = rng.randint(4, 7), rng.randint(4, 7)
    blocked = (rng.randint(1, width - 1), rng.randint(1, height - 1))
    ways = {(0, 0): 1}
    for x in range(width + 1):
        for y in range(height + 1):
            if (x, y) == blocked:
                ways[x, y] = 0
            elif x or y:
                ways[x, y] = ways.get((x - 1, y), 0) + ways.get((x, y - 1), 0)
    text = (
        f"How many ways lead from (0, 0) to ({width}, {height}) in steps of one to the right or one up "
        f"that do not pass {blocked}?"
    )
    return "number", text, text, str(ways[width, height])


def _liars(rng: Random) -> _Found:
    """Each says whether the next one is a liar, round a ring; whether the first is one decides all the others."""
    while True:
        names = rng.sample(NAMES, 7)
        honest = [rng.random() < 0.5 for _ in names]
        honest[0] = True
        if any(not value for value in honest):
            break
    says = []
    for at, name in enumerate(names[:-1]):
        truth = honest[at + 1]
        says.append(f"{name} says that {names[at + 1]} {'tells the truth' if truth == honest[at] else 'lies'}.")
    head, count = f"{names[0]} always tells the truth.", honest.count(False)
    rng.shuffle(says)
    text = f"Everybody here either always lies or always tells the truth. {head} {' '.join(says)} How many are liars?"
    return "number", text, text, str(count)


def _date(date: datetime.date) -> str:
    return f"{date.day} {MONTHS[date.month - 1]} {date.year}"


_LEVELS: tuple[tuple[Callable[[Random], _Found], ...], ...] = (
    (_larger, _next_day, _colour, _count),
    (_sorted, _later_day, _alphabet, _duration),
    (_letters, _capital, _atom, _backwards, _duration),
    (_days_between, _base, _ranking, _letters),
    (_weekday, _power, _paths, _liars),
)
