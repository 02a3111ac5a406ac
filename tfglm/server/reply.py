"""A chat reply in the making: engine events in, pieces of the message out. Stream and whole reply use the same pieces,
so the concatenation of a stream's deltas is the message of the whole reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tfglm.engine.api import Delta, Event, Failed, Finished, TokenLogprob
from tfglm.server.logprobs import chat_entry
from tfglm.server.thinking import END_THINK, THINK
from tfglm.server.usage import TokenDigest

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer

Field = Literal["content", "reasoning_content"]


@dataclass(frozen=True)
class Piece:
    """Text to append to one field of the message, with the log-probabilities of its tokens if they were asked for."""

    field: Field
    text: str
    logprobs: list[dict[str, Any]] | None = None


class ChatReply:
    """`end` is set by the last event."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool,
        include_reasoning: bool,
        logprobs: bool,
    ) -> None:
        self.digest = TokenDigest()
        self.end: Finished | Failed | None = None
        self.unclosed = False
        """The reply ended by itself inside its think block: its text was delivered as content too."""
        self._tokenizer = tokenizer
        self._end_think = tokenizer.id_of(END_THINK)
        self._tags = (tokenizer.id_of(THINK), self._end_think)
        self._thinking = starts_in_reasoning
        self._include_reasoning = include_reasoning
        self._reasoning: list[str] = []
        self._entries: list[dict[str, Any]] | None = [] if logprobs else None

    def feed(self, event: Event) -> list[Piece]:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Failed):
            self.end = event
        elif isinstance(event, Finished):
            self.end = event
            return self._tail(event)
        return []

    def _delta(self, delta: Delta) -> list[Piece]:
        self.digest.add(delta.token_ids)
        if self._thinking and (delta.channel == "answer" or self._end_think in delta.token_ids):
            self._thinking = False
        if delta.channel == "reasoning":
            if not delta.text:
                return []
            self._reasoning.append(delta.text)
            return [Piece("reasoning_content", delta.text)] if self._include_reasoning else []
        if self._entries is not None:
            self._entries += [chat_entry(self._tokenizer, entry) for entry in delta.logprobs if self._prints(entry)]
        return [Piece("content", delta.text, self._take_entries())] if delta.text else []

    def _tail(self, finished: Finished) -> list[Piece]:
        pieces = []
        if self._entries:
            # Their text never came: it was part of a stop string.
            pieces.append(Piece("content", "", self._take_entries()))
        if self._thinking and self._reasoning and finished.reason == "stop":
            # Some models answer inside a think block that they never close; without this clients would see no answer.
            self.unclosed = True
            pieces.append(Piece("content", "".join(self._reasoning)))
        return pieces

    def _prints(self, entry: TokenLogprob) -> bool:
        return entry.token_id not in self._tags and not self._tokenizer.is_special(entry.token_id)

    def _take_entries(self) -> list[dict[str, Any]] | None:
        if self._entries is None:
            return None
        taken, self._entries = self._entries, []
        return taken
