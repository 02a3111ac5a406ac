"""The checkpoint's own next-token layer (multi-token prediction, DeepSeek-V3 style), as a chain of drafts.

Row i joins what the trunk made of position i with the token at i + 1, passes one ordinary decoder layer, and predicts
the token at i + 2 with the trunk's own head. Conventions, as vLLM and SGLang have them: the trunk's row is the one
after its last norm; the embedding is the first half of the join; at position 0 the embedding is zero; a chain goes on
from the row after shared_head.norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tfglm.cache.latent import Cache, LatentCache
from tfglm.cache.pages import PAGE, Follower, Stream
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import layer_prefix
from tfglm.models import mla, moe
from tfglm.models.glm53 import Glm53, Handler
from tfglm.models.source import Read, RenamedSource, Source, as_source
from tfglm.models.weights import ModelWeights, load_layer
from tfglm.models.window import LaidOut, Rows, appended
from tfglm.ops.base import Selection
from tfglm.ops.exl3_weights import Weight
from tfglm.ops.steps import Exchange, Steps


@dataclass(frozen=True)
class MtpWeights:
    """The layer as a model of one layer whose last norm is shared_head.norm and whose embedding and head are the
    trunk's; enorm and hnorm [hidden], eh_proj [hidden, 2 * hidden], embedding columns first."""

    layer: ModelWeights
    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: Weight


@dataclass(frozen=True)
class MtpStep:
    """What one forward made of its W wanted rows: logits [W, vocab], rows [W, hidden] to chain on, and the tokens each
    of them attended to."""

    logits: torch.Tensor
    rows: torch.Tensor
    selection: Selection


def load_mtp(trunk: ModelWeights, config: ModelConfig, source: Source | Read) -> MtpWeights:
    """The MTP layer, number num_hidden_layers, of a checkpoint whose trunk is loaded."""
    prefix, source = layer_prefix(config.num_hidden_layers), as_source(source)
    renamed = RenamedSource(source, lambda name: name.replace(layer_prefix(0), prefix, 1), {})
    return MtpWeights(
        layer=ModelWeights(
            embed=trunk.embed,
            layers=(load_layer(alone(config), renamed, 0),),
            norm=source.tensor(f"{prefix}.shared_head.norm.weight").float(),
            head=trunk.head,
        ),
        enorm=source.tensor(f"{prefix}.enorm.weight").float(),
        hnorm=source.tensor(f"{prefix}.hnorm.weight").float(),
        eh_proj=source.linear(f"{prefix}.eh_proj"),
    )


