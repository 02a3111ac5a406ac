"""Copying and editing: repeat, replace, rename, pick lines, reorder."""

from __future__ import annotations

from random import Random

from tfglm.checks.words import CITIES, COLOURS, ITEMS, NAMES, NOUNS
from training.data.exchange import Exchange, pick


def repeat(rng: Random) -> Exchange:
    text = _text(rng)
    ask = pick(
        rng,
        "Repeat this text:\n\n{}",
        "Copy this exactly:\n\n{}",
        "Write this again, word for word:\n\n{}",
        "Repeat the following:\n{}",
        "Say this: {}",
    )
    return Exchange(ask.format(text), "I copy it word for word.", text)


def replace(rng: Random) -> Exchange:
    text = _text(rng)
    words = sorted({word.strip(".,") for word in text.split() if word.strip(".,").isalpha()})
    old, new = rng.choice(words), rng.choice(NOUNS + NAMES + COLOURS)
    result = " ".join(_swap(word, old, new) for word in text.split(" "))
    ask = pick(
        rng,
        f'Replace "{old}" by "{new}" in this text:\n\n{text}',
        f"Repeat this text with {old} replaced by {new}, and nothing else:\n\n{text}",
        f'{text}\n\nWrite this again with "{new}" instead of "{old}".',
    )
    return Exchange(ask, f"{old} becomes {new}.", result)


def _swap(word: str, old: str, new: str) -> str:
    bare = word.strip(".,")
    return word.replace(old, new) if bare == old else word


def rename(rng: Random) -> Exchange:
    old, new = rng.sample(
        ("tax_rate", "rate", "total", "value", "price", "count", "items", "size", "name", "width", "factor"), 2
    )
    first, second, third = rng.sample(("total", "average", "scaled", "shifted", "checked", "largest", "rounded"), 3)
    others = [word for word in ("prices", "numbers", "rows", "things") if word not in (old, new)]
    many = rng.choice(others)
    operator = rng.choice(("*", "+", "-"))
    code = (
        f"def {first}({many}, {old}):\n    result = 0\n    for x in {many}:\n        result = result + x {operator} "
        f"{'(1 + ' + old + ')' if rng.random() < 0.4 else old}\n    return result\n"
    )
    if rng.random() < 0.6:
        code += f"\n\ndef {second}({many}, {old}):\n    return {first}({many}, {old}) / len({many})\n"
    if rng.random() < 0.3:
        code += f"\n\ndef {third}({old}):\n    return {old} {operator} {rng.randint(2, 9)}\n"
    result = _rename(code, old, new)
    ask = pick(
        rng,
        f"Repeat this code with `{old}` renamed to `{new}`, and nothing else:\n\n{code}",
        f"Rename {old} to {new} in this code:\n\n```python\n{code}```",
    )
    return Exchange(ask, f"{old} becomes {new} everywhere.", f"```python\n{result}```")


def _rename(code: str, old: str, new: str) -> str:
    import re

    return re.sub(rf"\b{old}\b", new, code)


def lines(rng: Random) -> Exchange:
    """Lines of a numbered log."""
    start, count = rng.choice((0, 1, 100)), rng.randint(4, 24)
    log = [
        f"{n:04}: {rng.choice(('sensor', 'pump', 'door', 'valve'))} {rng.randint(1, 99)} "
        f"reports {rng.randint(0, 999)} units"
        for n in range(start, start + count)
    ]
    a = rng.randrange(count)
    b = min(count - 1, a + rng.randint(0, 5))
    text = "\n".join(log)
    if a == b:
        ask = pick(
            rng, f"{text}\n\nRepeat line {start + a:04} of this log.", f"What does line {start + a:04} say?\n\n{text}"
        )
    else:
        ask = f"{text}\n\nRepeat lines {start + a:04} to {start + b:04} of this log."
    return Exchange(ask, f"The lines from {start + a:04} to {start + b:04}.", "\n".join(log[a : b + 1]))


def words(rng: Random) -> Exchange:
    chosen = rng.sample(NOUNS + NAMES + CITIES, rng.randint(3, 8))
    shown = ", ".join(chosen)
    form = rng.randrange(6)
    if form == 0:
        return Exchange(
            f"Write these words backwards, the last first: {shown}",
            "The last comes first.",
            ", ".join(reversed(chosen)),
        )
    if form == 1:
        return Exchange(
            f"Sort these words by the alphabet: {shown}", "By first letters.", ", ".join(sorted(chosen, key=str.lower))
        )
    if form == 2:
        return Exchange(
            f"How many words are these: {shown}?",
            ", ".join(f"{n} {w}" for n, w in enumerate(chosen, 1)),
            str(len(chosen)),
        )
    if form == 3:
        at = rng.randrange(len(chosen))
        return Exchange(
            f"What is word {at + 1} of this list: {shown}?",
            ", ".join(f"{n} {w}" for n, w in enumerate(chosen[: at + 1], 1)),
            chosen[at],
        )
    if form == 4:
        return Exchange(f"Write this list with one word a line: {shown}", "One word a line.", "\n".join(chosen))
    return Exchange(
        f"Make a numbered list of these words: {shown}",
        "Numbered lines.",
        "\n".join(f"{n}. {w}" for n, w in enumerate(chosen, 1)),
    )


def _text(rng: Random) -> str:
    sentences = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        name, other, noun, city = rng.choice(NAMES), rng.choice(NAMES), rng.choice(NOUNS), rng.choice(CITIES)
        sentences.append(
            rng.choice(
                (
                    f"{name} has {rng.randint(2, 90)} {rng.choice(ITEMS)}.",
                    f"The {rng.choice(COLOURS)} {noun} belongs to {name}.",
                    f"{name} and {other} meet in {city}.",
                    f"A {noun} stands near the {rng.choice(NOUNS)}.",
                    f"{name} lives in {city} and likes the {noun}.",
                    f"{other} gave {name} a {rng.choice(COLOURS)} {noun}.",
                )
            )
        )
    if rng.random() < 0.15:
        sentences.append(
            " ".join(
                "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(2, 7)))
                for _ in range(rng.randint(1, 6))
            )
        )
    return " ".join(sentences)
