"""One step of the model: a chunk of one prompt, or a round of all replies that are being written.

A round is propose, verify, accept, commit. Each reply feeds its pending token and k >= 0 drafts; row r's logits give
the token that the reply would draw there anyway, so a draft is kept if it equals that token and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tfglm.engine.drafting import Drafting, Drawn
from tfglm.engine.model import Model, run
from tfglm.engine.reply import Reply
from tfglm.engine.states import PromptStates
from tfglm.errors import TfglmError
from tfglm.models.window import Rows

log = logging.getLogger(__name__)

LOGPROB_ROWS = 64
"""Prompt rows a chunk when the logits of all of them are wanted: 64 rows of 154,880 logits are 40 MB."""


def resume(reply: Reply, states: PromptStates, drafting: Drafting) -> bool:
    """Take the next part of a reply's prompt from the disk, if it has one; False if it is to be read. A disk that
    takes its time leaves the turn to others."""
    count = states.restore(reply)
    if count is None:
        return True
    if count:
        start = reply.read
        reply.restored(count)
        drafting.skip(reply, reply.request.prompt[start : reply.read])
    return count > 0


def read_chunk(model: Model, reply: Reply, prefill_rows: int, drafting: Drafting) -> int:
    """Put the next part of a reply's prompt through the model; returns its rows."""
    request, stream = reply.request, reply.stream
    assert stream is not None
    every_row = request.prompt_logprobs is not None
    limit = min(prefill_rows, LOGPROB_ROWS) if every_row else prefill_rows
    tokens = request.prompt[reply.read : reply.read + limit]
    last = reply.read + len(tokens) == len(request.prompt)
    want = len(tokens) if every_row else int(last and request.max_tokens > 0)
    passed = run(model, [Rows(stream, tokens, want, prompt=True)], drafting.taps)
    with _alone(reply):
        reply.chunk_read(len(tokens), passed.logits.numpy())
    drafting.read(reply, tokens, passed)
    reply.send_fresh()
    return len(tokens)


def decode(model: Model, replies: Sequence[Reply], drafting: Drafting) -> int:
    """Grow every reply by at least one token; returns the rows of the window.

    Raises whatever the model raises; a failure while one reply draws its tokens ends that reply alone.
    """
    proposals = drafting.propose(replies)
    window = []
    for reply, drafts in zip(replies, proposals, strict=True):
        assert reply.stream is not None
        window.append(Rows(reply.stream, [reply.tokens[-1], *drafts], 1 + len(drafts)))
    passed = run(model, window, drafting.taps)
    logits = passed.logits.numpy()
    drawn, start = [], 0
    for reply, rows, drafts in zip(replies, window, proposals, strict=True):
        before = len(reply.tokens)
        with _alone(reply):
            accept(reply, logits[start : start + rows.want], drafts)
        if drafts:
            rows.stream.truncate(reply.cached)
        drawn.append(Drawn(reply, reply.tokens[before:], start))
        start += rows.want
        reply.send_fresh()
    drafting.settle(drawn, passed, start)
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