class Mtp:
    """The layer and its cache, whose pages are the trunk's: a page that is kept for others keeps this layer's rows too.
    One thread at a time.

    Row i is cached at position i, so a stream is as long as the trunk's once every committed row has been absorbed.
    """

    def __init__(self, model: Glm53, weights: MtpWeights, kv: str = "bf16") -> None:
        self.config = model.config
        self.weights = weights
        self.cache = self._new_cache(model, kv)
        self._pool = model.cache.pool
        self._ops = model.ops
        self.steps = Steps(model.group, "mtp", model.weights.embed.device)
        self._vocabulary = dataclasses.replace(model.vocabulary, group=self.steps)
        self._dealt = model.dealt
        self._frequencies = model.frequencies
        [layer] = weights.layer.layers
        # A layer without an indexer takes the selection it is given: how a chain keeps its first step's list.
        self._full = layer.attention
        self._shared = dataclasses.replace(layer.attention, indexer=None)

    def _new_cache(self, model: Glm53, kv: str) -> Cache:
        pool = model.cache.pool
        return LatentCache(alone(model.config), pool.pages * PAGE, kv, pool.page_tokens // PAGE)

    def open_stream(self, trunk: Stream) -> Stream:
        """Rows on the pages of a stream of the trunk, after those it holds. Of kept pages it begins with, this layer's
        rows are taken over too; what followed the last of them was another's token, which changes a draft at most."""
        return Follower(trunk)

    @torch.inference_mode()
    def absorb(self, window: Sequence[Rows], hidden: torch.Tensor) -> MtpStep:
        """Append rows to their streams. An entry's tokens are those that *follow* its rows (t[i + 1] for row i); hidden
        [R, hidden] is what the trunk, after its norm, made of the rows, in window order."""
        return self._forward(window, hidden, None)

    @torch.inference_mode()
    def chain(self, window: Sequence[Rows], step: MtpStep) -> MtpStep:
        """One more row a stream after `step`, of the same streams in the same order, which fed their drafts: each
        attends to what its predecessor attended to and to itself, without scoring the cache again."""
        return self._forward(window, step.rows, step.selection)

    def prepare(self, rows: int, window: int) -> None:
        """See Glm53.prepare."""

    def handlers(self) -> Mapping[str, Handler]:
        """See Glm53.handlers; steps have handlers of their own (MtpRows)."""
        return {}

    def _forward(self, window: Sequence[Rows], hidden: torch.Tensor, before: Selection | None) -> MtpStep:
        with appended(window, self._pool, self.config) as rows:
            return self.layer(rows, hidden, before)

    def exchanges(self, rows: int, wanted: int) -> list[Exchange] | None:
        """How the ranks meet in `layer` for so many rows. None where the caches are dealt out: what is exchanged there
        hangs on the lengths of the streams."""
        if self._dealt:
            return None
        summed = Exchange(rows, self.config.hidden_size)  # embedding, attention, experts
        widths = tuple(stop - start for start, stop in self._vocabulary.shares)
        logits = [Exchange(wanted, widths=widths, last=True)] if wanted else []
        return [summed, summed, dataclasses.replace(summed, last=True), *logits]

    def layer(self, rows: LaidOut, hidden: torch.Tensor, before: Selection | None) -> MtpStep:
        """Rows that are laid out through the layer, on every rank at the same time. before: what they attend to besides
        themselves, instead of what the layer would choose."""
        group = self._vocabulary.group
        dealt = self._dealt.window(rows) if self._dealt else None
        ops, config, weights, window = self._ops, self.config, self.weights, dealt.window if dealt else rows.window
        [layer], [planes], eps = weights.layer.layers, self.cache.layers, config.rms_norm_eps
        rope = ops.angles(window.positions, self._frequencies)
        embedded = self._vocabulary.embed(ops, weights.layer.embed, rows.tokens)
        embedded = embedded.masked_fill(window.positions[:, None] == 0, 0.0)
        joined = torch.cat([ops.rms_norm(embedded, weights.enorm, eps), ops.rms_norm(hidden, weights.hnorm, eps)], 1)
        x = ops.linear(joined, weights.eh_proj)
        h = ops.rms_norm(x, layer.attention_norm, eps)
        attention = self._full if before is None else self._shared
        given = None
        if before is not None:
            given = dealt.extended(before) if dealt else _extended(before, window.slots)
        part, selection = mla.attention(ops, config, attention, h, rope, window, planes, given, dealt)
        x, h = ops.add_rms_norm(x, group.sum(part), layer.ffn_norm, eps)
        branch = group.sum(moe.feed_forward(ops, config, layer.ffn, h))
        wanted = rows.wanted
        _, h = ops.add_rms_norm(x[wanted], branch[wanted], weights.layer.norm, eps)
        logits = self._vocabulary.logits(ops, weights.layer.head, h)
        return MtpStep(logits, h, Selection(selection.slots[wanted], selection.counts[wanted]))


def alone(config: ModelConfig) -> ModelConfig:
    """The MTP layer as a model of one layer: always sparse, with an indexer of its own."""
    return dataclasses.replace(config, num_hidden_layers=1, indexer_types=("full",), mlp_layer_types=("sparse",))


def _extended(selection: Selection, slots: torch.Tensor) -> Selection:
    """Each row's list [R, L] with the row's own slot after its last valid entry."""
    longer = torch.cat([selection.slots, slots[:, None]], dim=1)
    return Selection(longer.scatter(1, selection.counts[:, None], slots[:, None]), selection.counts + 1)
