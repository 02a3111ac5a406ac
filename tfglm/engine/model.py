"""What the engine asks of a model: windows of rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Stream(Protocol):
    """The cached tokens of one reply: prompt and reply so far."""

    length: int

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        ...

    def close(self) -> None:
        """Give the pages back."""
        ...


@dataclass(frozen=True)
class Rows:
    """Tokens to append to one stream, and of how many of the last of them the logits are wanted."""

    stream: Stream
    tokens: Sequence[int]
    want: int


class Model(Protocol):
    """A loaded model and its cache. Called from one thread only.

    The bits of a row depend on its stream's tokens alone: not on the other rows of its window, nor on how the tokens
    before it were cut into windows.
    """

    vocab_size: int
    """Columns of the logits; at least the tokenizer's vocabulary."""
    context: int
    """Longest stream the model can read, in tokens."""
    capacity: int
    """Tokens the cache holds over all streams."""
    page_tokens: int
    """Tokens a page; a stream occupies whole pages."""

    def open_stream(self) -> Stream: ...

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        """Append every Rows to its stream; float32 [sum of want, vocab_size], in window order."""
        ...
