"""Tool calls: one of several, typed arguments, results and the answer to them, and no call where none is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tfglm.checks.words import CITIES, COLOURS, DAYS, ITEMS, NAMES, NOUNS
from training.data import chat
from training.data.conversation import EFFORTS, Conversation, Turn
from training.data.exchange import pick

Json = dict[str, Any]
Made = tuple[str, Json, str, Callable[[str], str]]
"""What the user asks, the arguments, the tool's result and the answer made of it."""


def _tool(name: str, description: str, required: list[str] | None = None, **properties: Json) -> Json:
    parameters: Json = {"type": "object", "properties": properties}
    parameters["required"] = list(properties) if required is None else required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str = "") -> Json:
    return {"type": "string", "description": description} if description else {"type": "string"}


_INT: Json = {"type": "integer"}


def _weather(rng: Random) -> Made:
    city = rng.choice(CITIES)
    ask = pick(
        rng,
        f"What is the weather in {city}?",
        f"How is the weather in {city} today?",
        f"Is it warm in {city}?",
        f"Weather in {city}?",
    )
    degrees, sky = rng.randint(-9, 38), rng.choice(("sunny", "rain", "cloudy", "snow", "windy"))
    result = pick(rng, json.dumps({"temperature": degrees, "sky": sky}), f"{sky}, {degrees} degrees")
    return ask, {"city": city}, result, lambda _: f"In {city} it is {degrees} degrees, {sky}."


def _add(rng: Random) -> Made:
    a, b = rng.randint(100, 99999), rng.randint(100, 99999)
    ask = pick(
        rng,
        f"Add {a} and {b} with the tool.",
        f"What is {a} + {b}? Use the tool.",
        f"Use the calculator: {a} plus {b}.",
    )
    return ask, {"a": a, "b": b}, str(a + b), lambda r: f"{a} + {b} = {r}"


def _mail(rng: Random) -> Made:
    name, noun = rng.choice(NAMES), rng.choice(NOUNS)
    text = pick(
        rng,
        f"The {noun} is ready.",
        f"Please bring the {noun}.",
        f"I will be late on {rng.choice(DAYS)}.",
        "See you tomorrow.",
    )
    ask = pick(rng, f'Write to {name}: "{text}"', f'Send {name} this message: "{text}"', f'Tell {name} "{text}"')
    return ask, {"to": name, "text": text}, pick(rng, "sent", '{"ok": true}'), lambda _: f"I have sent it to {name}."


def _remind(rng: Random) -> Made:
    day, hour, noun = rng.choice(DAYS), rng.randint(6, 22), rng.choice(NOUNS)
    ask = pick(
        rng, f"Remind me of the {noun} on {day} at {hour}.", f"Set a reminder for {day}, {hour} o'clock: {noun}."
    )
    return (
        ask,
        {"day": day, "hour": hour, "what": noun},
        "ok",
        lambda _: f"I will remind you of the {noun} on {day} at {hour}.",
    )


def _order(rng: Random) -> Made:
    count, item, colour = rng.randint(2, 60), rng.choice(ITEMS), rng.choice(COLOURS)
    ask = pick(
        rng,
        f"Order {count} {colour} {item}.",
        f"Please order {count} {item} in {colour}.",
        f"I need {count} {colour} {item}.",
    )
    number = rng.randint(1000, 9999)
    return (
        ask,
        {"item": item, "count": count, "colour": colour},
        f'{{"order": {number}}}',
        lambda _: f"Ordered: {count} {colour} {item}, number {number}.",
    )


def _lamp(rng: Random) -> Made:
    room, on = rng.choice(("kitchen", "bedroom", "bathroom", "hall", "office")), rng.random() < 0.5
    ask = pick(
        rng,
        f"Turn {'on' if on else 'off'} the light in the {room}.",
        f"Switch the {room} light {'on' if on else 'off'}.",
    )
    return ask, {"room": room, "on": on}, "done", lambda _: f"The light in the {room} is {'on' if on else 'off'}."


def _search(rng: Random) -> Made:
    query = f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}"
    ask = pick(rng, f"Search for {query}.", f"Look up {query}.", f"Find something about a {query}.")
    found = f"The {query} was found in {rng.choice(CITIES)}."
    return ask, {"query": query}, found, lambda r: r


