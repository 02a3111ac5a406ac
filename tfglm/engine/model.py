"""What the engine asks of a model: windows of rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tfglm.cache.pages import Stream
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows


class Model(Protocol):
    """A loaded model and its cache. Called from one thread at a time.

    The bits of a row depend on its stream's tokens alone: not on the other rows of its window, nor on how the tokens
    before it were cut into windows.
    """

    @property
    def tokens_total(self) -> int:
        """Tokens the cache holds over all streams; a stream occupies whole pages."""
        ...

    def open_stream(self) -> Stream: ...

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        """Append every entry's tokens to its stream; float32 [sum of want, vocabulary or more], in window order."""
        ...

    def forward_tapped(self, window: Sequence[Rows], taps: Taps) -> Passed:
        """`forward` that also hands out what drafters read. Called only when they read something."""
        ...


def run(model: Model, window: Sequence[Rows], taps: Taps) -> Passed:
    """The window through the model, with what `taps` asks for if it asks for anything."""
    return model.forward_tapped(window, taps) if taps else Passed(model.forward(window), None, {})
