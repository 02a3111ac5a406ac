"""The calibration rows on their way through the model, one layer at a time.

Each layer sees what the layers before it, already quantised, have made of the text; so what a layer's error does to the
rows is known to all that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tfglm.cache.latent import LatentCache
from tfglm.cache.pages import Stream
from tfglm.checkpoint.config import ModelConfig
from tfglm.models import mla
from tfglm.models.mtp import MtpWeights
from tfglm.models.weights import LayerWeights
from tfglm.models.window import LaidOut, Rows, lay_out, reserve
from tfglm.ops.base import Ops, Selection


class Walk:
    """Rows of several token sequences, each a stream from position 0, between two layers.

    x: the residual stream, [L, hidden] a sequence. One cache of one layer serves all sequences in turn.
    """

    def __init__(self, config: ModelConfig, ops: Ops, embed: torch.Tensor, sequences: Sequence[Sequence[int]]) -> None:
        self.config = config
        self.ops = ops
        one_layer = dataclasses.replace(config, num_hidden_layers=1, indexer_types=("full",))
        self._cache = LatentCache(one_layer, max(len(tokens) for tokens in sequences), "bf16")
        self._stream = Stream(self._cache.pool)
        reserve([Rows(self._stream, max(sequences, key=len), 0)], self._cache.pool)
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self._frequencies = 1.0 / config.rope_theta**half
        self._sequences = [lay_out([Rows(self._stream, tokens, 0)]) for tokens in sequences]
        self._selections: list[Selection | None] = [None] * len(sequences)
        self._embed = embed
        self.x = [ops.embed(embed, rows.tokens) for rows in self._sequences]

    def attention(self, layer: LayerWeights) -> torch.Tensor:
        """Send every row through the layer's attention; the normalised inputs of its feed-forward part, [T, hidden] of
        all sequences one after the other."""
        inputs = []
        for number, rows in enumerate(self._sequences):
            h = self.ops.rms_norm(self.x[number], layer.attention_norm, self.config.rms_norm_eps)
            branch, self._selections[number] = self._attend(rows, h, layer, self._selections[number])
            self.x[number], h = self.ops.add_rms_norm(self.x[number], branch, layer.ffn_norm, self.config.rms_norm_eps)
            inputs.append(h)
        return torch.cat(inputs)

    def add(self, branch: torch.Tensor) -> None:
        """Add the feed-forward part's rows [T, hidden], in the order in which `attention` gave its inputs."""
        parts = branch.split([len(x) for x in self.x])
        self.x = [x + part for x, part in zip(self.x, parts, strict=True)]

    def enter_mtp(self, norm: torch.Tensor, weights: MtpWeights) -> None:
        """Leave the trunk through its last norm and join each row with the token that follows, for the MTP layer. The
        last row of a sequence, which none follows, is joined with the sequence's first token."""
        eps = self.config.rms_norm_eps
        for number, rows in enumerate(self._sequences):
            following = self.ops.embed(self._embed, rows.tokens.roll(-1))
            following = following.masked_fill(rows.window.positions[:, None] == 0, 0.0)
            hidden = self.ops.rms_norm(self.x[number], norm, eps)
            joined = torch.cat(
                [self.ops.rms_norm(following, weights.enorm, eps), self.ops.rms_norm(hidden, weights.hnorm, eps)], 1
            )
            self.x[number] = self.ops.linear(joined, weights.eh_proj)

    def _attend(
        self, rows: LaidOut, h: torch.Tensor, layer: LayerWeights, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        rope = self.ops.angles(rows.window.positions, self._frequencies)
        [planes] = self._cache.layers
        return mla.attention(self.ops, self.config, layer.attention, h, rope, rows.window, planes, selection)
