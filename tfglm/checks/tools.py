"""Tool calls: one of several tools, parallel calls, a call after a result, no call, and arguments of every type.

The history that ends in a tool's result is written here, so that each problem is one request. The right call is asked
for in words that leave one reading: every argument is named, optional ones are told or left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tfglm.checks.problem import (
    RIGHT,
    Call,
    Grade,
    Json,
    Problem,
    Reply,
    dumps,
    invalid,
    numbers,
    same,
    user,
    wrong,
)  # fmt: skip
from tfglm.checks.schema import broken
from tfglm.checks.words import CITIES, COLOURS, DAYS, FOREIGN, FOREIGN_CITIES, ITEMS, NAMES, NOUNS

KINDS = ("single", "parallel", "after_result", "answer", "none", "nested")


@dataclass(frozen=True)
class _Request:
    """A tool, the sentence that asks for it, and the arguments of the right call."""

    tool: Json
    text: str
    arguments: Json

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])

    @property
    def call(self) -> Call:
        return Call(self.name, dumps(self.arguments))


def make(rng: Random, level: int) -> Problem:
    return of_kind(rng, level, rng.choice(_KINDS_OF_LEVEL[level]))


def of_kind(rng: Random, level: int, kind: str) -> Problem:
    """A problem of one of KINDS. Raises KeyError for another kind."""
    return _KINDS[kind](rng, level)


def _tool(name: str, description: str, required: Sequence[str] | None = None, /, **properties: Json) -> Json:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT: Json = {"type": "string"}
_INT: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_UNIT: Json = {"enum": ["celsius", "fahrenheit"]}


def _weather(rng: Random, level: int) -> _Request:
    city = rng.choice(CITIES if level < 2 else CITIES + FOREIGN_CITIES)
    if level == 0:
        text = rng.choice(("What is the weather in {}?", "How is the weather in {} now?", "Get the weather of {}."))
        return _Request(_tool("weather", "Weather of a city", city=_TEXT), text.format(city), {"city": city})
    unit, day = rng.choice(_UNIT["enum"]), rng.choice(DAYS)
    tool = _tool("weather", "Weather of a city on a day of the week", city=_TEXT, day={"enum": list(DAYS)}, unit=_UNIT)
    text = f"What will the weather in {city} be on {day}, in degrees {unit}?"
    return _Request(tool, text, {"city": city, "day": day, "unit": unit})


def _add(rng: Random, level: int) -> _Request:
    top = 99 if level == 0 else 9999
    a, b = rng.randint(1, top), rng.randint(1, top)
    if level == 0:
        text = rng.choice(("Add {} and {}.", "Use the tool to add {} and {}.", "Sum {} and {}."))
        return _Request(_tool("add", "Add two numbers", a=_INT, b=_INT), text.format(a, b), {"a": a, "b": b})
    operation = rng.choice(("add", "subtract", "multiply", "divide"))
    words = {"add": "Add {a} and {b}, in this order, with the tool", "subtract": "Subtract {b} from {a} with the tool",
             "multiply": "Multiply {a} by {b} with the tool", "divide": "Divide {a} by {b} with the tool"}  # fmt: skip
    tool = _tool("calculate", "Computes `a operation b`", a=_NUMBER, operation={"enum": list(words)}, b=_NUMBER)
    return _Request(tool, words[operation].format(a=a, b=b) + ".", {"a": a, "operation": operation, "b": b})


def _send(rng: Random, level: int) -> _Request:
    name = rng.choice(NAMES if level < 2 else NAMES + FOREIGN)
    text = f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}"
    if level == 0:
        words = rng.choice(('Send {} the text "{}".', 'Write "{1}" to {0}.', 'Tell {}: "{}"'))
        return _Request(_tool("send", "Send a text", to=_TEXT, text=_TEXT), words.format(name, text),
                        {"to": name, "text": text})  # fmt: skip
    text = text if level < 3 else f'{text}:\n  "{rng.choice(NOUNS)}" \\ <{rng.choice(FOREIGN)}> {{{rng.choice(NOUNS)}}}'
    urgent = rng.random() < 0.5
    tool = _tool("send_message", "Send a message", to=_TEXT, text=_TEXT, urgent={"type": "boolean"})
    asked = f"Send {name} {'an urgent' if urgent else 'a message that is not urgent: the'} text"
    return _Request(tool, f"{asked}, exactly the lines between the marks:\n---\n{text}\n---",
                    {"to": name, "text": text, "urgent": urgent})  # fmt: skip


def _timer(rng: Random, level: int) -> _Request:
    minutes = rng.randint(1, 59)
    if level == 0:
        words = rng.choice(("Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer of {} minutes."))
        return _Request(_tool("timer", "Set a timer", minutes=_INT), words.format(minutes), {"minutes": minutes})
    label, repeat = rng.choice(NOUNS), rng.randint(2, 5)
    tool = _tool("set_timer", "Set a timer", ("seconds",), seconds=_INT, label=_TEXT, repeat=_INT)
    arguments: Json = {"seconds": 60 * minutes}
    text = f"Set a timer for {minutes} minutes"
    if rng.random() < 0.6:
        arguments["label"] = label
        text += f', labelled "{label}"'
    if rng.random() < 0.6:
        arguments["repeat"] = repeat
        text += f", repeated {repeat} times"
    return _Request(tool, text + ".", arguments)


def _order(rng: Random, level: int) -> _Request:
    """Nested objects in an array, enums, numbers and null."""
    line = {
        "type": "object",
        "properties": {"item": {"enum": list(ITEMS)}, "count": {"type": "integer", "minimum": 1}, "price": _NUMBER},
        "required": ["item", "count", "price"],
        "additionalProperties": False,
    }
    address = {
        "type": "object",
        "properties": {"name": _TEXT, "city": _TEXT, "floor": {"type": ["integer", "null"]}},
        "required": ["name", "city", "floor"],
        "additionalProperties": False,
    }
    tool = _tool("place_order", "Order goods. floor is null if it is not known", lines={"type": "array", "items": line},
                 address=address, tags={"type": "array", "items": _TEXT}, gift={"type": "boolean"})  # fmt: skip
    name, city = rng.choice(NAMES + FOREIGN), rng.choice(CITIES + FOREIGN_CITIES)
    lines = [
        {"item": item, "count": rng.randint(1, 30), "price": rng.randint(50, 9900) / 100}
        for item in rng.sample(ITEMS, min(2 + level, 6))
    ]
    floor, gift = rng.choice((None, rng.randint(0, 30))), rng.random() < 0.5
    tags = rng.sample(NOUNS, rng.randint(0, 3))
    told = ", ".join(f"{x['count']} {x['item']} at {x['price']:.2f}" for x in lines)
    text = (
        f"Order, in this order: {told}. Deliver to {name} in {city}, "
        f"{'floor unknown' if floor is None else f'floor {floor}'}. It is {'' if gift else 'not '}a gift. "
        f"{'Tags: ' + ', '.join(tags) if tags else 'No tags (an empty list)'}."
    )
    return _Request(tool, text, {"lines": lines, "address": {"name": name, "city": city, "floor": floor},
                                 "tags": tags, "gift": gift})  # fmt: skip


_SIMPLE: tuple[Callable[[Random, int], _Request], ...] = (_weather, _add, _send, _timer)


def _offered(rng: Random, level: int, needed: Sequence[_Request]) -> tuple[Json, ...]:
    """The tools needed among others, in any order."""
    tools = {request.name: request.tool for request in needed}
    others = [make(rng, level) for make in rng.sample(_SIMPLE, rng.randint(0, 2) if level == 0 else 3)]
    for other in [*others, *([_order(rng, level)] if level > 2 else [])]:
        tools.setdefault(other.name, other.tool)
    names = sorted(tools)
    rng.shuffle(names)
    return tuple(tools[name] for name in names)


def _single(rng: Random, level: int) -> Problem:
    request = rng.choice(_SIMPLE)(rng, level)
    return _problem("single", level, (user(request.text),), _offered(rng, level, [request]), (request,))


def _nested(rng: Random, level: int) -> Problem:
    request = _order(rng, level)
    return _problem("nested", level, (user(request.text),), _offered(rng, level, [request]), (request,))


def _parallel(rng: Random, level: int) -> Problem:
    """Several calls that do not depend on each other; the same tool twice at low levels."""
    if level < 2:
        make_one = rng.choice((_weather, _add))
        first, second = make_one(rng, level), make_one(rng, level)
        while same(first.arguments, second.arguments):
            second = make_one(rng, level)
        requests: tuple[_Request, ...] = (first, second)
    else:
        requests = tuple(make_one(rng, level) for make_one in rng.sample(_SIMPLE, min(level, 4)))
    text = "Do all of this at once. " + " ".join(request.text for request in requests)
    return _problem("parallel", level, (user(text),), _offered(rng, level, requests), requests)


def _after_result(rng: Random, level: int) -> Problem:
    """A second call takes its argument from the result of the first."""
    item, name = rng.choice(ITEMS), rng.choice(NAMES)
    count, more = rng.randint(1, 99), rng.randint(1, 99)
    look = _tool("stock", "How many of an item there are", item={"enum": list(ITEMS)} if level else _TEXT)
    add = _tool("add", "Add two numbers", a=_INT, b=_INT)
    first = _Request(look, f"Look up how many {item} there are, then use add to add {more} to that number, "
                           f"the number found as a and {more} as b.", {"item": item})  # fmt: skip
    second = _Request(add, "", {"a": count, "b": more})
    result: Json = {"count": count} if level == 0 else {
        "item": item, "checked_by": name, "shelves": rng.randint(100, 999), "count": count
    }  # fmt: skip
    messages = (user(first.text), *_answered(first, result))
    return _problem("after_result", level, messages, _offered(rng, level, [first, second]), (second,))


def _answer(rng: Random, level: int) -> Problem:
    """After the result nothing is left to call: the reply gives the number that came back."""
    request, value = _add(rng, 0), rng.randint(100, 999)
    item = rng.choice(ITEMS)
    look = _tool("stock", "How many of an item there are", item=_TEXT)
    request = _Request(look, rng.choice(("How many {} are there?", "Look up how many {} there are.")).format(item),
                       {"item": item})  # fmt: skip
    messages = (user(request.text), *_answered(request, {"count": value}))

    def grade(reply: Reply) -> Grade:
        if reply.calls:
            return wrong(f"{reply.calls[0].name} is called although the result is there")
        found = numbers(reply.content)
        return RIGHT if value in found else wrong(f"the reply does not give {value}")

    return Problem("tools", "answer", f"{request.text}{value}", messages, grade, answer=f"There are {value} {item}.",
                   tools=_offered(rng, level, [request]))  # fmt: skip


def _none(rng: Random, level: int) -> Problem:
    """A question that needs no tool; the answer itself is not graded, but there must be one."""
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    colour, noun, name = rng.choice(COLOURS), rng.choice(NOUNS), rng.choice(NAMES)
    text, answer = rng.choice((
        (f"Say hello to me; my name is {name}.", f"Hello, {name}!"),
        (f'Repeat without any tool: "{colour} {noun}"', f"{colour} {noun}"),
        (f"Which is larger, {a} or {b}? Use no tool.", str(max(a, b))),
        (f"Hi, I am {name}. Thanks for your help.", f"You are welcome, {name}."),
    ))  # fmt: skip
    unused = rng.choice(_SIMPLE)(rng, level)

    def grade(reply: Reply) -> Grade:
        if reply.calls:
            return wrong(f"{reply.calls[0].name} is called although nothing needs it")
        # Nothing is asked of the words, so they may be any; a reply without an end is none.
        whole = reply.content.strip() and reply.finish != "length"
        return RIGHT if whole else invalid("an empty reply")

    return Problem("tools", "none", text, (user(text),), grade, answer=answer, tools=_offered(rng, level, [unused]))


def _answered(request: _Request, result: Json) -> tuple[Json, Json]:
    call = {"id": "call_1", "type": "function", "function": {"name": request.name, "arguments": request.call.arguments}}
    return (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": dumps(result)},
    )


def _problem(
    kind: str, level: int, messages: tuple[Json, ...], tools: tuple[Json, ...], requests: tuple[_Request, ...]
) -> Problem:
    key = " ".join(str(message["content"]) for message in messages)
    calls = tuple(request.call for request in requests)
    return Problem("tools", kind, key, messages, calls_grader(calls, tools), calls=calls, tools=tools, level=level)


def calls_grader(expected: Sequence[Call], tools: Sequence[Json]) -> Callable[[Reply], Grade]:
    """Right if the calls are the expected ones in any order; `invalid` if one is none that the tools take."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    wanted = [(call.name, json.loads(call.arguments)) for call in expected]

    def grade(reply: Reply) -> Grade:
        if not reply.calls:
            return wrong(f"no call instead of {', '.join(name for name, _ in wanted)}")
        made = []
        for call in reply.calls:
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                return invalid(f"the arguments of {call.name} are no JSON: {call.arguments[:80]!r}")
            if call.name not in schemas:
                return invalid(f"{call.name[:40]!r} is not offered")
            fault = broken(arguments, schemas[call.name], f"{call.name}'s arguments")
            if fault:
                return invalid(fault)
            made.append((call.name, arguments))
        return _compared(made, wanted)

    return grade


def _compared(made: list[tuple[str, Json]], wanted: list[tuple[str, Json]]) -> Grade:
    left = list(wanted)
    for name, arguments in made:
        at = next((n for n, (other, right) in enumerate(left) if name == other and same(arguments, right)), None)
        if at is None:
            right = next((right for other, right in left if other == name), None)
            return wrong(f"{name}({dumps(arguments)[:100]}) " + (f"instead of {dumps(right)[:100]}" if right is not None
                         else f"instead of {dict(Counter(other for other, _ in wanted))}"))  # fmt: skip
        del left[at]
    return wrong(f"{left[0][0]} is not called") if left else RIGHT


_KINDS: dict[str, Callable[[Random, int], Problem]] = {
    "single": _single,
    "parallel": _parallel,
    "after_result": _after_result,
    "answer": _answer,
    "none": _none,
    "nested": _nested,
}
_KINDS_OF_LEVEL = (
    ("single", "single", "answer", "none"),
    ("single", "parallel", "after_result", "answer", "none"),
    KINDS,
    KINDS,
    ("parallel", "nested", "nested", "after_result", "none"),
)
