"""What the engine asks of a model: windows of rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from tfglm.cache.pages import Stream
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.ops.draw import Draw


class Model(Protocol):
    """A loaded model and its cache. Called from one thread at a time.

    The bits of a row depend on its stream's tokens alone: not on the other rows of its window, nor on how the tokens
    before it were cut into windows.
    """

    @property
    def tokens_total(self) -> int:
        """Tokens the cache holds over all streams; a stream occupies whole pages."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        ...

    def open_stream(self) -> Stream: ...

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        """Append every entry's tokens to its stream; float32 [sum of want, vocabulary or more], in window order."""
        ...

    def forward_tapped(self, window: Sequence[Rows], taps: Taps) -> Passed:
        """`forward` that also hands out what drafters read. Called only when they read something."""
        ...


@runtime_checkable
class Drawing(Protocol):
    """A model that can draw tokens where its logits are, so that they need not come to the sampler."""

    def forward_drawn(self, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
        """`forward_tapped`, and the token after every wanted row that has a Draw. Whether a row has one depends on its
        request alone, so that its token cannot depend on its neighbours."""
        ...


def run(model: Model, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
    """The window through the model, with what `taps` and `draws` (one a wanted row) ask for, if they ask for anything
    and the model can draw."""
    if any(draws) and isinstance(model, Drawing):
        return model.forward_drawn(window, taps, draws)
    return model.forward_tapped(window, taps) if taps else Passed(model.forward(window), None, {})
