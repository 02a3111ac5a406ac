"""What a drafter is: something that guesses the tokens after a reply's pending one, and may be wrong at no cost to the
reply.

A round: the engine asks for drafts, verifies them in one window, and tells which rows of it were kept. `p` stands for
the number of committed rows of a stream, which is the position of its pending token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import Stream
from tfglm.models.glm53 import Glm53
from tfglm.models.taps import Passed, Taps
from tfglm.ops.group import Message

Draw = Callable[[np.ndarray, np.ndarray, int], tuple[int, float]]
"""The target's own choice from a drafter's candidates: (ids int64 [n] ascending, values float [n], ahead) -> (token,
its estimated probability of being the target's).

Applies the request's penalties and filters and the noise of the very position that is `ahead` tokens after the one
that follows the pending token. Called with ahead 0, 1, 2, ...: it remembers its own choices as the path so far.
"""


@dataclass(frozen=True)
class Draft:
    """Guessed tokens, each with an estimate of its probability given that those before it were right.

    source: who guessed ("mtp", "copy-prompt"). match: for copies, how many tokens before them agreed. sole: a copy of
    the only token that ever followed what agreed.
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    source: str = "none"
    match: int = 0
    sole: bool = False


NO_DRAFT = Draft()


@dataclass(frozen=True)
class Ask:
    """One stream's request for drafts. context: the drafter's own, of that stream. room: the most tokens that can be
    of use. go_on: whether one more token is worth drafting after those with these confidences. sampled: whether the
    target draws with noise."""

    context: Any
    pending: int
    room: int
    draw: Draw
    go_on: Callable[[Sequence[float]], bool]
    sampled: bool


@dataclass(frozen=True)
class Kept:
    """Rows of a window that became part of a stream: their tokens, and where in the window they lie."""

    context: Any
    tokens: Sequence[int]
    start: int


class Drafter(Protocol):
    """A model that drafts. Holds a context a stream, which reads the stream's rows as they are committed.

    One thread at a time. Whatever it raises turns drafting off and harms no reply. What all ranks do together of it is
    taken in `ops.steps.Steps`, so that this holds for whichever rank fails.
    """

    @property
    def name(self) -> str:
        """The source of its drafts."""
        ...

    @property
    def most(self) -> int:
        """Tokens it drafts at most."""
        ...

    @property
    def taps(self) -> Taps:
        """What it needs of every row of the trunk."""
        ...

    @property
    def planes(self) -> Sequence[LayerPlanes]:
        """What it caches in the trunk's own pages. Whoever begins with kept pages finds these rows in them too, so a
        drafter with any reads every stream, whether it is to draft for it or not."""
        ...

    def open(self, stream: Stream) -> Any:
        """The context of a new stream of the trunk. Rows that it holds already are skipped, then the rest is read."""
        ...

    def skip(self, context: Any, tokens: Sequence[int]) -> None:
        """The next rows of a prompt are in the stream already and will not be read."""
        ...

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        """Extend contexts by rows that were committed: a prompt chunk, or what was kept of a round."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each ask, whose contexts differ. Leaves the contexts at their committed rows."""
        ...

    def close(self, context: Any) -> None:
        """Forget a stream."""
        ...

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        """What the same drafter does on the other ranks, beside their `model`, by the kind of message in which rank
        0's announces it."""
        ...
