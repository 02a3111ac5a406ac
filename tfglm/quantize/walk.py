"""The calibration rows on their way through the model, one layer at a time.

Each layer sees what the layers before it, already quantised, have made of the text; so what a layer's error does to the
rows is known to all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfglm.cache.pages import PagePool, Stream, pages_for
from tfglm.checkpoint.config import ModelConfig
from tfglm.models import mla
from tfglm.models.mtp import MtpWeights
from tfglm.models.weights import LayerWeights
from tfglm.models.window import LaidOut, Rows, lay_out, reserve
from tfglm.ops.base import Selection
from tfglm.quantize.place import Place


class Walk:
    """Rows of several token sequences, each a stream from position 0, between two layers.

    x: the residual stream, [L, hidden] a sequence. One cache of one layer serves all sequences in turn.
    """

    def __init__(
        self, config: ModelConfig, place: Place, embed: torch.Tensor, sequences: Sequence[Sequence[int]]
    ) -> None:
        self.config = config
        self._place, self._ops = place, place.ops
        longest = max(sequences, key=len)
        pool = PagePool(pages_for(len(longest)))
        stream = Stream(pool)
        reserve([Rows(stream, longest, 0)], pool)
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self._frequencies = (1.0 / config.rope_theta**half).to(place.device)
        self._sequences = [place.window(lay_out([Rows(stream, tokens, 0)])) for tokens in sequences]
        self._selections: list[Selection | None] = [None] * len(sequences)
        self._embed = embed.to(place.device)
        self.x = [self._ops.embed(self._embed, rows.tokens) for rows in self._sequences]

    def attention(self, layer: LayerWeights) -> torch.Tensor:
        """Send every row through the layer's attention; the normalised inputs of its feed-forward part, [T, hidden] of
        all sequences one after the other."""
        inputs = []
        for number, rows in enumerate(self._sequences):
            h = self._ops.rms_norm(self.x[number], layer.attention_norm, self.config.rms_norm_eps)
            branch, self._selections[number] = self._attend(rows, h, layer, self._selections[number])
            self.x[number], h = self._ops.add_rms_norm(self.x[number], branch, layer.ffn_norm, self.config.rms_norm_eps)
            inputs.append(h)
        return torch.cat(inputs)

    def add(self, branch: torch.Tensor) -> None:
        """Add the feed-forward part's rows [T, hidden], in the order in which `attention` gave its inputs."""
        parts = branch.split([len(x) for x in self.x])
        self.x = [x + part.to(x) for x, part in zip(self.x, parts, strict=True)]

    def enter_mtp(self, norm: torch.Tensor, weights: MtpWeights) -> None:
        """Leave the trunk through its last norm and join each row with the token that follows, for the MTP layer. The
        last row of a sequence, which none follows, is joined with the sequence's first token."""
        eps, device, eh_proj = self.config.rms_norm_eps, self._place.device, self._place.linear(weights.eh_proj)
        norm, enorm, hnorm = (vector.to(device) for vector in (norm, weights.enorm, weights.hnorm))
        for number, rows in enumerate(self._sequences):
            following = self._ops.embed(self._embed, rows.tokens.roll(-1))
            following = following.masked_fill(rows.window.positions[:, None] == 0, 0.0)
            hidden = self._ops.rms_norm(self.x[number], norm, eps)
            joined = torch.cat([self._ops.rms_norm(following, enorm, eps), self._ops.rms_norm(hidden, hnorm, eps)], 1)
            self.x[number] = self._ops.linear(joined, eh_proj)

    def _attend(
        self, rows: LaidOut, h: torch.Tensor, layer: LayerWeights, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        rope = self._ops.angles(rows.window.positions, self._frequencies)
        return mla.attention(
            self._ops, self.config, layer.attention, h, rope, rows.window, self._place.planes, selection
        )
