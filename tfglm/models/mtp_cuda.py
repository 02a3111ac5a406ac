"""The MTP layer on an NVIDIA GPU: weights and cache on the device, the cache scored anew at every step of a chain."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import product

import torch

from tfglm.cache.latent import Cache
from tfglm.cache.pages import PAGE
from tfglm.models.glm53 import Glm53, Handler
from tfglm.models.glm53_cuda import CudaGlm53, PackedCache, hold_layer, longest, packed, unpacked
from tfglm.models.graphs_cuda import GRAPH_ROWS, Captured, context_kind, context_kinds
from tfglm.models.mtp import Mtp, MtpStep, MtpWeights, alone, load_mtp
from tfglm.models.source import Source
from tfglm.models.window import LaidOut, Rows, appended, from_message, to_message
from tfglm.ops.base import Selection
from tfglm.ops.group import Message, together
from tfglm.ops.steps import Exchange

PREPARE = "mtp_prepare"
"""The kind of message that has a step captured."""


def load_mtp_cuda(model: CudaGlm53, source: Source) -> CudaMtp:
    """The MTP layer of a checkpoint whose trunk is on the device, in the trunk's formats."""
    weights, ops = load_mtp(model.weights, model.config, source), model.ops
    [layer] = weights.layer.layers
    held = hold_layer(layer, ops, partial=model.group.ranks > 1)
    on_device = MtpWeights(
        layer=replace(weights.layer, layers=(held,), norm=weights.layer.norm.to(ops.device)),
        enorm=weights.enorm.to(ops.device),
        hnorm=weights.hnorm.to(ops.device),
        eh_proj=ops.hold(weights.eh_proj, ops.precision.dense),
    )
    return CudaMtp(model, on_device)


class CudaMtp(Mtp):
    """`Mtp` beside a CudaGlm53."""

    def __init__(self, model: CudaGlm53, weights: MtpWeights) -> None:
        super().__init__(model, weights, model.ops.precision.kv.value)
        self._model = model

    def _new_cache(self, model: Glm53, kv: str) -> Cache:
        assert isinstance(model, CudaGlm53)
        kv_format, device = model.ops.precision.kv, model.device
        tokens, ranks = model.cache.pool.pages * PAGE, model.page_tokens // PAGE
        return PackedCache(alone(model.config), tokens, kv_format, device, ranks)

    def layer(self, rows: LaidOut, hidden: torch.Tensor, before: Selection | None) -> MtpStep:
        """A chain does not keep its first step's list: the kernels bound a list by index_topk. What a step of few rows
        gives is to be read before the next one."""
        if self._model.graphs is None or rows.tokens.shape[0] > GRAPH_ROWS:
            return super().layer(self._model.on_device(rows), hidden, None)
        whole = len(rows.wanted) == rows.tokens.shape[0]
        wanted = rows.wanted if whole else rows.wanted.to(self._model.device)  # a copy that waits for the device
        step = self._replayed(rows, context_kind(longest(rows)), hidden)
        if whole:
            return step
        selection = Selection(step.selection.slots[wanted], step.selection.counts[wanted])
        return MtpStep(step.logits[wanted], step.rows[wanted], selection)

    def exchanges(self, rows: int, wanted: int) -> list[Exchange] | None:
        """None with graphs, whose meetings nobody counts."""
        return None if self._model.graphs is not None else super().exchanges(rows, wanted)

    @torch.inference_mode()
    def prepare(self, rows: int, window: int) -> None:
        model = self._model
        if model.graphs is None:
            return
        trunk, kinds = model.open_stream(), product(context_kinds(window), range(min(rows, GRAPH_ROWS), 0, -1))
        with model.graphs.told("MTP layer"):
            for context, count in kinds:
                own = self.open_stream(trunk)
                with (
                    appended([Rows(own, [0] * count, count)], model.cache.pool, self.config) as laid_out,
                    together(model.group, to_message(PREPARE, laid_out, {"context": context})),
                ):
                    self._capture(laid_out, context)
        trunk.close()

    def handlers(self) -> Mapping[str, Handler]:
        return {PREPARE: self._follow_prepare}

    @torch.inference_mode()
    def _follow_prepare(self, message: Message) -> None:
        [context] = message.integers("context")
        self._capture(from_message(message), context)

    def _capture(self, rows: LaidOut, context: int) -> None:
        device = self._model.device
        hidden = torch.zeros(len(rows.tokens), self.config.hidden_size, dtype=torch.bfloat16, device=device)
        self._replayed(rows, context, hidden)
        self._model.finished()

    def _replayed(self, rows: LaidOut, context: int, hidden: torch.Tensor) -> MtpStep:
        """Logits and rows of the whole window, where the graph leaves them."""
        graphs, count = self._model.graphs, rows.tokens.shape[0]
        assert graphs is not None
        key = ("mtp", count, context)
        inputs = packed(rows, count, context, self._model.device)
        ready = graphs.find(key)
        if ready is None:
            ready = self._captured(key, inputs.to(self._model.device), rows, context, hidden.clone())
        else:
            ready.inputs[0].copy_(inputs, non_blocking=True)
            ready.inputs[1].copy_(hidden)
        self._model.group.replay(ready.graph)
        step: MtpStep = ready.result
        return step

    def _captured(
        self, key: Hashable, inputs: torch.Tensor, rows: LaidOut, context: int, hidden: torch.Tensor
    ) -> Captured:
        graphs, ops, count = self._model.graphs, self._model.ops, rows.tokens.shape[0]
        assert graphs is not None
        laid_out = unpacked(inputs, replace(rows, wanted=torch.arange(count)), count)
        ops.context, ops.prompt = context, False

        def forward() -> MtpStep:
            step = super(CudaMtp, self).layer(laid_out, hidden, None)
            return replace(step, logits=graphs.logits[:count].copy_(step.logits))

        return graphs.capture(key, (inputs, hidden, laid_out.wanted), forward)
