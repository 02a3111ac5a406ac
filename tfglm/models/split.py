"""The vocabulary over ranks: each embeds the tokens whose rows it holds and makes the logits of its head rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.layout import Family, Layout
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight
from tfglm.ops.group import Group


@dataclass(frozen=True)
class Vocabulary:
    """group: the ranks; shares: of each, the (start, stop) of its rows of embedding and head."""

    group: Group
    shares: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: ModelConfig, group: Group) -> Vocabulary:
        layout = Layout.of(config, group.ranks)
        return cls(group, tuple(layout.share(Family.VOCABULARY, 0, rank) for rank in range(group.ranks)))

    def embed(self, ops: Ops, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden] of tokens [R]. One rank gives the row and all others zeros, so the sum is exact."""
        if self.group.ranks == 1:
            return ops.embed(table, tokens)
        start, stop = self.shares[self.group.rank]
        foreign = (tokens < start) | (tokens >= stop)
        rows = ops.embed(table, (tokens - start).masked_fill(foreign, 0))
        return self.group.sum(rows.float().masked_fill(foreign[:, None], 0)).to(rows.dtype)

    def logits(self, ops: Ops, head: Weight, h: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocabulary] of normalised rows h, on every rank."""
        if self.group.ranks == 1:
            return ops.linear(h, head)
        widths = [stop - start for start, stop in self.shares]
        if not len(h):
            return h.new_empty(0, sum(widths), dtype=torch.float32)
        own = widths[self.group.rank]
        part = ops.linear(h, head) if own else h.new_empty(len(h), 0, dtype=torch.float32)
        return self.group.concat(part, widths)
