"""The operations in plain torch, float32 on a CPU: what is right. Other devices are tested against this."""

from __future__ import annotations

import torch

from tfglm.checkpoint.config import INDEXER_LAYER_NORM_EPS, ModelConfig
from tfglm.formats.latent import KvFormat, pack_index, pack_rows, unpack_index, unpack_rows
from tfglm.ops import exl3_reference, order
from tfglm.ops.base import Experts, Part, PlainExperts, Rope, Routing, Selection, Window
from tfglm.ops.exl3_weights import Exl3Experts, StackedWeight, Weight
from tfglm.ops.rows import MIN_COLUMNS, TILE, Rows

_PIECE_ELEMENTS = 1 << 22
"""Rows are attended and scored in pieces whose gathered cache rows or scores have about this many elements."""


class ReferenceOps:
    """`ops.base.Ops` on a CPU. Weights of any float dtype are widened where they are used. kv: the format of cache rows
    that are bytes, None where caches hold numbers."""

    def __init__(self, rows: Rows | None = None, kv: KvFormat | None = None) -> None:
        self.rows = rows or Rows()
        self.kv = kv

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return table[tokens].float()

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor) -> Rope:
        angles = positions.float()[:, None] * frequencies
        return Rope(self.rows.each(torch.cos, angles), self.rows.each(torch.sin, angles))

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
        cos, sin = rope.cos.view(shape), rope.sin.view(shape)
        rotary = 2 * cos.shape[-1]
        even, odd = x[..., 0:rotary:2], x[..., 1:rotary:2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin, x[..., rotary:]], dim=-1)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return self.rows.linear(x, weight)
        if isinstance(weight, StackedWeight):
            return torch.cat([self.linear(x, part) for part in weight.parts], dim=1)
        return exl3_reference.linear(self.rows, x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + branch
        return x, self.rms_norm(x, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.rows.silu(gate) * up

    def split_latents(
        self, a: torch.Tensor, q_norm: torch.Tensor, latent_norm: torch.Tensor, eps: float, rope: Rope, window: Window,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        width = q_norm.shape[0]
        self.write_latent(a[:, width:], latent_norm, eps, rope, window, latent_plane, rope_plane)
        return self.rms_norm(a[:, :width], q_norm, eps)

    def write_latent(
        self, row: torch.Tensor, norm: torch.Tensor, eps: float, rope: Rope, window: Window,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor,
    ) -> None:  # fmt: skip
        """Cache row [R, C + D]: its first C values normalised by norm [C], the rest rotated."""
        width = norm.shape[0]
        latent, rotary = self.rms_norm(row[:, :width], norm, eps), self.rotate(row[:, width:], rope)
        if self.kv is not None:
            packed = pack_rows(self.kv, latent.bfloat16().float().numpy(), rotary.bfloat16().float().numpy())
            latent, rotary = (torch.from_numpy(part) for part in packed)
        _write(latent_plane, window.slots, latent)
        _write(rope_plane, window.slots, rotary)

    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        key = self.rotate(self.rows.layer_norm(key, norm, bias, INDEXER_LAYER_NORM_EPS), rope)
        if self.kv is not None:
            key = torch.from_numpy(pack_index(self.kv, key.bfloat16().float().numpy()))
        _write(plane, window.slots, key)

    def select(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, plane: torch.Tensor, count: int
    ) -> Selection:
        page = plane.shape[1]
        counts = (window.positions + 1).clamp(max=count)
        columns = torch.arange(int(counts.max()))
        listed = torch.where(columns < counts[:, None], columns, 0)  # right for every row that has no more than `count`
        for stream, span in enumerate(window.spans):
            length = span.position + span.stop - span.start
            pages = window.pages[stream, : -(-length // page)]
            piece = max(1, _PIECE_ELEMENTS // length)
            for start in range(span.start + max(0, count - span.position), span.stop, piece):
                part = slice(start, min(start + piece, span.stop))
                scores = self.index_scores(queries[part], head_weights[part], plane, pages)
                future = torch.arange(scores.shape[1]) > window.positions[part, None]
                chosen = order.best(scores.masked_fill_(future, float("-inf")), count)
                listed[part] = chosen.sort(dim=1).values
        slots = window.pages[window.stream_of[:, None], listed // page] * page + listed % page
        return Selection(slots, counts)

    def index_scores(
        self, queries: torch.Tensor, head_weights: torch.Tensor, plane: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Scores [R, len(pages) * PAGE] of the rows of one stream; one page of keys is one tile of the product."""
        rows, heads, width = queries.shape
        weights = (head_weights * heads**-0.5)[:, None]
        tiles = []
        for page in pages.tolist():
            held = plane[page] if self.kv is None else torch.from_numpy(unpack_index(self.kv, plane[page].numpy()))
            keys = held.float().t().expand(rows, -1, -1)
            similarity = torch.relu(self.rows.batched(queries, keys) * width**-0.5)
            tiles.append(self.rows.batched(weights, similarity)[:, 0])
        return torch.cat(tiles, dim=1)

    def best_keys(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, visible: torch.Tensor,
        plane: torch.Tensor, count: int, first: int, step: int,
    ) -> torch.Tensor:  # fmt: skip
        best = torch.full((queries.shape[0], count), order.NO_KEY)
        for stream, span in enumerate(window.spans):
            length = int(visible[span.start : span.stop].max())
            pages = window.pages[stream, : -(-length // plane.shape[1])]
            piece = max(1, _PIECE_ELEMENTS // max(1, length))
            for start in range(span.start, span.stop if length else span.start, piece):
                part = slice(start, min(start + piece, span.stop))
                scores = self.index_scores(queries[part], head_weights[part], plane, pages)
                columns = torch.arange(scores.shape[1])
                keys = order.keys(scores, columns * step + first)
                keys.masked_fill_(columns >= visible[part, None], order.NO_KEY)
                chosen = keys.topk(min(count, keys.shape[1]), dim=1).values
                best[part, : chosen.shape[1]] = chosen
        return best

    def absorb(self, queries: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
        return self.rows.grouped(queries, key_up.transpose(1, 2))

    def attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> torch.Tensor:  # fmt: skip
        return self._attended(latent_queries, rope_queries, selection, scale, latent_plane, rope_plane, rope).out

    def attend_part(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> Part:  # fmt: skip
        part = self._attended(latent_queries, rope_queries, selection, scale, latent_plane, rope_plane, rope)
        empty = selection.counts == 0
        part.out[empty], part.total[empty], part.peak[empty] = 0, 0, float("-inf")
        return part

    def _attended(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> Part:  # fmt: skip
        """A row's list is padded to a width that depends on its length alone; rows of one width go together."""
        rope_queries = self.rotate(rope_queries, rope)
        latents, ropes = latent_plane.flatten(0, 1), rope_plane.flatten(0, 1)
        by_width: dict[int, list[int]] = {}
        for row, count in enumerate(selection.counts.tolist()):
            by_width.setdefault(list_width(count), []).append(row)
        out = torch.empty_like(latent_queries)
        peak, total = out.new_empty(out.shape[:2]), out.new_empty(out.shape[:2])
        for width, members in by_width.items():
            piece = max(2, _PIECE_ELEMENTS // (width * latents.shape[1]))
            for rows in torch.tensor(members).split(piece):
                slots = _padded(selection.slots[rows], width)
                latent, turned = self._cached(latents[slots], ropes[slots], out.shape[2])
                scores = self.rows.batched(latent_queries[rows], latent.transpose(1, 2))
                scores += self.rows.batched(rope_queries[rows], turned.transpose(1, 2))
                absent = torch.arange(width) >= selection.counts[rows, None]
                scores = (scores * scale).masked_fill_(absent[:, None], float("-inf"))
                shares = self.rows.softmax(scores)
                out[rows] = self.rows.batched(shares, latent)
                # The largest share is exp(0) over the sum of all.
                peak[rows], total[rows] = scores.amax(dim=2), 1 / shares.amax(dim=2)
        return Part(out, peak, total)

    def _cached(self, latent: torch.Tensor, rotary: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows [R, L, ..] as numbers: latents [R, L, width] and rotated keys [R, L, D]."""
        if self.kv is None:
            return latent.float(), rotary.float()
        rows = latent.shape[:2]
        unpacked = unpack_rows(self.kv, latent.flatten(0, 1).numpy(), rotary.flatten(0, 1).numpy(), width)
        first, second = (torch.from_numpy(part).unflatten(0, rows) for part in unpacked)
        return first, second

    def expand(self, attended: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
        return self.rows.grouped(attended, value_up).flatten(1)

    def route(self, x: torch.Tensor, gate: torch.Tensor, correction: torch.Tensor, config: ModelConfig) -> Routing:
        scores = self.rows.sigmoid(self.rows.linear(x, gate))
        choice = scores + correction
        if config.n_group > 1:
            groups = choice.unflatten(1, (config.n_group, -1))
            two_best = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
            kept = torch.zeros_like(two_best, dtype=torch.bool)
            kept.scatter_(1, order.best(two_best, config.topk_group), True)
            choice = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        experts = order.best(choice, config.num_experts_per_tok)
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / (_ordered_sum(weights)[:, None] + 1e-20)
        return Routing(experts, weights * config.routed_scaling_factor)

    def experts(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(experts, Exl3Experts):
            outputs = exl3_reference.experts(self.rows, x, routing, experts)
        elif x.shape[0] <= TILE and not self.rows.alone:
            outputs = self._few_rows(x, routing, experts)
        else:
            outputs = self._many_rows(x, routing, experts)
        total = _ordered_sum(outputs * routing.weights[:, :, None])
        return total if shared is None else total + shared

    def _few_rows(self, x: torch.Tensor, routing: Routing, experts: PlainExperts) -> torch.Tensor:
        """Every row through every expert that any row chose, [R, k, hidden]: a tile costs the same full or not."""
        chosen, place = routing.experts.unique(return_inverse=True)
        piece = max(1, _PIECE_ELEMENTS // experts.gate_up[0].numel())
        outputs = []
        for part in chosen.split(piece):
            hidden = self.rows.grouped(x[:, None].expand(-1, len(part), -1), experts.gate_up.index_select(0, part))
            outputs.append(self.rows.grouped(self.swiglu(hidden), experts.down.index_select(0, part)))
        return torch.cat(outputs, dim=1)[torch.arange(x.shape[0])[:, None], place]

    def _many_rows(self, x: torch.Tensor, routing: Routing, experts: PlainExperts) -> torch.Tensor:
        """Each expert over the rows that chose it: [R, k, hidden]."""
        picks = routing.experts.shape[1]
        by_expert = routing.experts.flatten().argsort(stable=True)  # (row, pick) pairs as row * picks + pick
        counts = routing.experts.flatten().bincount(minlength=experts.gate_up.shape[0])
        outputs = x.new_empty(x.shape[0] * picks, x.shape[1])
        for expert, pairs in enumerate(by_expert.split(counts.tolist())):
            if len(pairs):
                hidden = self.swiglu(self.linear(x[pairs // picks], experts.gate_up[expert]))
                outputs[pairs] = self.linear(hidden, experts.down[expert])
        return outputs.unflatten(0, (-1, picks))


def list_width(count: int) -> int:
    """The width to which a list of `count` tokens is padded: a power of two, so that there are few."""
    return max(MIN_COLUMNS, 1 << (count - 1).bit_length())


def _ordered_sum(picks: torch.Tensor) -> torch.Tensor:
    """The sum over the second dimension of picks [R, k, ...], first to last: torch.sum promises no order."""
    total = picks[:, 0]
    for pick in range(1, picks.shape[1]):
        total = total + picks[:, pick]
    return total


def _padded(slots: torch.Tensor, width: int) -> torch.Tensor:
    """slots [R, L] cut or extended to [R, width]; what is added repeats the first slot."""
    missing = width - slots.shape[1]
    return slots[:, :width] if missing <= 0 else torch.cat([slots, slots[:, :1].expand(-1, missing)], dim=1)


def _write(plane: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    plane.flatten(0, 1)[slots] = values.to(plane.dtype)
