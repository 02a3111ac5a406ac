"""One step of the model: a chunk of one prompt, or a round of all replies that are being written.

A round is propose, verify, accept, commit. Each reply feeds its pending token and k >= 0 drafts; row r's logits give
the token that the reply would draw there anyway, so a draft is kept if it equals that token and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tfglm.engine.model import Model
from tfglm.engine.reply import Reply
from tfglm.errors import TfglmError
from tfglm.models.window import Rows

log = logging.getLogger(__name__)

Propose = Callable[[Reply, int], Sequence[int]]
"""Guesses at most so many of the tokens that follow a reply's pending token."""

LOGPROB_ROWS = 64
"""Prompt rows a chunk when the logits of all of them are wanted: 64 rows of 154,880 logits are 40 MB."""


def no_drafts(reply: Reply, limit: int) -> Sequence[int]:
    return ()


def read_chunk(model: Model, reply: Reply, prefill_rows: int) -> int:
    """Put the next part of a reply's prompt through the model; returns its rows."""
    request, stream = reply.request, reply.stream
    assert stream is not None
    every_row = request.prompt_logprobs is not None
    limit = min(prefill_rows, LOGPROB_ROWS) if every_row else prefill_rows
    tokens = request.prompt[reply.read : reply.read + limit]
    last = reply.read + len(tokens) == len(request.prompt)
    want = len(tokens) if every_row else int(last and request.max_tokens > 0)
    logits = model.forward([Rows(stream, tokens, want)]).numpy()
    with _alone(reply):
        reply.chunk_read(len(tokens), logits)
    reply.send_fresh()
    return len(tokens)


def decode(model: Model, replies: Sequence[Reply], propose: Propose) -> int:
    """Grow every reply by at least one token; returns the rows of the window.

    Raises whatever the model raises; a failure while one reply draws its tokens ends that reply alone.
    """
    window, proposals = [], []
    for reply in replies:
        assert reply.stream is not None
        limit = reply.room - 1
        drafts = list(propose(reply, limit))[:limit] if reply.request.draft and limit > 0 else []
        proposals.append(drafts)
        window.append(Rows(reply.stream, [reply.tokens[-1], *drafts], 1 + len(drafts)))
    logits = model.forward(window).numpy()
    start = 0
    for reply, rows, drafts in zip(replies, window, proposals, strict=True):
        own, start = logits[start : start + rows.want], start + rows.want
        with _alone(reply):
            accept(reply, own, drafts)
        if drafts:
            rows.stream.truncate(reply.cached)
        reply.send_fresh()
    return start


def accept(reply: Reply, logits: np.ndarray, drafts: Sequence[int]) -> None:
    """Draw from row after row for as long as the next row was fed the very token drawn.

    logits: float32 [1 + drafts, vocab]. Tokens after the one that ends the reply are never drawn.
    """
    reply.drafted += len(drafts)
    for row, draft in zip(logits, [*drafts, None], strict=True):
        token = reply.take(row)
        if reply.over or token != draft:
            return
        reply.accepted += 1


@contextmanager
def _alone(reply: Reply) -> Iterator[None]:
    """A failure inside ends this reply and no other."""
    try:
        yield
    except TfglmError as error:
        reply.fail(error.code, error.message)
    except Exception as error:
        log.exception("request %s failed", reply.request.id)
        reply.fail(TfglmError.code, f"the reply could not be continued: {type(error).__name__}: {error}")
