"""The forward pass that DSpark and DFlash2 share: a block of masks filled in one go, from the target's own streams.

Papers: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147). For every committed row the target's tapped streams become
one row c = norm(fc(streams)), from which every layer takes keys and values; a block of the pending token and masks
attends to them and to itself.

Over ranks each has some of the key-value heads with their queries, and columns of the MLP; what depends on no column
but its own is on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tfglm.cache.pages import PAGE
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import HOST_TABLES, held_heads, held_part, page_rows
from tfglm.models.split import Vocabulary
from tfglm.ops.base import Ops
from tfglm.ops.group import Alone
from tfglm.ops.steps import Exchange, Steps

Tensors = dict[str, torch.Tensor]
Convolution = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class BlockContext:
    """Keys and values of the last `window` committed rows of a stream, as rings [layers, window, kv heads, head_dim];
    length: committed rows; first: the oldest that is known. number: the stream's, on all ranks."""

    number: int
    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0
    first: int = 0


class BlockModel:
    """Backbone of a block drafter over the target's embedding, on the embedding's device. dtype: of the rings.
    vocabulary: how embedding and head are spread over ranks, None for one rank. tensors: whole, whatever the rank.
    hold: makes of a matrix what the operations multiply by; without it they take it as stored."""

    def __init__(
        self,
        config: BlockConfig,
        tensors: Tensors,
        embed: torch.Tensor,
        ops: Ops,
        dtype: torch.dtype,
        vocabulary: Vocabulary | None = None,
        hold: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.config = config
        given = vocabulary or Vocabulary(Alone(), ((0, embed.shape[0]),))
        self.steps = Steps(given.group, config.kind, embed.device)
        self.vocabulary = replace(given, group=self.steps)
        self._device = embed.device
        self._hold = hold
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.tensors = {name: self._placed(name, tensor) for name, tensor in tensors.items()}
        self._embed = embed
        self._ops = ops
        self._dtype = dtype
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=self._device) / config.head_dim
        self._frequencies = 1.0 / config.rope_theta**half
        self._pages: dict[int, torch.Tensor] = {}

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, where it is multiplied. Rank 0 chooses drafts and alone needs the tables for it."""
        group = self.vocabulary.group
        if name.startswith(HOST_TABLES):
            return tensor if group.rank == 0 else torch.empty(0)
        if tensor.dim() == 1:
            return tensor.to(self._device, torch.float32)
        part = tensor[held_part(self.config, name, tensor.shape, group.ranks, group.rank)]
        self._shapes[name] = tuple(part.shape)
        if part.shape != tensor.shape:
            part = part.clone()
        return self._hold(part) if self._hold and part.dim() == 2 else part.to(self._device)

    def _rows_shape(self, rows: int) -> tuple[int, ...]:
        """Of the keys, or the values, of so many rows on this rank."""
        config, group = self.config, self.vocabulary.group
        return config.num_hidden_layers, rows, held_heads(config, group.ranks, group.rank), config.head_dim

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        group = self.vocabulary.group
        return part if group.ranks == 1 else group.sum(part.float()).to(part.dtype)

    def _row_parallel(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's columns of x through its columns of a matrix, and the sum of all ranks'."""
        rows, columns = self._shapes[name]
        return self._sum(self._ops.linear(x, self.tensors[name]) if columns else x.new_zeros(len(x), rows))

    def open(self, number: int) -> BlockContext:
        shape = self._rows_shape(self.config.window)
        keys, values = (torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        return BlockContext(number, keys, values)

    def start(self, context: BlockContext, length: int, first: int, restored: Sequence[tuple[int, int]]) -> None:
        """A context whose first `length` rows were not read. restored: pages that bring those from row `first` on, and
        where they are kept; the oldest first, and none missing."""
        context.length, context.first = length, first
        for page, place in restored:
            rows = self._page(page)
            context.keys[:, rows], context.values[:, rows] = self._pages[place]

    def keep(self, context: BlockContext, page: int, place: int) -> None:
        """Keep a page of the rows that are in the rings, in one of the places that rank 0 counts. Rows that the rings
        have lost are kept as something that nobody will ask for."""
        if place not in self._pages:
            shape = (2, *self._rows_shape(page_rows(self.config)))
            self._pages[place] = torch.empty(shape, dtype=self._dtype, device=self._device)
        rows = self._page(page)
        self._pages[place][0], self._pages[place][1] = context.keys[:, rows], context.values[:, rows]

    def _page(self, page: int) -> torch.Tensor:
        """Where in the rings a page's rows are."""
        rows = torch.arange((page + 1) * PAGE - page_rows(self.config), (page + 1) * PAGE, device=self._device)
        return rows % self.config.window

    def extend(self, parts: Sequence[tuple[BlockContext, torch.Tensor]]) -> None:
        """Add committed rows to contexts: streams [rows, taps * hidden] each, as they follow the rows known so far.

        Of more rows than the window holds only the last are computed.
        """
        window = self.config.window
        places, slots = [], []
        for context, streams in parts:
            rows = torch.arange(context.length, context.length + streams.shape[0], device=self._device)[-window:]
            places.append(rows)
            slots.append(rows % window)
            context.length += streams.shape[0]
        positions = torch.cat(places)
        taps = torch.cat([streams[-window:] for _, streams in parts])
        c = self._norm(self._ops.linear(taps, self.tensors["fc.weight"]), "hidden_norm.weight")
        for layer in range(self.config.num_hidden_layers):
            keys, values = self._keys_and_values(layer, c, positions)
            start = 0
            for (context, _), ring in zip(parts, slots, strict=True):
                stop = start + len(ring)
                context.keys[layer, ring] = keys[start:stop].to(self._dtype)
                context.values[layer, ring] = values[start:stop].to(self._dtype)
                start = stop

    def exchanges(self, streams: int) -> list[Exchange]:
        """How the ranks meet in `fill` of so many contexts and the head after it."""
        config = self.config
        inside = Exchange(streams * config.block_size, config.hidden_size)  # the embedding, then two a layer
        widths = tuple(stop - start for start, stop in self.vocabulary.shares)
        logits = Exchange(streams * config.drafts, widths=widths, last=True)
        return [*[inside] * (2 * config.num_hidden_layers), replace(inside, last=True), logits]

    def fill(self, asked: Sequence[tuple[BlockContext, int]]) -> torch.Tensor:
        """The blocks after each context's pending token: final-normed rows [streams, block, hidden]."""
        config, ops = self.config, self._ops
        size = config.block_size
        masks = [config.mask_token_id] * (size - 1)
        tokens = torch.tensor([token for _, pending in asked for token in (pending, *masks)], device=self._device)
        first = torch.tensor([context.length for context, _ in asked], device=self._device)
        positions = (first[:, None] + torch.arange(size, device=self._device)).flatten()
        visible = [self._visible(context) for context, _ in asked]
        x = self.vocabulary.embed(ops, self._embed, tokens)
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}."
            n = self._norm(x, f"{prefix}input_layernorm.weight")
            n, finish = self._convolve(f"{prefix}attention_conv", n)
            x = x + finish(self._attend(layer, n, positions, [context for context, _ in asked], visible))
            n = self._norm(x, f"{prefix}post_attention_layernorm.weight")
            n, finish = self._convolve(f"{prefix}mlp_conv", n)
            gate, up = (self._columns(n, f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
            hidden = ops.swiglu(torch.cat([gate, up], dim=1)) if gate.shape[1] else gate
            x = x + finish(self._row_parallel(hidden, f"{prefix}mlp.down_proj.weight"))
        return self._norm(x, "norm.weight").unflatten(0, (len(asked), size))

    def _visible(self, context: BlockContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring slots of the known rows, oldest first, and for each slot of the block which of them it does not see."""
        config = self.config
        oldest_known = max(context.first, context.length - config.window)
        rows = torch.arange(oldest_known, context.length, device=self._device)
        hidden = torch.zeros(config.block_size, len(rows), dtype=torch.bool, device=self._device)
        if config.window_by_query:
            oldest = context.length + torch.arange(config.block_size, device=self._device) - config.window + 1
            hidden = rows < oldest[:, None]
        return rows % config.window, hidden

    def _attend(
        self,
        layer: int,
        n: torch.Tensor,
        positions: torch.Tensor,
        contexts: Sequence[BlockContext],
        visible: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        config, size = self.config, self.config.block_size
        prefix = f"layers.{layer}.self_attn."
        queries = self._heads(n, f"{prefix}q_proj.weight")
        queries = self._rotate(self._norm(queries, f"{prefix}q_norm.weight"), positions)
        keys, values = self._keys_and_values(layer, n, positions)
        later = torch.full((size, size), config.causal, device=self._device).triu(1)
        out = []
        for stream, (context, (ring, hidden)) in enumerate(zip(contexts, visible, strict=True)):
            own = slice(stream * size, (stream + 1) * size)
            k = torch.cat([context.keys[layer, ring].float(), keys[own].float()])
            v = torch.cat([context.values[layer, ring].float(), values[own].float()])
            groups = config.num_attention_heads // config.num_key_value_heads
            k, v = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (k, v))  # [heads, rows, dim]
            scores = queries[own].float().transpose(0, 1) @ k.transpose(1, 2) * config.head_dim**-0.5
            scores = scores.masked_fill(torch.cat([hidden, later], dim=1), float("-inf"))
            out.append((torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1))
        return self._row_parallel(torch.cat(out).to(n.dtype), f"{prefix}o_proj.weight")

    def _keys_and_values(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = f"layers.{layer}.self_attn."
        keys = self._norm(self._heads(x, f"{prefix}k_proj.weight"), f"{prefix}k_norm.weight")
        return self._rotate(keys, positions), self._heads(x, f"{prefix}v_proj.weight")

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x through a projection: [rows, heads of this rank, head_dim]."""
        heads = self._shapes[name][0] // self.config.head_dim
        return self._columns(x, name).unflatten(1, (heads, self.config.head_dim))

    def _columns(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._ops.linear(x, self.tensors[name]) if self._shapes[name][0] else x.new_empty(len(x), 0)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if not x.numel():
            return x
        flat = self._ops.rms_norm(x.flatten(0, -2), self.tensors[name], self.config.rms_norm_eps)
        return flat.view(x.shape)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, head_dim] whose halves are the pairs to rotate."""
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _convolve(self, prefix: str, n: torch.Tensor) -> tuple[torch.Tensor, Convolution]:
        """A sublayer's input after the first of its two convolutions, and the second, for its output."""
        if not self.config.conv_taps:
            return n, _as_is
        projected = self._ops.linear(n, self.tensors[f"{prefix}.kernel_projection.weight"])
        dynamic = projected.unflatten(1, (2, self.config.conv_taps, -1))  # [rows, branch, tap, group]
        base = self.tensors[f"{prefix}.base_kernel"].float()
        return self._convolved(n, base[0], dynamic[:, 0]), lambda x: self._convolved(x, base[1], dynamic[:, 1])

    def _convolved(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        """Each row with the rows before it in its block: base [taps, hidden] + dynamic [rows, taps, groups]."""
        kernel = base + dynamic.repeat_interleave(self.config.conv_group, dim=2)  # [rows, taps, hidden]
        blocks = x.unflatten(0, (-1, self.config.block_size))
        total = torch.zeros(x.shape, device=x.device)
        for tap in range(self.config.conv_taps):
            shifted = torch.nn.functional.pad(blocks, (0, 0, tap, 0))[:, : self.config.block_size]
            total = total + shifted.flatten(0, 1) * kernel[:, tap]
        return total.to(x.dtype)


def _as_is(x: torch.Tensor) -> torch.Tensor:
    return x
