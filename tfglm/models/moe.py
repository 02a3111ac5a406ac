"""The feed-forward branch: a dense SwiGLU, or routed experts beside a shared one."""

from __future__ import annotations

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.models.weights import MlpWeights, MoeWeights
from tfglm.ops.base import Ops


def feed_forward(ops: Ops, config: ModelConfig, weights: MlpWeights | MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """The branch [R, hidden] of normalised rows x. The shared expert is added last, unweighted."""
    if isinstance(weights, MlpWeights):
        return mlp(ops, weights, x)
    routing = ops.route(x, weights.gate, weights.correction, config)
    return ops.experts(x, routing, weights.experts, mlp(ops, weights.shared, x))


def mlp(ops: Ops, weights: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(ops.swiglu(ops.linear(x, weights.gate_up)), weights.down)
