"""What share of the conversations each subject has, and how long they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.data import arithmetic, chat, code, editing, recall, structured, suite, tools
from training.data.conversation import EFFORTS, Conversation, Turn
from training.data.exchange import Exchange, pick

_SUBJECTS: tuple[tuple[float, Callable[[Random], Exchange]], ...] = (
    (9, arithmetic.chain),
    (4, arithmetic.product),
    (3, arithmetic.mixed),
    (2, arithmetic.compare),
    (2, arithmetic.sort),
    (3, arithmetic.story),
    (2.5, chat.greeting),
    (3, chat.about),
    (6, chat.fact),
    (1, chat.describe),
    (0.5, chat.haiku),
    (1, chat.tale),
    (5, editing.repeat),
    (3, editing.replace),
    (2, editing.rename),
    (2, editing.lines),
    (4, editing.words),
    (1, code.known),
    (4, code.write),
    (4, code.read),
    (5, structured.write),
    (2, structured.read),
    (1, structured.rows),
    (30, suite.exchange),
)
_WEIGHTS = [weight for weight, _ in _SUBJECTS]
_MAKERS = [maker for _, maker in _SUBJECTS]
_SYSTEM = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are tfglm's tiny model.",
    "Be friendly and short.",
    "You are a careful assistant. Check your work.",
)


@dataclass(frozen=True)
class Mixture:
    """Lengths of a pool's rows in tokens, and of the texts in which keys hide, in characters; recalled: their share."""

    name: str
    row: int
    characters: tuple[int, int]
    recalled: float


# A character of filler is about 0.27 tokens.
SHORT = Mixture("short", 2048, (150, 5600), 0.13)
LONG = Mixture("long", 16384, (2000, 44000), 0.22)
SPARSE = Mixture("sparse", 8192, (1500, 25000), 0.2)
MIXTURES = {mixture.name: mixture for mixture in (SHORT, LONG, SPARSE)}


def conversation(rng: Random, mixture: Mixture) -> Conversation:
    kind = rng.random()
    if kind < mixture.recalled:
        size = int(rng.triangular(*mixture.characters, mixture.characters[0]))
        made = suite.needles(rng, size) if rng.random() < 0.5 else recall.long_text(rng, size)
        return _talk(rng, [made])
    if kind < mixture.recalled + 0.14:
        return tools.conversation(rng) if rng.random() < 0.5 else suite.tool_calls(rng)
    count = rng.choice((1, 1, 1, 1, 2, 3, 4))
    return _talk(rng, [rng.choices(_MAKERS, _WEIGHTS)[0](rng) for _ in range(count)])


def _talk(rng: Random, exchanges: list[Exchange]) -> Conversation:
    """A turn for each; earlier thinking is sometimes left out, as clients do."""
    effort = rng.choice(EFFORTS) if rng.random() < 0.55 else None
    turns: list[Turn] = []
    if rng.random() < 0.12:
        turns.append(Turn("system", pick(rng, *_SYSTEM)))
    forget = rng.random() < 0.5
    for number, one in enumerate(exchanges):
        thinking = one.thinking if effort else ""
        answer = one.answer if effort or not one.aloud else one.aloud
        if forget and number < len(exchanges) - 1:
            thinking = ""
        turns += [Turn("user", one.prompt), Turn("assistant", answer, thinking)]
    return Conversation(turns, effort)
