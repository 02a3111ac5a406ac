"""The lightning indexer: which cached tokens a row attends to (DeepSeek sparse attention, as glm_moe_dsa has it)."""

from __future__ import annotations

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.models.context import DealtWindow
from tfglm.models.weights import IndexerWeights
from tfglm.ops.base import Ops, Rope, Selection, Window


def select(
    ops: Ops,
    config: ModelConfig,
    weights: IndexerWeights,
    x: torch.Tensor,
    q_latent: torch.Tensor,
    rope: Rope,
    window: Window,
    plane: torch.Tensor,
    dealt: DealtWindow | None = None,
) -> Selection:
    """Cache the index keys of the rows x [R, hidden] and choose index_topk tokens for each.

    q_latent [R, q_lora_rank]: the normalised query latent. Keys are cached even where a row attends to everything
    before it, because later rows will score them.
    """
    width = config.index_head_dim
    key_and_heads = ops.linear(x, weights.key_and_heads)
    ops.write_index_key(key_and_heads[:, :width], weights.key_norm, weights.key_norm_bias, rope, window, plane)
    queries = ops.linear(q_latent, weights.wq_b).unflatten(1, (config.index_n_heads, width))
    queries, head_weights = ops.rotate(queries, rope), key_and_heads[:, width:]
    if dealt is not None:
        return dealt.select(ops, queries, head_weights, plane, config.index_topk)
    return ops.select(queries, head_weights, window, plane, config.index_topk)
