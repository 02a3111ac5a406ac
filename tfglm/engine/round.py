"""One step of the model: a chunk of one prompt, or a round of all replies that are being written.

A round is propose, verify, accept, commit. Each reply feeds its pending token and k >= 0 drafts; row r's logits give
the token that the reply would draw there anyway, so a draft is kept if it equals that token and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tfglm.engine.drafting import Drafting, Drawn
from tfglm.engine.model import Model, run
from tfglm.engine.reply import Reply
from tfglm.engine.states import PromptStates
from tfglm.errors import TfglmError
from tfglm.models.taps import Passed
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
    passed = run(model, [Rows(stream, tokens, want, prompt=True)], drafting.taps, [reply.draw(0)] * want)
    with _alone(reply):
        reply.chunk_read(len(tokens), passed.logits.numpy(), passed.tokens)
    drafting.read(reply, tokens, passed)
    reply.send_fresh()
    return len(tokens)


def decode(model: Model, replies: Sequence[Reply], drafting: Drafting) -> int:
    """Grow every reply by at least one token; returns the rows of the window.

    Raises whatever the model raises; a failure while one reply draws its tokens ends that reply alone.
    """
    proposals = drafting.propose(replies)
    window, draws = [], []
    for reply, drafts in zip(replies, proposals, strict=True):
        assert reply.stream is not None
        window.append(Rows(reply.stream, [reply.tokens[-1], *drafts], 1 + len(drafts)))
        draws += [reply.draw(ahead) for ahead in range(1 + len(drafts))]
    passed = run(model, window, drafting.taps, draws)
    drawn, start = [], 0
    for reply, rows, drafts in zip(replies, window, proposals, strict=True):
        before = len(reply.tokens)
        with _alone(reply):
            accept(reply, partial(_token, reply, passed, start), drafts)
        if drafts:
            rows.stream.truncate(reply.cached)
        drawn.append(Drawn(reply, reply.tokens[before:], start))
        start += rows.want
        reply.send_fresh()
    drafting.settle(drawn, passed, start)
    return start


def accept(reply: Reply, token_after: Callable[[int], int], drafts: Sequence[int]) -> None:
    """Give the reply token after token for as long as the next row was fed the very token that it got.

    token_after: draws from a row, 0 to drafts, and makes the token part of the reply. After the one that ends the reply
    none is.
    """
    reply.drafted += len(drafts)
    for row, draft in enumerate([*drafts, None]):
        token = token_after(row)
        if reply.over or token != draft:
            return
        reply.accepted += 1


def _token(reply: Reply, passed: Passed, start: int, row: int) -> int:
    """The reply's next token, after row `row` of its rows, which begin at `start`."""
    drawn = passed.tokens[start + row] if passed.tokens else None
    return reply.take(passed.logits[start + row].numpy()) if drawn is None else reply.taken(drawn)


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
