"""Keys in long filler, some of them corrected later: the newest value counts."""

from __future__ import annotations

from random import Random

from tfglm.checks.words import CITIES, COLOURS, DAYS, ITEMS, MONTHS, NAMES, NOUNS
from training.data.exchange import Exchange, pick

_KEYS = (
    (
        "The {what} of {key} is {value}.",
        "Correction: the {what} of {key} is now {value}.",
        "What is the {what} of {key}?",
    ),
    (
        "The {what} for {key} is {value}.",
        "The {what} for {key} has changed: it is {value}.",
        "What is the {what} for {key}?",
    ),
    ("{key}: {what} {value}", "{key}: {what} {value} (corrected)", "Which {what} belongs to {key}?"),
    (
        "Remember: the {what} of {key} is {value}.",
        "Update: the {what} of {key} is {value}.",
        "Tell me the {what} of {key}.",
    ),
)
_WHAT = ("code", "number", "key", "password", "secret number", "value", "locker", "phone number")
_ASK = (
    "{}",
    "{} Answer with the value only.",
    "{} Give only the newest value.",
    "From the text: {}",
    "{} Reply with it alone.",
)


def long_text(rng: Random, characters: int, keys: int | None = None) -> Exchange:
    """About `characters` of filler with keys in it; one of them, or several, or all are asked for."""
    keys = keys or rng.choice((1, 1, 2, 3, 4, 8, 16, 24))
    statement, correction, question = rng.choice(_KEYS)
    what = rng.choice(_WHAT)
    values: dict[str, str] = {}
    events: list[str] = []
    for key in _names(rng, keys):
        values[key] = _value(rng)
        events.append(statement.format(what=what, key=key, value=values[key]))
    outdated = rng.sample(sorted(values), rng.randint(0, max(1, keys // 2)) if rng.random() < 0.7 else 0)
    for key in outdated:
        values[key] = _value(rng)
        events.append(correction.format(what=what, key=key, value=values[key]))
    text = _spread(rng, events, characters)
    asked = rng.sample(sorted(values), min(keys, rng.choice((1, 1, 1, 1, 2, 3, 16))))
    if outdated and rng.random() < 0.4 and len(asked) == 1:
        asked = [rng.choice(outdated)]
    if len(asked) == 1:
        request = rng.choice(_ASK).format(question.format(what=what, key=asked[0]))
        answer = values[asked[0]]
    else:
        request = pick(
            rng,
            f"Give the newest {what} of each of these, one a line as key: {what}: " + ", ".join(asked),
            f"For each of {', '.join(asked)}: write a line with its name, a colon and its newest {what}.",
        )
        answer = "\n".join(f"{key}: {values[key]}" for key in asked)
    prompt = f"{text}\n\n{request}" if rng.random() < 0.8 else f"{request}\n\n{text}\n\n{request}"
    said = "\n".join(_told(statement, correction, what, key, values[key], key in outdated) for key in asked)
    say = answer
    if len(asked) == 1 and rng.random() < 0.3:
        say = pick(rng, f"The {what} of {asked[0]} is {answer}.", f"It is {answer}.")
    return Exchange(prompt, said, say)


def _told(statement: str, correction: str, what: str, key: str, value: str, corrected: bool) -> str:
    return (correction if corrected else statement).format(what=what, key=key, value=value)


def _names(rng: Random, count: int) -> list[str]:
    form = rng.randrange(5)
    names: dict[str, None] = {}
    while len(names) < count:
        if form == 0:
            name = f"the {rng.choice(COLOURS)} {rng.choice(NOUNS)}"
        elif form == 1:
            name = f"{rng.choice(NOUNS)}-{rng.choice(NOUNS)}"
        elif form == 2:
            name = rng.choice(NAMES) if count <= 8 else f"{rng.choice(NAMES)} of {rng.choice(CITIES)}"
        elif form == 3:
            name = f"{rng.choice(NOUNS)} {rng.randint(1, 99)}"
        else:
            name = f"the {rng.choice(NOUNS)}"
        names[name] = None
    return list(names)


def _value(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.75:
        return str(rng.randrange(10 ** (digits := rng.choice((3, 4, 5, 5, 6, 7)) - 1), 10 ** (digits + 1)))
    if kind < 0.9:
        return f"{rng.choice(NOUNS)}{rng.choice(' -')}{rng.choice(NOUNS)}"
    return rng.choice(NOUNS)


def _spread(rng: Random, events: list[str], characters: int) -> str:
    """Filler with the events in order at random places. Filler may repeat itself, as that of benchmarks does."""
    filler: list[str] = []
    size = 0
    repeating = [_filler(rng) for _ in range(rng.randint(4, 20))] if rng.random() < 0.3 else None
    while size < characters:
        sentence = rng.choice(repeating) if repeating else _filler(rng)
        filler.append(sentence)
        size += len(sentence) + 1
    places = sorted(rng.sample(range(len(filler) + 1), min(len(events), len(filler) + 1)))
    places += [len(filler)] * (len(events) - len(places))
    out: list[str] = []
    at = 0
    for place, event in zip(places, events, strict=True):
        out += filler[at:place]
        out.append(event)
        at = place
    out += filler[at:]
    return ("\n" if rng.random() < 0.35 else " ").join(out)


def _filler(rng: Random) -> str:
    kind = rng.randrange(9)
    if kind == 0:
        name, place = rng.choice(NAMES), rng.choice(NOUNS)
        return f"{name} walked to the {place} and saw a {rng.choice(COLOURS)} {rng.choice(NOUNS)}."
    if kind == 1:
        return f"On {rng.choice(DAYS)} the {rng.choice(NOUNS)} was closed."
    if kind == 2:
        return f"{rng.choice(NAMES)} bought {rng.randint(2, 99)} {rng.choice(ITEMS)} in {rng.choice(CITIES)}."
    if kind == 3:
        return f"In {rng.choice(MONTHS)} it rained for {rng.randint(2, 30)} days in {rng.choice(CITIES)}."
    if kind == 4:
        return f"The {rng.choice(NOUNS)} stands beside the {rng.choice(NOUNS)}."
    if kind == 5:
        return f"{rng.choice(NAMES)} told {rng.choice(NAMES)} about the {rng.choice(COLOURS)} {rng.choice(NOUNS)}."
    if kind == 6:
        return f"Nobody in {rng.choice(CITIES)} knew where the {rng.choice(NOUNS)} came from."
    if kind == 7:
        return f"The {rng.choice(NOUNS)} was {rng.choice(COLOURS)}, the {rng.choice(NOUNS)} was {rng.choice(COLOURS)}."
    time = f"{rng.randint(1, 12)}:{rng.randint(0, 59):02}"
    return f"{time}: a train to {rng.choice(CITIES)} left from platform {rng.randint(1, 20)}."
