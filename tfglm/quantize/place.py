"""Where the calibration rows walk: the CPU's reference operations, or a GPU's."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from tfglm.cache.latent import LatentCache, LayerPlanes
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError
from tfglm.models.weights import LayerWeights
from tfglm.models.window import LaidOut
from tfglm.ops.base import Experts, Ops
from tfglm.ops.exl3_weights import Weight
from tfglm.ops.reference import ReferenceOps


class Place(Protocol):
    """planes: the cache of one layer for one sequence; ops: of the device."""

    ops: Ops
    device: torch.device
    planes: LayerPlanes

    def layer(self, layer: LayerWeights) -> LayerWeights: ...
    def linear(self, weight: Weight) -> Weight: ...
    def experts(self, experts: Experts) -> Experts: ...
    def window(self, rows: LaidOut) -> LaidOut: ...


class CpuPlace:
    """Plain torch; what is loaded is used as it is."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self.ops: Ops = ReferenceOps()
        self.device = torch.device("cpu")
        [self.planes] = LatentCache(_one_layer(config), tokens, "bf16").layers

    def layer(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def linear(self, weight: Weight) -> Weight:
        return weight

    def experts(self, experts: Experts) -> Experts:
        return experts

    def window(self, rows: LaidOut) -> LaidOut:
        return rows


class CudaPlace:
    """The GPU's kernels on bfloat16 rows; weights are brought there a layer at a time."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        from tfglm.cache.pages import PAGE, pages_for
        from tfglm.formats.latent import KvFormat
        from tfglm.models.glm53_cuda import PackedCache, hold_layer
        from tfglm.ops.cuda import CudaOps, Precision

        self.device = torch.device("cuda", torch.cuda.current_device())
        self._ops = CudaOps(Precision(KvFormat.BF16), self.device)
        self._ops.context = pages_for(tokens) * PAGE
        self._hold_layer = hold_layer
        self.ops: Ops = self._ops
        [self.planes] = PackedCache(_one_layer(config), tokens, KvFormat.BF16, self.device).layers

    def layer(self, layer: LayerWeights) -> LayerWeights:
        return self._hold_layer(layer, self._ops)

    def linear(self, weight: Weight) -> Weight:
        return self._ops.hold(weight, "bf16")

    def experts(self, experts: Experts) -> Experts:
        return self._ops.hold_experts(experts)

    def window(self, rows: LaidOut) -> LaidOut:
        window = rows.window
        moved = dataclasses.replace(
            window,
            positions=window.positions.to(self.device),
            slots=window.slots.to(self.device),
            pages=window.pages.to(self.device),
            stream_of=window.stream_of.to(self.device),
        )
        return LaidOut(rows.tokens.to(self.device), moved, rows.wanted.to(self.device))


def place(device: str, config: ModelConfig, tokens: int) -> Place:
    """device: cpu, cuda, or auto (cuda where torch sees a GPU). tokens: of the longest sequence.

    Raises ConfigError for a device that is not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; supported: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda', but torch sees no NVIDIA GPU; supported here: cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return CpuPlace(config, tokens)
    return CudaPlace(config, tokens)


def _one_layer(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, num_hidden_layers=1, indexer_types=("full",))
