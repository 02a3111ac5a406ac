"""Multi-head latent attention in absorbed form: queries go into the latent space, keys and values never leave it."""

from __future__ import annotations

import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.checkpoint.config import ModelConfig
from tfglm.models import indexer
from tfglm.models.context import DealtWindow
from tfglm.models.weights import AttentionWeights
from tfglm.ops.base import Ops, Rope, Selection, Window


def attention(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    x: torch.Tensor,
    rope: Rope,
    window: Window,
    planes: LayerPlanes,
    selection: Selection | None,
    dealt: DealtWindow | None = None,
) -> tuple[torch.Tensor, Selection]:
    """The attention branch [R, hidden] of normalised rows x, and the selection it used. Of a model over several ranks
    the branch is this rank's heads' part of it, float32.

    A layer with an indexer makes its own selection; a shared layer uses the given one, of the nearest full layer below.
    dealt: the window where caches are dealt out to ranks.
    """
    q_latent = ops.split_latents(
        ops.linear(x, weights.a_proj),
        weights.q_norm,
        weights.latent_norm,
        config.latent_norm_eps,
        rope,
        window,
        planes.latent,
        planes.rope,
    )
    if weights.indexer is not None and planes.index is not None:
        selection = indexer.select(ops, config, weights.indexer, x, q_latent, rope, window, planes.index, dealt)
    assert selection is not None, "the first layer has an indexer: ModelConfig refuses anything else"

    if not len(weights.key_up):  # more ranks than heads
        if dealt is not None:
            none = x.new_empty(len(x), 0, config.kv_lora_rank), x.new_empty(len(x), 0, config.qk_rope_head_dim)
            dealt.attend(ops, *none, selection, config.attention_scale, planes, rope)
        return torch.zeros_like(x, dtype=torch.float32), selection
    queries = ops.linear(q_latent, weights.q_b_proj).unflatten(1, (-1, config.qk_head_dim))
    nope, rotary = queries.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=2)
    latent, scale = ops.absorb(nope, weights.key_up), config.attention_scale
    if dealt is None:
        attended = ops.attend(latent, rotary, selection, scale, planes.latent, planes.rope, rope)
    else:
        attended = dealt.attend(ops, latent, rotary, selection, scale, planes, rope)
    return ops.linear(ops.expand(attended, weights.value_up), weights.o_proj), selection
