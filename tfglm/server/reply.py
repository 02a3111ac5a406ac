"""A chat reply in the making: engine events in, pieces of the message out. Stream and whole reply use the same pieces,
so the concatenation of a stream's deltas is the message of the whole reply."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tfglm.engine.api import Delta, Event, Failed, Finished
from tfglm.server.answertokens import AnswerLogprobs, AnswerTokens
from tfglm.server.offered import OfferedTools
from tfglm.server.thinking import END_THINK
from tfglm.server.thoughts import ThoughtCalls
from tfglm.server.toolcalls import CallParser, CallStart, Part, Result, Text
from tfglm.server.usage import TokenDigest

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer

Field = Literal["content", "reasoning_content"]


@dataclass(frozen=True)
class TextPiece:
    """Text to append to one field of the message, with the log-probabilities of its tokens if they were asked for."""

    field: Field
    text: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class CallPiece:
    """Text to append to the arguments of the tool call `index`; its first piece has its id and name too."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = TextPiece | CallPiece


class ChatReply:
    """`end` is set by the last event."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool,
        include_reasoning: bool,
        logprobs: bool,
        tools: Sequence[dict[str, Any]] = (),
        one_call: bool = False,
    ) -> None:
        """tools: definitions the model was shown; without any, markup of calls is text. one_call: what follows the
        first call is no part of the reply."""
        self.digest = TokenDigest()
        self.end: Finished | Failed | None = None
        self.unclosed = False
        """The reply ended by itself inside its think block: its text was delivered as content too."""
        self._end_think = tokenizer.id_of(END_THINK)
        self._thinking = starts_in_reasoning
        self._include_reasoning = include_reasoning
        self._reasoning: list[str] = []
        offered = OfferedTools(tools)
        self._parser = CallParser(offered, only_first=one_call) if tools else None
        self._thoughts = ThoughtCalls(offered) if tools and starts_in_reasoning else None
        self._one_call = one_call and bool(tools)
        self._tokens = AnswerTokens(tokenizer)
        self._logprobs = AnswerLogprobs(tokenizer) if logprobs else None
        self._characters = 0  # of the answer
        self._undigested: list[tuple[int, int]] = []

    @property
    def enough(self) -> bool:
        """The reply is complete whatever the model goes on to say."""
        return self._one_call and self._parser is not None and self._parser.first_end is not None

    @property
    def calls(self) -> list[Result]:
        """How the reading of each tool call ended."""
        return self._parser.results if self._parser else []

    @property
    def finish_reason(self) -> str:
        assert isinstance(self.end, Finished)
        called = "ok" in self.calls or "repaired" in self.calls
        return "tool_calls" if called and (self.end.reason == "stop" or self.enough) else self.end.reason

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
        self._note_tokens(delta)
        if delta.channel == "reasoning":
            if self._end_think in delta.token_ids:
                return self._reason(self._end_thinking(delta.text))
            return self._reason(self._thoughts.feed(delta.text) if self._thoughts else delta.text)
        pieces = self._reason(self._end_thinking("")) if self._thinking else []
        if self._parser is not None:
            pieces += self._present(self._parser.feed(delta.text))
        elif delta.text:
            pieces.append(TextPiece("content", delta.text, self._logprobs.take(0) if self._logprobs else None))
        self._characters += len(delta.text)
        return pieces

    def _end_thinking(self, text: str) -> str:
        """The last reasoning: calls in it were only thought of."""
        self._thinking = False
        return self._thoughts.feed(text) + self._thoughts.close() if self._thoughts else text

    def _tail(self, finished: Finished) -> list[Piece]:
        ended = finished.reason == "stop" and finished.stop_reason is None
        pieces: list[Piece] = []
        if self._thinking and self._thoughts is not None:
            pieces += self._thought_calls(self._thoughts, ended)
        elif self._parser is not None:
            in_text = self._parser.in_text
            pieces += self._present(self._parser.finish(ended))
            if not in_text:
                self._logprobs = None
        rest = self._logprobs.take(self._characters if self._parser else 0) if self._logprobs else []
        if rest:
            # Their text never came: it was part of a stop string.
            pieces.append(TextPiece("content", "", rest))
        if self._thinking and self._reasoning and finished.reason == "stop" and not self.calls:
            # Some models answer inside a think block that they never close; without this clients would see no answer.
            self.unclosed = True
            pieces.append(TextPiece("content", "".join(self._reasoning)))
        self._digest_rest()
        return pieces

    def _thought_calls(self, thoughts: ThoughtCalls, ended: bool) -> list[Piece]:
        if not ended:
            return self._reason(thoughts.close())
        text, parts, parser = thoughts.finish()
        if parser is not None:
            self._parser = parser
            if self._one_call:
                parts = [part for part in parts if not isinstance(part, Text) and part.index == 0]
                del parser.results[1:]
        return self._reason(text) + self._present(parts)

    def _reason(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._reasoning.append(text)
        return [TextPiece("reasoning_content", text)] if self._include_reasoning else []

    def _present(self, parts: Sequence[Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Text):
                pieces.append(self._content(part.text, part.start))
            elif isinstance(part, CallStart):
                pieces.append(CallPiece(part.index, "", f"call_{secrets.token_hex(12)}", part.name))
            else:
                pieces.append(CallPiece(part.index, part.text))
        return pieces

    def _content(self, text: str, start: int) -> TextPiece:
        return TextPiece(
            "content", text, None if self._logprobs is None else self._logprobs.take(start, start + len(text))
        )

    def _note_tokens(self, delta: Delta) -> None:
        places = [0] * len(delta.token_ids)
        if delta.channel == "answer":
            if self._parser is not None and (self._logprobs is not None or self._one_call):
                places = self._tokens.place(delta.token_ids)
            if self._logprobs is not None and delta.logprobs:
                shown = [i for i, token in enumerate(delta.token_ids) if self._tokens.prints(token)]
                self._logprobs.add([places[i] for i in shown], [delta.logprobs[i] for i in shown])
        if self._one_call:
            self._undigested += zip(places, delta.token_ids, strict=True)
        else:
            self.digest.add(delta.token_ids)

    def _digest_rest(self) -> None:
        """Of a reply that needs one call only, the tokens up to its end: how many more were made is chance."""
        end = self._parser.first_end if self._parser else None
        self.digest.add(token for at, token in self._undigested if end is None or at < end)
