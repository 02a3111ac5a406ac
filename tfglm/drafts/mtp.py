"""Drafts from the checkpoint's own next-token layer, one step of the layer a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tfglm.cache.pages import Stream
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.candidates import best_candidates
from tfglm.models.mtp import Mtp, MtpStep
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.ops.base import Selection

MOST = 5
"""Steps of a chain at most. The layer was trained to look one token ahead; further ones are seldom right."""

BACKLOG = 32
"""Committed rows that may wait for the next draft; more are absorbed at once, so that a prompt is read in chunks."""


@dataclass
class MtpContext:
    """The trunk's stream and the layer's, and the committed rows that the layer has yet to absorb: tokens, and what the
    trunk made of them."""

    trunk: Stream
    stream: Stream
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class MtpDrafter:
    """A row is absorbed together with the token that follows it, so the last committed row waits for the pending token.
    Absorbing it gives the first draft."""

    name = "mtp"
    most = MOST
    taps = Taps(normed=True)

    def __init__(self, mtp: Mtp) -> None:
        self._mtp = mtp
        self.planes = mtp.cache.layers

    def open(self, stream: Stream) -> MtpContext:
        return MtpContext(stream, self._mtp.open_stream(stream))

    def close(self, context: MtpContext) -> None:
        context.stream.close()

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        assert passed.normed is not None
        for part in kept:
            context: MtpContext = part.context
            start = context.trunk.length - len(part.tokens)
            if context.stream.length + len(context.tokens) != start:
                # The trunk took over rows that it did not read; this layer's are in the same pages.
                context.tokens, context.hidden, context.stream.length = [], [], start
            context.tokens += part.tokens
            context.hidden.append(passed.normed[part.start : part.start + len(part.tokens)])
            if len(context.tokens) > BACKLOG:
                hidden = torch.cat(context.hidden)
                self._mtp.absorb([Rows(context.stream, context.tokens[1:], 0)], hidden[:-1])
                context.tokens, context.hidden = context.tokens[-1:], [hidden[-1:].clone()]  # not all of a chunk

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        contexts: list[MtpContext] = [ask.context for ask in asks]
        window = [Rows(c.stream, [*c.tokens[1:], ask.pending], 1) for ask, c in zip(asks, contexts, strict=True)]
        step = self._mtp.absorb(window, torch.cat([rows for c in contexts for rows in c.hidden]))
        for context in contexts:
            context.tokens, context.hidden = [], []
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
            selection = Selection(step.selection.slots[rows], step.selection.counts[rows])
            step = self._mtp.chain(window, MtpStep(step.logits, step.rows[rows], selection))
