"""The model that is trained: GLM-5.3's own config.json with small widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config

TINY: Mapping[str, Any] = {
    "vocab_size": 1920,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "mlp_layer_types": None,
    "intermediate_size": 256,
    "moe_intermediate_size": 512,  # 4 blocks of 128 columns: 2, 1 and 1 on three ranks
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,  # 3, 3 and 2 on three ranks
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 256,
    "index_topk_freq": 2,  # with offset 2: full, full, shared, full, shared
    "index_skip_topk_offset": 2,
    "indexer_types": None,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_theta": 100000, "rope_type": "default"},
}
MICRO: Mapping[str, Any] = TINY | {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "intermediate_size": 64,
    "index_topk": 16,
    "max_position_embeddings": 1024,
}
"""For tests on a CPU."""


def raw_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model with these fields; the rest is GLM-5.3's own."""
    return preset_config("tiny", dict(fields))


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(raw_config(fields))
