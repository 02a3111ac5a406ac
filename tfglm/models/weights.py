"""The weights of the trunk, in the shapes the forward pass multiplies by.

Sizes in this module's docstrings are those of one rank that holds everything; of a model over several ranks each has
its own heads, inner columns and vocabulary rows, and none of them where its share is empty.

Matrices that read the same input are stacked, so that one product serves them. The MTP layer (number
num_hidden_layers) is not part of the trunk and is not loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import layer_prefix
from tfglm.models.source import Read, Source, as_source
from tfglm.ops.base import Experts
from tfglm.ops.exl3_weights import StackedWeight, Weight, plain


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [index heads * index_head_dim, q_lora_rank]. key_and_heads: wk [index_head_dim, hidden] over weights_proj
    [index heads, hidden]. Norm of the key: weight and bias [index_head_dim]."""

    wq_b: Weight
    key_and_heads: Weight
    key_norm: torch.Tensor
    key_norm_bias: torch.Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """a_proj: q_a_proj [q_lora_rank, hidden] over kv_a_proj_with_mqa [kv_lora_rank + rope, hidden]. kv_b_proj comes
    apart into key_up [heads, nope, kv_lora_rank] and value_up [heads, v_head_dim, kv_lora_rank]. indexer: None on
    shared layers."""

    a_proj: Weight
    q_norm: torch.Tensor
    q_b_proj: Weight
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    o_proj: Weight
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MlpWeights:
    """gate_up [2 * inner, hidden] (gate rows first), down [hidden, inner]."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class MoeWeights:
    """gate [experts, hidden], correction [experts] float32."""

    gate: torch.Tensor
    correction: torch.Tensor
    experts: Experts
    shared: MlpWeights


@dataclass(frozen=True)
class LayerWeights:
    attention_norm: torch.Tensor
    attention: AttentionWeights
    ffn_norm: torch.Tensor
    ffn: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """embed and head [vocab, hidden]."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Weight


def load_weights(config: ModelConfig, source: Source | Read) -> ModelWeights:
    """Every tensor of the trunk, each read once. Besides the weights at most three matrices are held at a time."""
    source = as_source(source)
    return ModelWeights(
        embed=load_embedding(source),
        layers=tuple(load_layer(config, source, layer) for layer in range(config.num_hidden_layers)),
        norm=_vector(source, "model.norm.weight"),
        head=source.linear("lm_head"),
    )


def load_embedding(source: Source) -> torch.Tensor:
    """The embedding's rows; a rank that holds none gets one of zeros, to look up for every token."""
    table = plain(source.linear("model.embed_tokens"))
    return table if len(table) else table.new_zeros(1, table.shape[1])


def load_layer(config: ModelConfig, source: Source, layer: int) -> LayerWeights:
    """The weights of one layer of the trunk."""
    prefix = layer_prefix(layer)
    return LayerWeights(
        attention_norm=_vector(source, f"{prefix}.input_layernorm.weight"),
        attention=_attention(config, source, f"{prefix}.self_attn", config.indexer_types[layer] == "full"),
        ffn_norm=_vector(source, f"{prefix}.post_attention_layernorm.weight"),
        ffn=_moe(config, source, f"{prefix}.mlp")
        if config.mlp_layer_types[layer] == "sparse"
        else _mlp(source, f"{prefix}.mlp"),
    )


def _attention(config: ModelConfig, source: Source, prefix: str, full: bool) -> AttentionWeights:
    widths = [config.qk_nope_head_dim, config.v_head_dim]
    kv_b = plain(source.linear(f"{prefix}.kv_b_proj"))
    key_up, value_up = kv_b.view(len(kv_b) // sum(widths), sum(widths), kv_b.shape[1]).split(widths, dim=1)
    return AttentionWeights(
        a_proj=_stack(source, f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"),
        q_norm=_vector(source, f"{prefix}.q_a_layernorm.weight"),
        q_b_proj=source.linear(f"{prefix}.q_b_proj"),
        latent_norm=_vector(source, f"{prefix}.kv_a_layernorm.weight"),
        key_up=key_up.contiguous(),
        value_up=value_up.contiguous(),
        o_proj=source.linear(f"{prefix}.o_proj"),
        indexer=_indexer(source, f"{prefix}.indexer") if full else None,
    )


def _indexer(source: Source, prefix: str) -> IndexerWeights:
    return IndexerWeights(
        wq_b=source.linear(f"{prefix}.wq_b"),
        key_and_heads=_stack(source, f"{prefix}.wk", f"{prefix}.weights_proj"),
        key_norm=_vector(source, f"{prefix}.k_norm.weight"),
        key_norm_bias=_vector(source, f"{prefix}.k_norm.bias"),
    )


def _mlp(source: Source, prefix: str) -> MlpWeights:
    return MlpWeights(
        gate_up=_stack(source, f"{prefix}.gate_proj", f"{prefix}.up_proj"), down=source.linear(f"{prefix}.down_proj")
    )


def _moe(config: ModelConfig, source: Source, prefix: str) -> MoeWeights:
    return MoeWeights(
        gate=source.tensor(f"{prefix}.gate.weight"),
        correction=_vector(source, f"{prefix}.gate.e_score_correction_bias"),
        experts=source.experts(config, f"{prefix}.experts"),
        shared=_mlp(source, f"{prefix}.shared_experts"),
    )


def _stack(source: Source, first: str, second: str) -> Weight:
    """Two matrices that read the same input as one; side by side where one is stored in another format."""
    parts = source.linear(first), source.linear(second)
    if isinstance(parts[0], torch.Tensor) and isinstance(parts[1], torch.Tensor):
        return torch.cat([parts[0], parts[1]])
    return StackedWeight(parts)


def _vector(source: Source, name: str) -> torch.Tensor:
    """Vectors are float32: widening them in every forward would cost more than the bytes they take."""
    return source.tensor(name).float()
