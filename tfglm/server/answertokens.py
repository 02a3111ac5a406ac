"""Which token made which characters of an answer: log-probabilities go with the text that is sent, markup has none."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfglm.engine.api import TokenLogprob
from tfglm.server.logprobs import chat_entry
from tfglm.server.thinking import END_THINK, THINK

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer


class AnswerTokens:
    """Counts the characters of an answer as the engine prints it, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tags = (tokenizer.id_of(THINK), tokenizer.id_of(END_THINK))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def prints(self, token: int) -> bool:
        return token not in self._tags and not self._tokenizer.is_special(token)

    def place(self, tokens: Sequence[int]) -> list[int]:
        """For each of the next tokens, the index of the character that its first byte belongs to."""
        places = []
        for token in tokens:
            places.append(self._characters)
            if self.prints(token):
                self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return places


class AnswerLogprobs:
    """Entries of `logprobs.content` that wait for their text to be sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()

    def add(self, places: Sequence[int], entries: Sequence[TokenLogprob]) -> None:
        self._waiting += [(at, chat_entry(self._tokenizer, entry)) for at, entry in zip(places, entries, strict=True)]

    def take(self, start: int, end: int | None = None) -> list[dict[str, Any]]:
        """The entries of the characters from start to end, or to the last; those before them are dropped."""
        taken = []
        while self._waiting and (end is None or self._waiting[0][0] < end):
            at, entry = self._waiting.popleft()
            if at >= start:
                taken.append(entry)
        return taken
