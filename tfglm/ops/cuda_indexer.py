"""Launches of kernels/indexer.cu: which cached tokens each row of a window attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tfglm.cache.pages import PAGE
from tfglm.formats.latent import KvFormat
from tfglm.ops import driver, order
from tfglm.ops.base import Selection, Window
from tfglm.ops.cuda_launch import chained

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Uninitialised memory on the device."""

_ROWS = 8  # of the window, a block of index_scores, at most
_CANDIDATES = 16384  # a block of select_*
_SCORE_BYTES = 64 << 20
"""Prompts are scored and ranked in pieces of rows whose scores take about this much memory."""

_LEAST_BLOCKS = 128  # of index_scores: about one for every multiprocessor
_BLOCKS = 1024  # of index_scores, about: few enough to use the queries they stage more than once


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a window."""

    queries: torch.Tensor
    head_weights: torch.Tensor
    positions: torch.Tensor
    stream_of: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor

    def __len__(self) -> int:
        return self.queries.shape[0]

    def part(self, start: int, stop: int) -> _Rows:
        return _Rows(*(tensor[start:stop] for tensor in vars(self).values()))


def select(
    queries: torch.Tensor, head_weights: torch.Tensor, window: Window, plane: torch.Tensor, kv: KvFormat,
    count: int, context: int, empty: Empty,
) -> Selection:  # fmt: skip
    """The `count` best tokens of each row: slots int32 [R, count], valid up to counts int32 [R].

    queries [R, heads, width] bfloat16, rotated; head_weights [R, heads] bfloat16; rows may be strided. plane: the
    layer's index keys. context: at least the tokens visible to any row; a graph serves every window up to its own.
    count: a multiple of 4, at most 4096.
    """
    rows, heads, width = queries.shape
    selection = Selection(empty((rows, count), torch.int32), empty((rows,), torch.int32))
    module = driver.load("indexer", {"HEADS": str(heads), "WIDTH": str(width), "KEYS": str(int(kv is KvFormat.FP4X))})
    whole = _Rows(queries, head_weights, window.positions, window.stream_of, selection.slots, selection.counts)
    if context <= count:
        _rank(module, whole, window.pages, [1], count, None, [])
        return selection
    stride = -(-context // PAGE) * PAGE
    piece = min(rows, max(_ROWS, _SCORE_BYTES // (4 * stride) // _ROWS * _ROWS))
    scores = empty((piece, stride), torch.float32)
    parts = _parts(context, count)
    levels = [(empty((piece, n * count), torch.int32), empty((piece, n * count), torch.int32)) for n in parts[:-1]]
    for start in range(0, rows, piece):
        part = whole.part(start, min(start + piece, rows))
        _score(module, part, window.pages, plane, scores, count)
        _rank(module, part, window.pages, parts, count, scores, levels)
    return selection


def best_keys(
    queries: torch.Tensor, head_weights: torch.Tensor, window: Window, visible: torch.Tensor, plane: torch.Tensor,
    kv: KvFormat, count: int, first: int, step: int, context: int, empty: Empty,
) -> torch.Tensor:  # fmt: skip
    """`Ops.best_keys`: int64 [R, count]. Scores come from the kernel that `select` uses; they are ranked by torch's own
    top-k over keys, of which no two are alike. context: at least as many tokens as any row sees on all ranks."""
    rows, heads, width = queries.shape
    module = driver.load("indexer", {"HEADS": str(heads), "WIDTH": str(width), "KEYS": str(int(kv is KvFormat.FP4X))})
    stride = (-(-context // (step * PAGE)) + 1) * PAGE
    piece = min(rows, max(_ROWS, _SCORE_BYTES // (4 * stride) // _ROWS * _ROWS))
    scores, best = empty((piece, stride), torch.float32), empty((rows, count), torch.int64)
    best.fill_(order.NO_KEY)
    columns = torch.arange(stride, device=plane.device)
    none = empty((rows,), torch.int32)
    whole = _Rows(queries, head_weights, visible - 1, window.stream_of, none, none)
    for start in range(0, rows, piece):
        stop = min(start + piece, rows)
        _score(module, whole.part(start, stop), window.pages, plane, scores, 0)
        keys = order.keys(scores[: stop - start], columns * step + first)
        keys.masked_fill_(columns >= visible[start:stop, None], order.NO_KEY)
        most = min(count, stride)
        best[start:stop, :most] = keys.topk(most, dim=1).values
    return best


def _parts(context: int, count: int) -> list[int]:
    """Blocks a row at each level of the selection, down to one."""
    parts = [-(-context // _CANDIDATES)]
    while parts[-1] > 1:
        parts.append(-(-parts[-1] * count // _CANDIDATES))
    return parts


def _score(
    module: driver.Module, rows: _Rows, pages: torch.Tensor, plane: torch.Tensor, scores: torch.Tensor, count: int
) -> None:
    _, heads, width = rows.queries.shape
    # Short contexts have too few pages for every multiprocessor: rows then go to blocks of their own.
    block_rows = max(1, min(_ROWS, len(rows), len(rows) * scores.shape[1] // PAGE // _LEAST_BLOCKS))
    tiles = -(-len(rows) // block_rows)
    grid = (min(scores.shape[1] // PAGE, max(1, _BLOCKS // tiles)), tiles)
    query_bytes = heads * -(-width // 64) * 128
    arguments = (
        rows.queries, rows.queries.stride(0), rows.head_weights, rows.head_weights.stride(0), rows.positions,
        rows.stream_of, pages, pages.shape[1], plane, scores, scores.shape[1], len(rows), block_rows, count,
    )  # fmt: skip
    chained(module.kernel("index_scores"))(grid, 256, arguments, shared=block_rows * query_bytes)


def _rank(
    module: driver.Module, rows: _Rows, pages: torch.Tensor, parts: list[int], count: int,
    scores: torch.Tensor | None, levels: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:  # fmt: skip
    for level, blocks in enumerate(parts):
        first, last = level == 0, level == len(parts) - 1
        name = (
            "select_only" if first and last else "select_first" if first else "select_last" if last else "select_middle"
        )
        below = (None, None, 0) if first else (*levels[level - 1], parts[level - 1])
        above = (None, None) if last else levels[level]
        stride = 0 if scores is None else scores.shape[1]
        arguments = (
            scores, stride, *below, *above, rows.positions, rows.stream_of, pages, pages.shape[1], rows.slots,
            rows.counts, count,
        )  # fmt: skip
        chained(module.kernel(name))((blocks, len(rows)), 1024, arguments)
