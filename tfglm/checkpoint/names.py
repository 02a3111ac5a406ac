"""The tensors a `glm_moe_dsa` checkpoint holds: names, shapes, dtypes.

Names are those of the published safetensors files (experts unfused, one tensor each), as transformers' save_pretrained
writes them too. Every linear is stored [out, in]. All BF16 but the router's correction bias, which is F32.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfglm.checkpoint.config import ModelConfig


@dataclass(frozen=True)
class TensorSpec:
    """Shape, and dtype by its safetensors name."""

    shape: tuple[int, ...]
    dtype: str = "BF16"


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint before quantisation, in layer order; the MTP layer (number num_hidden_layers) last
    if there is one.

    The MTP layer uses the trunk's embedding and lm_head and holds no copy of them.
    """
    hidden = config.hidden_size
    specs = {
        "model.embed_tokens.weight": TensorSpec((config.vocab_size, hidden)),
        "lm_head.weight": TensorSpec((config.vocab_size, hidden)),
        "model.norm.weight": TensorSpec((hidden,)),
    }
    for layer, (indexer, mlp) in enumerate(zip(config.indexer_types, config.mlp_layer_types, strict=True)):
        specs |= _layer(config, layer_prefix(layer), full_indexer=indexer == "full", sparse=mlp == "sparse")
    if config.num_nextn_predict_layers:
        prefix = layer_prefix(config.num_hidden_layers)
        specs |= _layer(config, prefix, full_indexer=True, sparse=True)
        specs[f"{prefix}.enorm.weight"] = TensorSpec((hidden,))
        specs[f"{prefix}.hnorm.weight"] = TensorSpec((hidden,))
        specs[f"{prefix}.eh_proj.weight"] = TensorSpec((hidden, 2 * hidden))
        specs[f"{prefix}.shared_head.norm.weight"] = TensorSpec((hidden,))
    return specs


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def _layer(config: ModelConfig, prefix: str, *, full_indexer: bool, sparse: bool) -> dict[str, TensorSpec]:
    specs = {
        f"{prefix}.input_layernorm.weight": TensorSpec((config.hidden_size,)),
        f"{prefix}.post_attention_layernorm.weight": TensorSpec((config.hidden_size,)),
    }
    specs |= _attention(config, f"{prefix}.self_attn")
    if full_indexer:
        specs |= _indexer(config, f"{prefix}.self_attn.indexer")
    if sparse:
        specs |= _moe(config, f"{prefix}.mlp")
    else:
        specs |= _swiglu(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
    return specs


def _attention(config: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    return {
        f"{prefix}.q_a_proj.weight": TensorSpec((config.q_lora_rank, hidden)),
        f"{prefix}.q_a_layernorm.weight": TensorSpec((config.q_lora_rank,)),
        f"{prefix}.q_b_proj.weight": TensorSpec((heads * config.qk_head_dim, config.q_lora_rank)),
        f"{prefix}.kv_a_proj_with_mqa.weight": TensorSpec((latent + rope, hidden)),
        f"{prefix}.kv_a_layernorm.weight": TensorSpec((latent,)),
        f"{prefix}.kv_b_proj.weight": TensorSpec((kv_rows, latent)),
        f"{prefix}.o_proj.weight": TensorSpec((hidden, heads * config.v_head_dim)),
    }


def _indexer(config: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    width = config.index_head_dim
    return {
        f"{prefix}.wq_b.weight": TensorSpec((config.index_n_heads * width, config.q_lora_rank)),
        f"{prefix}.wk.weight": TensorSpec((width, config.hidden_size)),
        f"{prefix}.k_norm.weight": TensorSpec((width,)),
        f"{prefix}.k_norm.bias": TensorSpec((width,)),
        f"{prefix}.weights_proj.weight": TensorSpec((config.index_n_heads, config.hidden_size)),
    }


def _moe(config: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    specs = {
        f"{prefix}.gate.weight": TensorSpec((config.n_routed_experts, hidden)),
        f"{prefix}.gate.e_score_correction_bias": TensorSpec((config.n_routed_experts,), "F32"),
    }
    for expert in range(config.n_routed_experts):
        specs |= _swiglu(f"{prefix}.experts.{expert}", hidden, inner)
    return specs | _swiglu(f"{prefix}.shared_experts", hidden, inner * config.n_shared_experts)


def _swiglu(prefix: str, hidden: int, inner: int) -> dict[str, TensorSpec]:
    return {
        f"{prefix}.gate_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}.up_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}.down_proj.weight": TensorSpec((hidden, inner)),
    }
