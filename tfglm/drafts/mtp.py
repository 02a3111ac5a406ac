"""Drafts from the checkpoint's own next-token layer, one step of the layer a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from tfglm.cache.pages import Stream
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.candidates import best_candidates
from tfglm.models.glm53 import Glm53
from tfglm.models.mtp import Mtp, MtpStep
from tfglm.models.mtp_rows import MtpRows
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.ops.group import Message

MOST = 5
"""Steps of a chain at most. The layer was trained to look one token ahead; further ones are seldom right."""

BACKLOG = 32
"""Committed rows that may wait for the next draft; more are absorbed at once, so that a prompt is read in chunks."""


@dataclass
class MtpContext:
    """The trunk's stream and the layer's, and the tokens of the committed rows that the layer has yet to absorb; what
    the trunk made of them waits under `number`."""

    number: int
    trunk: Stream
    stream: Stream
    tokens: list[int] = field(default_factory=list)


class MtpDrafter:
    """A row is absorbed together with the token that follows it, so the last committed row waits for the pending token.
    Absorbing it gives the first draft."""

    name = "mtp"
    most = MOST
    taps = Taps(normed=True)

    def __init__(self, model: Glm53, mtp: Mtp) -> None:
        self._mtp = mtp
        self._numbers = count()
        self.rows = MtpRows(model, mtp)
        self.planes = mtp.cache.layers

    def prepare(self, rows: int, window: int) -> None:
        """See Glm53.prepare."""
        self._mtp.prepare(rows, window)

    def open(self, stream: Stream) -> MtpContext:
        return MtpContext(next(self._numbers), stream, self._mtp.open_stream(stream))

    def close(self, context: MtpContext) -> None:
        self.rows.forget(context.number)
        context.stream.close()

    def skip(self, context: MtpContext, tokens: Sequence[int]) -> None:
        """Nothing to do: this layer's rows are in the same pages as the trunk's."""

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        assert passed.normed is not None
        for part in kept:
            context: MtpContext = part.context
            start = context.trunk.length - len(part.tokens)
            if context.stream.length + len(context.tokens) != start:
                # The trunk took over rows that it did not read; this layer's are in the same pages.
                self.rows.forget(context.number)
                context.tokens, context.stream.length, context.number = [], start, next(self._numbers)
        parts = [(part.context.number, part.start, part.start + len(part.tokens)) for part in kept]
        self.rows.keep(parts, passed.normed)
        for part in kept:
            context = part.context
            context.tokens += part.tokens
            if len(context.tokens) > BACKLOG:
                self.rows.absorb([Rows(context.stream, context.tokens[1:], 0, prompt=True)], [context.number], leave=1)
                context.tokens = context.tokens[-1:]

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        return {**self.rows.handlers(), **self._mtp.handlers()}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        contexts: list[MtpContext] = [ask.context for ask in asks]
        window = [Rows(c.stream, [*c.tokens[1:], ask.pending], 1) for ask, c in zip(asks, contexts, strict=True)]
        step = self.rows.absorb(window, [context.number for context in contexts])
        for context in contexts:
            context.tokens = []
        lengths = [context.stream.length for context in contexts]
        drafts = self._chain(asks, step)
        for context, length in zip(contexts, lengths, strict=True):
            context.stream.truncate(length)
        return drafts

    def _chain(self, asks: Sequence[Ask], step: MtpStep) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in asks]
        confidence: list[list[float]] = [[] for _ in asks]
        going = list(range(len(asks)))
        while True:
            for number, ids, values in zip(going, *best_candidates(step.logits), strict=True):
                token, sure = asks[number].draw(ids, values, len(tokens[number]))
                tokens[number].append(token)
                confidence[number].append(sure)
            rows = [
                row
                for row, number in enumerate(going)
                if len(tokens[number]) < min(MOST, asks[number].room) and asks[number].go_on(confidence[number])
            ]
            going = [going[row] for row in rows]
            if not going:
                return [Draft(tuple(t), tuple(c), self.name) for t, c in zip(tokens, confidence, strict=True)]
            window = [Rows(asks[number].context.stream, [tokens[number][-1]], 1) for number in going]
            step = self.rows.chain(window, rows)
