"""Token log-probabilities in the two shapes of the API: chat's list of entries and completions' parallel lists."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tfglm.engine.api import TokenLogprob

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer


LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; the value that vLLM sends."""


def token_text(raw: bytes) -> str:
    """A token as text. A part of a character is written `bytes:\\xNN`, as OpenAI does, so that names stay distinct."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """One element of `choices[0].logprobs.content`."""
    top = [_named(tokenizer, token, logprob) for token, logprob in entry.top]
    return {**_named(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}


class CompletionLogprobs:
    """The legacy shape, which can be taken in pieces: offsets count characters of the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._piece = _empty_piece()

    def add(self, tokens: Iterable[int], entries: Iterable[TokenLogprob | None]) -> None:
        piece = self._piece
        for token, entry in zip(tokens, entries, strict=True):
            raw = self._tokenizer.token_bytes(token)
            piece["tokens"].append(token_text(raw))
            piece["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(raw))
            piece["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            piece["top_logprobs"].append(None if entry is None else self._top(entry))

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call; None when nothing was."""
        piece, self._piece = self._piece, _empty_piece()
        return piece if piece["tokens"] else None

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(token_text(self._tokenizer.token_bytes(token)), _finite(logprob))
        return top


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _empty_piece() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}
