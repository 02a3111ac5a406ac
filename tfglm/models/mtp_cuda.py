"""The MTP layer on an NVIDIA GPU: weights and cache on the device, the cache scored anew at every step of a chain."""

from __future__ import annotations

from dataclasses import replace

import torch

from tfglm.cache.latent import LatentCache
from tfglm.models.glm53 import Glm53
from tfglm.models.glm53_cuda import CudaGlm53, PackedCache, hold_layer
from tfglm.models.mtp import Mtp, MtpStep, MtpWeights, alone, load_mtp
from tfglm.models.source import Source
from tfglm.models.window import LaidOut
from tfglm.ops.base import Selection


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

    def _new_cache(self, model: Glm53, kv: str) -> LatentCache:
        assert isinstance(model, CudaGlm53)
        kv_format, device = model.ops.precision.kv, model.device
        return PackedCache(alone(model.config), model.tokens_total, kv_format, device)  # type: ignore[return-value]

    def layer(self, rows: LaidOut, hidden: torch.Tensor, before: Selection | None) -> MtpStep:
        """A chain does not keep its first step's list: the kernels bound a list by index_topk."""
        return super().layer(self._model.on_device(rows), hidden, None)
