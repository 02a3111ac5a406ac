"""A window: rows of one or several streams that go through the model together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tfglm.cache.pages import PAGE, PagePool, Stream
from tfglm.checkpoint.config import ModelConfig
from tfglm.ops.base import Span, Window
from tfglm.ops.group import Fact, Message


@dataclass(frozen=True)
class Rows:
    """Tokens to append to a stream. want: how many of the last rows' logits to return.

    0 for a prompt chunk that is not the last, 1 for decoding, all of them for verifying drafts. prompt: they are a part
    of a prompt, which is computed as prompts are however few rows it has (see Glm53.decodes_alike).
    """

    stream: Stream
    tokens: Sequence[int]
    want: int
    prompt: bool = False


@dataclass(frozen=True)
class LaidOut:
    """tokens [R]; window: where they lie; wanted: the rows whose logits are asked for; prompt: whether they are a part
    of a prompt."""

    tokens: torch.Tensor
    window: Window
    wanted: torch.Tensor
    prompt: bool = False


@contextmanager
def appended(rows: Sequence[Rows], pool: PagePool, config: ModelConfig) -> Iterator[LaidOut]:
    """The rows laid out, their pages reserved; the streams grow by them when the block ends, and are as before if it
    raises. Raises ValueError for rows that cannot be read and MemoryShortError for a full cache."""
    check(rows, pool, config)
    reserve(rows, pool)
    try:
        yield lay_out(rows)
    except BaseException:
        for entry in rows:
            entry.stream.release_spare()
        raise
    for entry in rows:
        entry.stream.length += len(entry.tokens)


def check(rows: Sequence[Rows], pool: PagePool, config: ModelConfig) -> None:
    """Raise ValueError for rows that cannot go through the model, naming which and why."""
    if not rows:
        raise ValueError("an empty window: at least one stream's rows are needed")
    if len({id(entry.stream) for entry in rows}) != len(rows):
        raise ValueError("a stream appears twice in one window")
    if len({entry.prompt for entry in rows}) != 1:
        raise ValueError("a window holds parts of prompts or of replies, not both")
    for number, entry in enumerate(rows):
        stream, name = entry.stream, f"entry {number} of the window"
        if stream.closed or stream.pool is not pool:
            raise ValueError(f"{name}: its stream is {'closed' if stream.closed else 'of another model'}")
        if not len(entry.tokens):
            raise ValueError(f"{name} has no tokens")
        if not 0 <= entry.want <= len(entry.tokens):
            raise ValueError(f"{name} wants the logits of {entry.want} rows; it has {len(entry.tokens)}")
        low, high = min(entry.tokens), max(entry.tokens)
        if not 0 <= low <= high < config.vocab_size:
            raise ValueError(f"{name} has token ids {low} to {high}; the vocabulary is 0 to {config.vocab_size - 1}")
        length = stream.length + len(entry.tokens)
        if length > config.max_position_embeddings:
            raise ValueError(f"{name} would be {length} tokens long; the model reads {config.max_position_embeddings}")


def reserve(rows: Sequence[Rows], pool: PagePool) -> None:
    """Give every stream the pages its new rows need, or raise MemoryShortError and give none."""
    missing = [entry.stream.missing_pages(entry.stream.length + len(entry.tokens)) for entry in rows]
    pages = pool.take(sum(missing))
    for entry, count in zip(rows, missing, strict=True):
        entry.stream.pages += pages[:count]
        del pages[:count]


def lay_out(rows: Sequence[Rows]) -> LaidOut:
    """The rows of every entry one after the other, and where each lies. Their pages have been reserved."""
    spans: list[Span] = []
    wanted: list[torch.Tensor] = []
    for entry in rows:
        start = spans[-1].stop if spans else 0
        span = Span(start, start + len(entry.tokens), entry.stream.length)
        spans.append(span)
        wanted.append(torch.arange(span.stop - entry.want, span.stop))
    pages = torch.zeros(len(rows), max(len(entry.stream.pages) for entry in rows), dtype=torch.int64)
    for stream, entry in enumerate(rows):
        # By way of numpy: torch reads a list of 2,000 pages eight times as slowly, at every forward.
        pages[stream, : len(entry.stream.pages)] = torch.from_numpy(np.array(entry.stream.pages, np.int64))
    page_tokens = rows[0].stream.pool.page_tokens
    ranks = page_tokens // PAGE
    positions = torch.cat([torch.arange(s.position, s.position + s.stop - s.start) for s in spans])
    stream_of = torch.repeat_interleave(torch.tensor([s.stop - s.start for s in spans]))
    return LaidOut(
        tokens=torch.cat([torch.tensor(entry.tokens, dtype=torch.int64) for entry in rows]),
        window=Window(
            positions=positions,
            slots=pages[stream_of, positions // page_tokens] * PAGE + positions % page_tokens // ranks,
            pages=pages,
            stream_of=stream_of,
            spans=tuple(spans),
        ),
        wanted=torch.cat(wanted),
        prompt=any(entry.prompt for entry in rows),
    )


def to_message(kind: str, rows: LaidOut, facts: Mapping[str, Fact]) -> Message:
    """A window, laid out on the CPU, for the other ranks; `from_message` gives it back."""
    window = rows.window
    spans = [number for span in window.spans for number in (span.start, span.stop, span.position)]
    arrays = {
        "tokens": rows.tokens,
        "positions": window.positions,
        "slots": window.slots,
        "pages": window.pages,
        "stream_of": window.stream_of,
        "wanted": rows.wanted,
    }
    return Message(kind, {**facts, "spans": spans, "prompt": int(rows.prompt)}, arrays)


def from_message(message: Message) -> LaidOut:
    given, numbers = message.arrays, message.facts["spans"]
    assert isinstance(numbers, Sequence)
    spans = tuple(Span(*(int(n) for n in numbers[i : i + 3])) for i in range(0, len(numbers), 3))
    window = Window(given["positions"], given["slots"], given["pages"], given["stream_of"], spans)
    return LaidOut(given["tokens"], window, given["wanted"], bool(message.facts["prompt"]))
