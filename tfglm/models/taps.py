"""What a forward pass can hand out besides logits: the rows that drafters read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfglm.ops.group import Fact, Message


@dataclass(frozen=True)
class Taps:
    """What to hand out of every row of a window.

    normed: the row after the model's last norm, the one its head reads. layers: the residual streams entering these
    layers, ascending; the number of layers stands for the stream that leaves the last one, before the norm.
    """

    normed: bool = False
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Taps:
        """Those that a message's facts hold."""
        return cls(bool(message.facts["normed"]), tuple(message.integers("layers")))

    def facts(self) -> dict[str, Fact]:
        return {"normed": int(self.normed), "layers": list(self.layers)}

    def __or__(self, other: Taps) -> Taps:
        return Taps(self.normed or other.normed, tuple(sorted({*self.layers, *other.layers})))

    def __bool__(self) -> bool:
        return self.normed or bool(self.layers)


@dataclass(frozen=True)
class Passed:
    """A window after the model. logits float32 [sum of want, vocabulary or more]; none where every token was drawn.

    normed [R, hidden] if it was tapped. streams [R, hidden] of each tapped layer, by its number. tokens: of each wanted
    row the token that the model drew after it, -1 if none can be; None where it was not asked to.
    """

    logits: torch.Tensor
    normed: torch.Tensor | None
    streams: dict[int, torch.Tensor]
    tokens: Sequence[int | None] = ()
