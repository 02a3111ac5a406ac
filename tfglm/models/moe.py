"""The feed-forward branch: a dense SwiGLU, or routed experts beside a shared one."""

from __future__ import annotations

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.models.weights import MlpWeights, MoeWeights
from tfglm.ops.base import Ops, PlainExperts


def feed_forward(ops: Ops, config: ModelConfig, weights: MlpWeights | MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """The branch [R, hidden] of normalised rows x. The shared expert is added last, unweighted. Of a model over several
    ranks the branch is this rank's columns' part of it, float32."""
    if isinstance(weights, MlpWeights):
        return mlp(ops, weights, x)
    shared = mlp(ops, weights.shared, x)
    if isinstance(weights.experts, PlainExperts) and not weights.experts.down.shape[2]:
        return shared
    return ops.experts(x, ops.route(x, weights.gate, weights.correction, config), weights.experts, shared)


def mlp(ops: Ops, weights: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """Zeros where a rank holds no column of it: with fewer blocks of 128 columns than ranks."""
    if isinstance(weights.down, torch.Tensor) and not weights.down.shape[1]:
        return torch.zeros_like(x, dtype=torch.float32)
    return ops.linear(ops.swiglu(ops.linear(x, weights.gate_up)), weights.down)
