"""Context parallelism: every rank caches every n-th token, so that n ranks hold n times the window.

Position p is cached by rank p mod n, as its token p div n of that stream. Every rank scores the index keys that it has
and offers its best as packed (score, position) keys; the best of all are what one rank would have chosen, because keys
are in one total order.

A window of replies attends where the rows lie: all ranks get all heads' queries, attend to what they have of each row's
choice, and the owner of a head adds the parts in rank order by their log-sum-exp. A prompt's window would send more
queries than there are rows, so that the rows travel instead, layer by layer, and each rank attends for its own heads.
The two agree to rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import GATHERED_PAGES, PAGE, PagePool
from tfglm.checkpoint.config import ModelConfig
from tfglm.layout import Family, Layout
from tfglm.models.window import LaidOut
from tfglm.ops import order
from tfglm.ops.base import Ops, Part, Rope, Selection, Window
from tfglm.ops.group import Group


@dataclass(frozen=True)
class Dealt:
    """How caches are dealt out. heads: of each rank. spare: a slot that nobody reads, for rows that others cache."""

    group: Group
    heads: tuple[int, ...]
    spare: int

    def window(self, rows: LaidOut) -> DealtWindow:
        return DealtWindow(self, rows)


class DealtWindow:
    """One window as one rank sees it. rows: the window with this rank's slots."""

    def __init__(self, dealt: Dealt, rows: LaidOut) -> None:
        group, window = dealt.group, rows.window
        self._dealt, self._rank, self._ranks = dealt, group.rank, group.ranks
        self._prompt = rows.prompt
        self._own = window.positions % group.ranks == group.rank
        slots = torch.where(self._own, window.slots, dealt.spare)
        self._visible = torch.div(window.positions + group.ranks - group.rank, group.ranks, rounding_mode="floor")
        self.rows = replace(rows, window=replace(window, slots=slots))
        self._lengths = [span.position + span.stop - span.start for span in window.spans]

    @property
    def window(self) -> Window:
        return self.rows.window

    def select(
        self, ops: Ops, queries: torch.Tensor, head_weights: torch.Tensor, plane: torch.Tensor, count: int
    ) -> Selection:
        """`Ops.select` over the index keys of all ranks: of a prompt whole lists, of replies this rank's parts."""
        offered = ops.best_keys(
            queries, head_weights, self.window, self._visible, plane, count, self._rank, self._ranks
        )
        keys = self._dealt.group.gather(offered).transpose(0, 1).flatten(1)  # [R, ranks * count]
        best = keys.topk(min(count, keys.shape[1]), dim=1).values
        if self._prompt:
            return self._whole(order.indices_of(best), best != order.NO_KEY)
        kept = (offered != order.NO_KEY) & (offered >= best[:, -1:])
        return self._part(order.indices_of(offered), kept)

    def _whole(self, positions: torch.Tensor, valid: torch.Tensor) -> Selection:
        """Lists of positions, ascending, as slots of the planes that `_gathered` makes."""
        counts = valid.sum(dim=1)
        positions = _ascending(positions, valid)
        starts = torch.tensor([0, *self._lengths[:-1]], device=positions.device).cumsum(0)
        return Selection(positions + starts[self.window.stream_of, None], counts)

    def _part(self, positions: torch.Tensor, kept: torch.Tensor) -> Selection:
        """Lists of those positions that this rank caches, ascending, as its slots."""
        counts = kept.sum(dim=1)
        local = torch.div(_ascending(positions, kept), self._ranks, rounding_mode="floor")
        local = torch.where(counts[:, None] > 0, local, 0)
        window = self.window
        return Selection(window.pages[window.stream_of[:, None], local // PAGE] * PAGE + local % PAGE, counts)

    def extended(self, selection: Selection) -> Selection:
        """Each row's list with the row itself at its end, on the rank that caches it."""
        longer = torch.cat([selection.slots, selection.slots[:, -1:]], dim=1)
        own = torch.where(self._own, self.window.slots, longer.gather(1, selection.counts[:, None])[:, 0])
        return Selection(longer.scatter(1, selection.counts[:, None], own[:, None]), selection.counts + self._own)

    def attend(
        self, ops: Ops, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        planes: LayerPlanes, rope: Rope,
    ) -> torch.Tensor:  # fmt: skip
        """`Ops.attend` of this rank's heads over the caches of all ranks."""
        if self._prompt:
            latent, rotary = self._gathered(planes.latent), self._gathered(planes.rope)
            if not latent_queries.shape[1]:
                return latent_queries
            return ops.attend(latent_queries, rope_queries, selection, scale, latent, rotary, rope)
        own, width = latent_queries.shape[1:]
        queries = self._all_heads(torch.cat([latent_queries, rope_queries], dim=2))
        latent_queries, rope_queries = queries[:, :, :width], queries[:, :, width:]
        part = ops.attend_part(latent_queries, rope_queries, selection, scale, planes.latent, planes.rope, rope)
        return self._merged(part)[:, :own].to(queries.dtype)

    def _all_heads(self, queries: torch.Tensor) -> torch.Tensor:
        """[R, own heads, width] of every rank side by side, each rank's padded to the most that one has."""
        most = max(self._dealt.heads)
        padded = torch.constant_pad_nd(queries, (0, 0, 0, most - queries.shape[1])).contiguous()
        return self._dealt.group.gather(padded).transpose(0, 1).flatten(1, 2)

    def _merged(self, part: Part) -> torch.Tensor:
        """Of this rank's heads, every rank's part, added in rank order: float32 [R, heads padded, C]."""
        width = part.out.shape[2]
        packed = torch.cat([part.out, part.peak[:, :, None], part.total[:, :, None]], dim=2)
        packed = packed.unflatten(1, (self._ranks, -1)).transpose(0, 1)  # [owner, R, heads, C + 2]
        parts = self._dealt.group.gather(packed.contiguous())[:, self._rank]  # [ranks, R, heads, C + 2]
        peaks = parts[..., width]
        weights = torch.exp(peaks - peaks.max(dim=0).values) * parts[..., width + 1]
        total, out = weights[0], weights[0][..., None] * parts[0, ..., :width]
        for rank in range(1, self._ranks):
            total = total + weights[rank]
            out = out + weights[rank][..., None] * parts[rank, ..., :width]
        return out / total[..., None]

    def _gathered(self, plane: torch.Tensor) -> torch.Tensor:
        """The rows of all streams of the window from all ranks, by position, one stream after the other: [1, rows,
        width]. Some pages at a time, so that of a long stream nothing but the result is held whole."""
        rows = plane.new_empty(sum(self._lengths), plane.shape[2])
        start = 0
        for stream, length in enumerate(self._lengths):
            of_stream, start = rows[start : start + length], start + length
            local = -(-length // self._ranks)
            pages = self.window.pages[stream, : -(-local // PAGE)]
            for some in range(0, len(pages), GATHERED_PAGES):
                first = some * PAGE
                held = plane[pages[some : some + GATHERED_PAGES]].flatten(0, 1)[: local - first].contiguous()
                place = of_stream[first * self._ranks :][: len(held) * self._ranks]
                place.copy_(self._dealt.group.gather(held).transpose(0, 1).flatten(0, 1)[: len(place)])
        return rows[None]


def _ascending(positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The valid positions of each row, ascending, then copies of its first one."""
    beyond = torch.iinfo(positions.dtype).max
    ordered = positions.masked_fill(~valid, beyond).sort(dim=1).values
    return torch.where(ordered == beyond, ordered[:, :1], ordered)


def dealt_out(config: ModelConfig, group: Group, pool: PagePool) -> Dealt:
    """How a model's caches lie on the ranks; the spare slot is on the page after the pool's."""
    layout = Layout.of(config, group.ranks)
    shares = (layout.share(Family.HEADS, 0, rank) for rank in range(group.ranks))
    return Dealt(group, tuple(stop - start for start, stop in shares), pool.pages * PAGE)
