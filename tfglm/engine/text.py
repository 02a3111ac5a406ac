"""Generated ids to text: whole characters only, reasoning apart from the answer, stop strings. Never imports torch."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from tfglm.engine.api import Channel
from tfglm.engine.tokenizer import Tokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class ReplyText:
    """The text of one reply, fed one generated id at a time at constant cost.

    A reply starts in `reasoning` or in `answer`; the generated id of `</think>` ends the reasoning for good. Think tags
    print nothing wherever they are generated, nor do special tokens and `silent` ids. Without split_reasoning
    everything is answer and think tags are ordinary text. Stop strings are looked for in the answer only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool = False,
        split_reasoning: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        silent: Collection[int] = (),
    ) -> None:
        self.channel: Channel = "reasoning" if split_reasoning and starts_in_reasoning else "answer"
        self._tokenizer = tokenizer
        self._silent = silent
        tags = (tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)) if split_reasoning else (None, None)
        self._think_open, self._think_close = tags
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop, include_stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.found

    def feed(self, token: int, *, silent: bool = False, may_stop: bool = True) -> str:
        """Text that became final with this token, on the channel the reply was in before it.

        silent: the token prints nothing. may_stop False: a stop string completed by this token is ordinary text.
        Nothing may be fed once `stopped_by` is set.
        """
        if token in (self._think_open, self._think_close):
            if token == self._think_close and self.channel == "reasoning":
                self.channel = "answer"
                return self._rest_of_character()
            return ""
        if silent or token in self._silent or self._tokenizer.is_special(token):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        return text if self.channel == "reasoning" else self._stops.feed(text, may_stop)

    def finish(self) -> str:
        """What was still held back, now that no token follows. Stop strings no longer match."""
        if self.stopped_by is not None:
            return ""
        return self._stops.release() + self._rest_of_character()

    def _rest_of_character(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string to be completed, character by character, holding back what may become one.

    First completed wins; of several completed by the same character, the longest. So the outcome depends on the text
    alone and not on how it is cut into pieces. (One Knuth-Morris-Pratt automaton a string: constant cost a character.)
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> str:
        """Text that can no longer be part of a stop string; sets `found` when one is complete."""
        if not self._stops:
            return text
        for at, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None and may_stop:
                self.found = stop
                seen = self._held + text[: at + 1]
                return seen if self._include else seen[: -len(stop)]
        seen = self._held + text
        keep = len(seen) - max(self._matched)
        self._held = seen[keep:]
        return seen[:keep]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop string that it completes, if any."""
        completed = None
        for n, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[n]
            while matched and stop[matched] != character:
                matched = fallbacks[matched]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                completed = completed or stop
                matched = fallbacks[matched]
            self._matched[n] = matched
        return completed


def _fallbacks(stop: str) -> list[int]:
    """For each matched length 1..len: the longest proper prefix of stop that ends there too (index 0 is unused)."""
    table = [0, 0]
    for character in stop[1:]:
        length = table[-1]
        while length and stop[length] != character:
            length = table[length]
        table.append(length + 1 if stop[length] == character else 0)
    return table
