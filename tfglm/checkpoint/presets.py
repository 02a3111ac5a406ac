"""The sizes synthetic checkpoints come in: each a config.json with every field of GLM-5.3's own, scaled."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError

ADDED_TOKENS = 36
PAD_COLUMNS = 24
"""Columns of lm_head past the last token, as in GLM-5.3 (154880 - 154856)."""

_REAL: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": None,  # by the frequency rule, written out
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": None,  # by first_k_dense_replace, written out
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # For tests: 5 heads (no equal share for three ranks), 3 expert blocks of 128 columns, a selection far below the
    # window, full indexer layers 0, 1, 2, 6 and shared ones 3, 4, 5, 7. 16 index heads keep exact score ties rare.
    "tiny": {
        "vocab_size": 1536,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "intermediate_size": 256,
        "moe_intermediate_size": 384,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "num_attention_heads": 5,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 24,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 32,
        "max_position_embeddings": 8192,
    },
    # For loading time and memory.
    "small": {
        "vocab_size": 16384,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1024,
        "moe_intermediate_size": 640,
        "n_routed_experts": 10,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "head_dim": 48,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 256,
        "max_position_embeddings": 32768,
    },
    # GLM-5.3's own widths with few layers and experts; with the override n_routed_experts=256 a layer is whole.
    "full-layers": {"num_hidden_layers": 4, "n_routed_experts": 16},
}


def preset_config(preset: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a preset with some fields replaced, validated. Raises ConfigError for what is not one."""
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}; there are {', '.join(PRESETS)}")
    raw = {**_REAL, **PRESETS[preset]}
    for name in overrides:
        if name not in raw:
            near = difflib.get_close_matches(name, raw, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(sorted(raw))}"
            raise ConfigError(f"{name} is no field of config.json that a synthetic checkpoint can set; {hint}")
    raw |= overrides
    smallest = 256 + ADDED_TOKENS + PAD_COLUMNS
    if type(raw["vocab_size"]) is int and raw["vocab_size"] < smallest:
        raise ConfigError(
            f"vocab_size is {raw['vocab_size']}; at least {smallest} are needed "
            f"(256 bytes, {ADDED_TOKENS} added tokens, {PAD_COLUMNS} pad columns)"
        )
    base = raw["vocab_size"] - ADDED_TOKENS - PAD_COLUMNS if type(raw["vocab_size"]) is int else 0
    raw["eos_token_id"] = [base, base + 7, base + 9]  # <|endoftext|>, <|user|>, <|observation|>
    raw["pad_token_id"] = base
    config = ModelConfig.from_dict(raw, source=f"preset {preset}")
    raw["indexer_types"] = list(config.indexer_types)
    raw["mlp_layer_types"] = list(config.mlp_layer_types)
    raw["num_key_value_heads"] = config.num_attention_heads
    raw["qk_head_dim"] = config.qk_head_dim
    return dict(sorted(raw.items()))
