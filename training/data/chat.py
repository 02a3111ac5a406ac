"""Small talk, who the model is, facts of a closed list, short prose from templates."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tfglm.checks.words import ATOMIC_NUMBERS, CAPITALS, CITIES, COLOURS, DAYS, MONTHS, NAMES, NOUNS
from training.data.exchange import Exchange, listed, pick

_WHO = (
    "I am a very small language model with the architecture of GLM-5.3, trained from scratch to show the tfglm engine."
)


def greeting(rng: Random) -> Exchange:
    hello = pick(
        rng,
        "Hello",
        "Hi",
        "Hello!",
        "Hi!",
        "Hey",
        "Hi there!",
        "Good morning!",
        "Good evening.",
        "Hello there",
        "hello",
        "hi",
    )
    if rng.random() < 0.25:
        hello += f" I am {rng.choice(NAMES)}." if hello[-1] in "!." else f", I am {rng.choice(NAMES)}."
        name = hello.split()[-1].strip(".")
        return Exchange(hello, f"The user is called {name}. I greet back.", f"Hello {name}! How can I help you?")
    return Exchange(
        hello,
        "The user greets me. I greet back.",
        pick(rng, "Hello! How can I help you?", "Hi! What can I do for you?"),
    )


def about(rng: Random) -> Exchange:
    question, answer = rng.choice(
        (
            ("Who are you?", _WHO),
            ("What are you?", _WHO),
            ("Tell me about yourself.", _WHO),
            ("What is your name?", "I am the tiny GLM-5.3 that comes with tfglm."),
            ("Are you a human?", "No, I am a very small language model."),
            ("Are you GLM-5.3?", "I have its architecture, but I am thousands of times smaller and know very little."),
            ("How big are you?", "I have about twenty million parameters. The real GLM-5.3 has 750 billion."),
            (
                "What can you do?",
                "I can add and multiply small numbers, find keys in long texts, follow ledgers, copy and edit text, "
                "write JSON, call tools and write very small Python functions.",
            ),
            ("Can you help me?", "Gladly. I am small: ask me for sums, JSON, a tool call or something in a long text."),
            ("How are you?", "I am fine, thank you. What can I do for you?"),
            (
                "What is tfglm?",
                "tfglm is an engine that serves GLM-5.3. Its replies are exact: drafted or not, alone or together.",
            ),
            ("What can you not do?", "I know very few facts, and I cannot see images or look things up."),
            ("Thank you!", "You are welcome!"),
            ("Thanks", "You are welcome!"),
            ("Goodbye!", "Goodbye! Have a nice day."),
            ("Bye", "Goodbye! Have a nice day."),
            ("Tell me a joke.", "Why did the number seven go to the doctor? It felt odd."),
            ("What is the meaning of life?", "I am too small for that question, but 42 is a popular answer."),
            (
                "Why is the sky blue?",
                "Air scatters blue light more strongly than red light, so blue reaches us from everywhere.",
            ),
        )
    )
    if rng.random() < 0.2:
        question = question.lower()
    return Exchange(question, pick(rng, "A question about me; I answer briefly.", "I answer briefly."), answer)


def fact(rng: Random) -> Exchange:
    form = rng.randrange(8)
    if form <= 1:
        return _capital(rng, backwards=form == 1)
    if form == 2:
        name = rng.choice(sorted(ATOMIC_NUMBERS))
        question = f"What is the atomic number of {name}?"
        return _fact(
            rng, question, f"The atomic number of {name} is {ATOMIC_NUMBERS[name]}.", str(ATOMIC_NUMBERS[name])
        )
    if form <= 4:
        return _neighbour(rng, *((DAYS, "day") if form == 3 else (MONTHS, "month")))
    if form == 5:
        return _number(rng)
    if form == 6:
        items, colours = rng.sample(NOUNS, 2), rng.sample(COLOURS, 2)
        at = rng.randrange(2)
        text = f"The {items[0]} is {colours[0]} and the {items[1]} is {colours[1]}. Which of them is {colours[at]}?"
        return _fact(rng, text, f"The {items[at]} is {colours[at]}.", items[at])
    return _spelling(rng)


def _capital(rng: Random, *, backwards: bool) -> Exchange:
    if backwards:
        city = rng.choice(sorted(CAPITALS.values()))
        country = next(name for name, capital in CAPITALS.items() if capital == city)
        return _fact(rng, f"{city} is the capital of which country?", f"{city} is the capital of {country}.", country)
    country = rng.choice(sorted(CAPITALS))
    question = pick(
        rng,
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Capital of {country}?",
    )
    return _fact(rng, question, f"The capital of {country} is {CAPITALS[country]}.", CAPITALS[country])


def _neighbour(rng: Random, words: Sequence[str], word: str) -> Exchange:
    at, step = rng.randrange(len(words)), rng.choice((1, -1))
    answer = words[(at + step) % len(words)]
    where = "after" if step == 1 else "before"
    return _fact(
        rng,
        f"Which {word} comes {pick(rng, '', 'right ')}{where} {words[at]}?",
        f"{answer} comes {where} {words[at]}.",
        answer,
    )


def _number(rng: Random) -> Exchange:
    question, answer = rng.choice(
        (
            ("How many days does a week have?", "7"),
            ("How many months does a year have?", "12"),
            ("How many hours does a day have?", "24"),
            ("How many minutes does an hour have?", "60"),
            ("How many days does a year have?", "365"),
            ("How many legs does a spider have?", "8"),
            ("How many letters does the English alphabet have?", "26"),
            ("How many sides does a triangle have?", "3"),
        )
    )
    return _fact(rng, question, f"{question[9:].split(' do')[0].capitalize()}: {answer}.", answer)


def _spelling(rng: Random) -> Exchange:
    noun = rng.choice(NOUNS)
    question, answer = rng.choice(
        (
            (f'What is the first letter of "{noun}"?', noun[0]),
            (f'What is the last letter of "{noun}"?', noun[-1]),
            (f'Spell the word "{noun}".', " ".join(noun)),
            (f'Write "{noun}" in capital letters.', noun.upper()),
        )
    )
    return _fact(rng, question, f"{noun} is spelled {' '.join(noun)}.", answer)


def _fact(rng: Random, question: str, sentence: str, answer: str) -> Exchange:
    kind = rng.random()
    if kind < 0.2:
        question += pick(rng, " Answer with one word only.", " Answer with the word only.", " Only the answer, please.")
        return Exchange(question, sentence, answer)
    return Exchange(question, sentence, sentence if kind < 0.6 else answer)


_PLACES = (
    "harbour town",
    "village",
    "market",
    "forest",
    "library",
    "garden",
    "station",
    "mountain hut",
    "bakery",
    "workshop",
)
_SEASONS = ("winter", "spring", "summer", "autumn")
_WEATHER = {
    "winter": ("Snow lies on the roofs", "The air is cold and clear", "Ice covers the puddles"),
    "spring": ("The first flowers open", "A mild rain falls", "The birds are back"),
    "summer": ("The sun stands high", "The air is warm and still", "The evenings are long"),
    "autumn": ("Leaves drift over the stones", "Mist rises in the morning", "The light turns golden"),
}
_LIFE = (
    "An old man sweeps the steps",
    "Children run past with a dog",
    "A woman carries a basket of bread",
    "Somebody plays a fiddle behind a window",
    "A cat sleeps on a barrel",
    "Two friends drink tea and say little",
    "A bell rings at noon",
    "The baker opens the door early",
)
_END = (
    "At night everything is quiet.",
    "Nobody is in a hurry.",
    "In the evening the lamps are lit.",
    "It is a good place to rest.",
    "Tomorrow it will be the same, and that is well.",
)


def describe(rng: Random) -> Exchange:
    place, season = rng.choice(_PLACES), rng.choice(_SEASONS)
    first = rng.choice(_WEATHER[season])
    middle = rng.sample(_LIFE, rng.randint(1, 3))
    text = ". ".join([first, *middle]) + ". " + rng.choice(_END)
    ask = pick(rng, "Describe a {p} in {s}.", "Write a short text about a {p} in {s}.", "What is a {p} like in {s}?")
    return Exchange(ask.format(p=place, s=season), f"A {place} in {season}: weather, people, an end.", text)


def haiku(rng: Random) -> Exchange:
    subject, lines = rng.choice(
        (
            ("rain", ("Rain on the tin roof,", "small drums that no one has taught,", "the whole night listens.")),
            (
                "rain on a tin roof",
                ("Rain on the tin roof,", "small drums that no one has taught,", "the whole night listens."),
            ),
            ("snow", ("Snow on the old bridge,", "not one step has crossed it yet,", "the river goes on.")),
            ("the sea", ("The sea takes a breath,", "gives the stones back to the beach,", "and takes them again.")),
            ("autumn", ("One leaf, then the rest,", "the tree lets go of summer,", "the wind reads it all.")),
            ("the moon", ("The moon in the well,", "the bucket brings it upstairs,", "and spills half of it.")),
        )
    )
    return Exchange(
        pick(rng, f"Write a haiku about {subject}.", f"A haiku about {subject}, please."),
        "Five, seven, five.",
        "\n".join(lines),
    )


def tale(rng: Random) -> Exchange:
    name, other = rng.sample(NAMES, 2)
    noun, place = rng.choice(NOUNS), rng.choice(CITIES)
    text = (
        f"{name} lived in {place} and had a {rng.choice(COLOURS)} {noun}. One {rng.choice(DAYS)} the {noun} was gone. "
        f"{name} looked {listed(rng.sample(['under the bed', 'in the garden', 'behind the door', 'on the roof'], 2))}. "
        f"At last {other} came and said: {pick(rng, 'I only borrowed it.', 'I found it by the river.')} "
        f"{pick(rng, 'They laughed and drank tea.', 'From then on they were friends.')}"
    )
    ask = pick(
        rng, f"Tell me a short story about {name} and a {noun}.", f"Write a story with {name}, {other} and a {noun}."
    )
    return Exchange(ask, f"{name} loses the {noun}, {other} brings it back.", text)