def _stock(rng: Random) -> Made:
    items = rng.sample(ITEMS, rng.randint(2, 3))
    counts = {item: rng.randint(0, 90) for item in items}
    ask = pick(rng, f"How many {' and '.join(items)} are in stock?", f"Check the stock of {', '.join(items)}.")
    told = ", ".join(f"{count} {item}" for item, count in counts.items())
    return ask, {"items": items}, json.dumps(counts), lambda _: f"In stock: {told}."


def _now(rng: Random) -> Made:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    ask = pick(rng, "What time is it?", "How late is it?", "Tell me the time.")
    return ask, {}, f"{hour:02}:{minute:02}", lambda r: f"It is {r}."


def _transfer(rng: Random) -> Made:
    a, b, amount = *rng.sample(NAMES, 2), rng.randint(1, 900)
    ask = pick(rng, f"Move {amount} from {a} to {b}.", f"Transfer {amount} from {a}'s account to {b}'s.")
    return ask, {"source": a, "target": b, "amount": amount}, "ok", lambda _: f"Moved {amount} from {a} to {b}."


_NAMES = {
    "get_weather": (
        _weather,
        "The weather in a city",
        {"city": _text()},
        ("weather", "get_weather", "current_weather", "weather_now"),
    ),
    "add": (_add, "Add two numbers", {"a": _INT, "b": _INT}, ("add", "calculator_add", "sum_numbers", "add_numbers")),
    "send_message": (
        _mail,
        "Send a message",
        {"to": _text("who gets it"), "text": _text()},
        ("send_message", "send_mail", "message"),
    ),
    "remind": (
        _remind,
        "Set a reminder",
        {"day": _text(), "hour": _INT, "what": _text()},
        ("remind", "set_reminder", "add_reminder"),
    ),
    "order": (
        _order,
        "Order things",
        {"item": _text(), "count": _INT, "colour": _text()},
        ("order", "place_order", "order_items"),
    ),
    "set_light": (
        _lamp,
        "Switch a light",
        {"room": _text(), "on": {"type": "boolean"}},
        ("set_light", "switch_light", "light"),
    ),
    "search": (_search, "Search the archive", {"query": _text()}, ("search", "find", "lookup", "search_archive")),
    "stock": (
        _stock,
        "How many of some items are in stock",
        {"items": {"type": "array", "items": _text()}},
        ("stock", "get_stock", "check_stock"),
    ),
    "clock": (_now, "The time", {}, ("now", "clock", "get_time")),
    "transfer": (
        _transfer,
        "Move money",
        {"source": _text(), "target": _text(), "amount": _INT},
        ("transfer", "move_money", "pay"),
    ),
}


def conversation(rng: Random) -> Conversation:
    """One to three turns with one to six tools on offer; some need none of them."""
    offered = rng.sample(sorted(_NAMES), rng.choice((1, 2, 2, 3, 3, 4, 5)))
    names = {kind: rng.choice(_NAMES[kind][3]) for kind in offered}
    tools = []
    for kind in offered:
        _, description, properties, _ = _NAMES[kind]
        tools.append(_tool(names[kind], description, **properties))
    effort = rng.choice(EFFORTS) if rng.random() < 0.5 else None
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns.append(Turn("system", pick(rng, "You are a helpful assistant.", "Use the tools when they help.")))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.15:
            said = rng.choice((chat.greeting, chat.fact, chat.about))(rng)
            turns += [Turn("user", said.prompt), Turn("assistant", said.answer, said.thinking if effort else "")]
            continue
        kind = rng.choice(offered)
        ask, arguments, result, answer = _NAMES[kind][0](rng)
        if rng.random() < 0.1:
            other = _NAMES[kind][0](rng)
            calls = ((names[kind], arguments), (names[kind], other[1]))
            turns += [
                Turn("user", f"{ask} {other[0]}"),
                Turn("assistant", "", _thought(names[kind], effort, " twice"), calls),
                Turn("tool", result),
                Turn("tool", other[2]),
                Turn(
                    "assistant", f"{answer(result)} {other[3](other[2])}", "Both results are there." if effort else ""
                ),
            ]
            continue
        turns.append(Turn("user", ask))
        turns.append(Turn("assistant", "", _thought(names[kind], effort), ((names[kind], arguments),)))
        if rng.random() < 0.75:
            said = "The tool has answered." if effort else ""
            turns += [Turn("tool", result), Turn("assistant", answer(result), said)]
        else:
            break
    return Conversation(turns, effort, tools)


def _thought(name: str, effort: str | None, more: str = "") -> str:
    return f"I call {name}{more}." if effort else ""
