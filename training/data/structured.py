"""JSON from words, with fields named or a schema given; and words from JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tfglm.checks.words import CITIES, COLOURS, DAYS, ITEMS, NAMES, NOUNS
from training.data.exchange import Exchange, listed, pick

_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}


def _facts(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A sentence or two, the object and its schema's properties."""
    name, noun = rng.choice(NAMES), rng.choice(NOUNS)
    fields = [
        ("age", n := rng.randint(3, 99), f"is {n} years old", _INTEGER),
        ("city", c := rng.choice(CITIES), f"lives in {c}", _STRING),
        ("colour", c2 := rng.choice(COLOURS), f"likes {c2}", _STRING),
        ("pet", noun, f"has a pet called {noun}", _STRING),
        ("items", i := rng.sample(ITEMS, rng.randint(1, 3)), f"owns {listed(i)}", {"type": "array", "items": _STRING}),
        ("married", m := rng.random() < 0.5, f"is {'' if m else 'not '}married", {"type": "boolean"}),
        ("day", d := rng.choice(DAYS), f"comes on {d}", _STRING),
        ("score", s := rng.randint(0, 500), f"has {s} points", _INTEGER),
    ]
    chosen = rng.sample(fields, rng.randint(1, 5))
    text = f"{name} {listed([told for _, _, told, _ in chosen])}."
    value = {"name": name, **{field: found for field, found, _, _ in chosen}}
    properties = {"name": _STRING, **{field: kind for field, _, _, kind in chosen}}
    return text, value, properties


def write(rng: Random) -> Exchange:
    text, value, properties = _facts(rng)
    if rng.random() < 0.4:
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            schema["required"] = list(properties)
        if rng.random() < 0.5:
            schema["additionalProperties"] = False
        shown = json.dumps(schema)
        ask = pick(
            rng,
            f"{text}\n\nWrite this as JSON of this schema:\n{shown}",
            f"Schema: {shown}\n\n{text} Give the JSON object.",
            f"Write a JSON object that follows this schema:\n{shown}\n\n{text}",
        )
    elif rng.random() < 0.75:
        fields = listed(list(value))
        ask = pick(
            rng,
            f"Give JSON with {fields}: {text}",
            f"Write {fields} as JSON: {text}",
            f"{text} Give {fields} as JSON.",
            f"Make a JSON object with the keys {', '.join(value)} from this: {text}",
        )
    else:
        ask = pick(rng, f"Turn this into JSON: {text}", f"{text}\nAs JSON, please.")
    return Exchange(ask, f"Fields: {', '.join(value)}.", json.dumps(value))


def read(rng: Random) -> Exchange:
    _, value, _ = _facts(rng)
    key = rng.choice([k for k in value if not isinstance(value[k], bool | list)])
    indent = 2 if rng.random() < 0.3 else None
    ask = f"{json.dumps(value, indent=indent)}\n\n" + pick(
        rng, f'What is the value of "{key}"?', f"What is {key} here?", f"Give me {key}."
    )
    return Exchange(ask, f'"{key}" is {json.dumps(value[key])}.', str(value[key]))


def rows(rng: Random) -> Exchange:
    """A list of objects from lines."""
    count = rng.randint(2, 5)
    made = [{"name": rng.choice(NAMES), "count": rng.randint(1, 99)} for _ in range(count)]
    text = "\n".join(f"{entry['name']}: {entry['count']}" for entry in made)
    ask = pick(
        rng,
        f"Make a JSON list of objects with name and count from these lines:\n{text}",
        f"{text}\n\nAs a JSON array with the keys name and count.",
    )
    return Exchange(ask, f"{count} objects.", json.dumps(made))
