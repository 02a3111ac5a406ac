"""JSON to a description or a schema, without `response_format`. Valid and right are told apart."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tfglm.checks.problem import (
    RIGHT,
    Grade,
    Json,
    Problem,
    Reply,
    dumps,
    invalid,
    json_object,
    same,
    shown,
    user,
    wrong,
)
from tfglm.checks.schema import broken
from tfglm.checks.words import CITIES, COLOURS, FOREIGN, FOREIGN_CITIES, ITEMS, NAMES, NOUNS

_SIMPLE = ("Give JSON with {fields}: {facts}", "Write {fields} as JSON: {facts}", "{facts} Give {fields} as JSON.")
_SCHEMA = (
    "Write a JSON object that follows this schema:\n{schema}\n\n{facts}",
    "{facts}\n\nPut this into a JSON object of this schema, nothing else:\n{schema}",
)


def make(rng: Random, level: int) -> Problem:
    value, facts, schema = _LEVELS[level](rng)
    if level == 0:
        prompt = rng.choice(_SIMPLE).format(fields=_listed(list(value)), facts=facts)
    else:
        prompt = rng.choice(_SCHEMA).format(schema=dumps(schema), facts=facts)
    return Problem("json", "schema" if level else "fields", facts, (user(prompt),), grader(value, schema),
                   answer=dumps(value))  # fmt: skip


def grader(value: Json, schema: Json) -> Callable[[Reply], Grade]:
    def grade(reply: Reply) -> Grade:
        found = json_object(reply.content)
        if found is None:
            return invalid(f"no JSON object in {shown(reply.content)}")
        fault = broken(found, schema)
        if fault:
            return invalid(fault)
        return RIGHT if same(found, value) else wrong(f"{dumps(found)[:120]} instead of {dumps(value)[:120]}")

    return grade


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _object(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT: Json = {"type": "string"}
_INT: Json = {"type": "integer"}


def _person(rng: Random) -> tuple[Json, str, Json]:
    name, age, city, colour = rng.choice(NAMES), rng.randint(5, 95), rng.choice(CITIES), rng.choice(COLOURS)
    parts = [("age", age, f"is {age}"), ("city", city, f"lives in {city}"), ("colour", colour, f"likes {colour}")]
    chosen = [parts[at] for at in sorted(rng.sample(range(3), rng.randint(1, 3)))]
    words = [text for _, _, text in chosen]
    facts = f"{name} {words[0] if len(words) == 1 else ', '.join(words[:-1]) + ' and ' + words[-1]}."
    value: Json = {"name": name, **{field: found for field, found, _ in chosen}}
    return value, facts, _object(**{field: _INT if field == "age" else _TEXT for field in value})


def _order(rng: Random) -> tuple[Json, str, Json]:
    name, city, paid = rng.choice(NAMES), rng.choice(CITIES), rng.random() < 0.5
    items = rng.sample(ITEMS, rng.randint(2, 3))
    size = rng.choice(("small", "medium", "large"))
    value = {"customer": name, "city": city, "paid": paid, "size": size, "items": items}
    facts = f"{name} from {city} orders {_listed(items)}, size {size}, and has {'' if paid else 'not '}paid."
    schema = _object(customer=_TEXT, city=_TEXT, paid={"type": "boolean"},
                     size={"enum": ["small", "medium", "large"]}, items={"type": "array", "items": _TEXT})  # fmt: skip
    return value, facts, schema


def _invoice(rng: Random) -> tuple[Json, str, Json]:
    name, city = rng.choice(NAMES + FOREIGN), rng.choice(CITIES + FOREIGN_CITIES)
    lines = [
        {"item": item, "count": rng.randint(1, 40), "price": rng.randint(100, 9900) / 100}
        for item in rng.sample(ITEMS, rng.randint(2, 4))
    ]
    note = rng.choice((None, f'leave at the "{rng.choice(NOUNS)}" door'))
    value = {"customer": {"name": name, "city": city}, "lines": lines, "note": note}
    told = ", ".join(f"{x['count']} {x['item']} at {x['price']:.2f} each" for x in lines)
    facts = f"Invoice for {name} in {city}: {told}. " + (
        f"The note says: {note}" if note else "There is no note (null)."
    )
    line = _object(item=_TEXT, count={"type": "integer", "minimum": 1}, price={"type": "number"})
    schema = _object(customer=_object(name=_TEXT, city=_TEXT), lines={"type": "array", "items": line},
                     note={"type": ["string", "null"]})  # fmt: skip
    return value, facts, schema


def _inventory(rng: Random, rows: int) -> tuple[Json, str, Json]:
    """Rows told one by one; the object groups them by place, in order of appearance, and adds up."""
    cities = rng.sample(CITIES + FOREIGN_CITIES, 3 if rows < 12 else 6)
    told, places = [], {city: [] for city in cities}  # type: tuple[list[str], dict[str, list[Json]]]
    for _ in range(rows):
        city = rng.choice(cities)
        entry = {"item": rng.choice(ITEMS), "count": rng.randint(1, 99), "colour": rng.choice(COLOURS)}
        places[city].append(entry)
        told.append(f"{city} has {entry['count']} {entry['colour']} {entry['item']}.")
    value = {
        "places": [
            {"city": city, "stock": places[city], "total": sum(e["count"] for e in places[city])}
            for city in cities
            if places[city]
        ],
        "total": sum(e["count"] for stock in places.values() for e in stock),
    }
    order = _listed([place["city"] for place in value["places"]])
    facts = f"{' '.join(told)} Group the stock by city, in the order {order}; within a city keep the order above."
    entry_schema = _object(item=_TEXT, count=_INT, colour={"enum": list(COLOURS)})
    place = _object(city=_TEXT, stock={"type": "array", "items": entry_schema}, total=_INT)
    return value, facts, _object(places={"type": "array", "items": place}, total=_INT)


_LEVELS: tuple[Callable[[Random], tuple[Any, str, Json]], ...] = (
    _person,
    _order,
    _invoice,
    lambda rng: _inventory(rng, 8),
    lambda rng: _inventory(rng, 25),
)
