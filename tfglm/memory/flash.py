"""What GLM-5.3-Flash (`glm5_next`) weighs, from its published configuration. Torch-free.

The engine does not run this model yet; its plan says what two or three machines must have. Two rules differ from
GLM-5.3's: an index key is kept for a pool of four tokens, and the 34 layers of linear attention have a state of fixed
size a request instead of rows a token.

Sources: transformers' glm5_next, and the tensor lists of Mia-AiLab/GLM-5.3-Flash-EXL3-4bpw-TensorFold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tfglm.checkpoint.names import TensorSpec, layer_prefix
from tfglm.errors import ConfigError
from tfglm.formats.latent import KvFormat, row_bytes
from tfglm.layout import Family, Layout, Placement
from tfglm.memory.inventory import EXPERT, Alike

EXL3_BITS = 4.0
VISION_BYTES = 1_127_000_000
"""The 347 tensors of the vision tower in bf16, whole on rank 0."""
DFLASH2_WEIGHTS = 1_171_080_448
"""Weights of incoai/GLM-5.3-Flash-DFlash2: its 2,342,169,800 bytes are these in bf16 and a header."""


@dataclass(frozen=True)
class FlashConfig:
    """Sizes of zai-org/GLM-5.3-Flash, under the names its config.json gives them. Every fourth layer has latent
    attention; the others, linear_layers, have linear attention with states [heads, head_dim, head_dim] float32."""

    hidden_size: int = 4096
    vocab_size: int = 154880
    num_hidden_layers: int = 45
    max_position_embeddings: int = 1048576
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 288
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_kpool: int = 4
    linear_num_heads: int = 64
    linear_head_dim: int = 128
    short_conv_kernel_size: int = 4
    hc_mult: int = 4
    num_nextn_predict_layers: int = 1

    @property
    def latent_layers(self) -> int:
        return self.num_hidden_layers // 4

    @property
    def linear_layers(self) -> int:
        return self.num_hidden_layers - self.latent_layers

    def is_linear(self, layer: int) -> bool:
        """Of the MTP layer too, which has latent attention."""
        return layer % 4 != 3 and layer < self.num_hidden_layers


@dataclass(frozen=True)
class FlashInventory:
    """The published model with its routed experts at EXL3_BITS, as `Inventory` is GLM-5.3."""

    name: str = "flash"
    config: FlashConfig = FlashConfig()

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        config = self.config
        wide = TensorSpec((config.vocab_size, config.hidden_size))
        found = {"model.embed_tokens.weight": wide, "lm_head.weight": wide}
        found["model.norm.weight"] = TensorSpec((config.hidden_size,))
        for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
            found |= _layer(config, layer)
        return found

    def alike(self, ways: int) -> Alike:
        return Counter(
            (
                EXPERT.sub(lambda match: f".experts.{int(match.group(1)) % ways}.", tensor),
                spec,
                EXL3_BITS if ".mlp.experts." in tensor else None,
            )
            for tensor, spec in self.tensors.items()
        )

    def layout(self, ranks: int) -> Layout:
        return Layout.of(self.config, ranks, Placement.BY_LAYER)

    def bytes_per_token(self, kv: str, *, mtp: bool) -> int:
        """Latent rows of the layers that have them, and a pooled index key every index_kpool tokens, kept in bf16."""
        config = self.config
        latent = row_bytes(KvFormat(kv), config.kv_lora_rank, 0, config.index_head_dim).latent
        pooled = 2 * config.index_head_dim // config.index_kpool
        return (config.latent_layers + int(mtp)) * (latent + pooled)

    def bytes_per_request(self, rank: int, ranks: int) -> int:
        """States of the linear layers in two copies, so that a refused draft is undone, and their last rows of
        convolution: three raw rows of q, k and v in bf16."""
        config = self.config
        first, last = self.layout(ranks).share(Family.HEADS, 0, rank)
        heads, width = last - first, config.linear_head_dim
        state = 4 * heads * width * width
        rows = 2 * (config.short_conv_kernel_size - 1) * 3 * heads * width
        return config.linear_layers * (2 * state + rows)


def require_possible(kv: str, context_parallel: bool) -> None:
    """Raise ConfigError for what the model cannot have."""
    if context_parallel:
        raise ConfigError("--cp is 1; GLM-5.3-Flash takes 0: its caches are a tenth of GLM-5.3's and are not divided")
    if kv not in (KvFormat.BF16.value, KvFormat.FP8.value):
        raise ConfigError(f"--kv is {kv}; GLM-5.3-Flash takes bf16 or fp8")


def _layer(config: FlashConfig, layer: int) -> dict[str, TensorSpec]:
    prefix, hidden = layer_prefix(layer), config.hidden_size
    attention = _linear_attention if config.is_linear(layer) else _latent_attention
    found = {f"self_attn.{name}": shape for name, shape in attention(config).items()}
    if layer < config.first_k_dense_replace:
        found |= _swiglu("mlp", hidden, config.intermediate_size)
    else:
        found |= {
            "mlp.gate.weight": (config.n_routed_experts, hidden),
            "mlp.gate.e_score_correction_bias": (config.n_routed_experts,),
        }
        for expert in range(config.n_routed_experts):
            found |= _swiglu(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)
        found |= _swiglu("mlp.shared_experts", hidden, config.moe_intermediate_size * config.n_shared_experts)
    found |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if layer < config.num_hidden_layers:
        mixes = config.hc_mult * (config.hc_mult + 2)
        for site in ("attn", "ffn"):
            found |= {f"hc_{site}_fn": (mixes, config.hc_mult * hidden), f"hc_{site}_base": (mixes,)}
    else:
        found |= {"eh_proj.weight": (hidden, 2 * hidden)}
        found |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {f"{prefix}.{name}": TensorSpec(shape) for name, shape in found.items()}


Shapes = dict[str, tuple[int, ...]]


def _linear_attention(config: FlashConfig) -> Shapes:
    hidden, width = config.hidden_size, config.linear_head_dim
    inner = config.linear_num_heads * width
    return {
        **{f"{name}_proj.weight": (inner, hidden) for name in "qkv"},
        **{f"{name}_conv1d.weight": (inner, config.short_conv_kernel_size) for name in "qkv"},
        **{f"{name}_a_proj.weight": (width, hidden) for name in "fg"},
        **{f"{name}_b_proj.weight": (inner, width) for name in "fg"},
        "b_proj.weight": (config.linear_num_heads, hidden),
        "o_norm.weight": (width,),
        "o_proj.weight": (hidden, inner),
    }


def _latent_attention(config: FlashConfig) -> Shapes:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.index_head_dim
    return {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * config.qk_nope_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.kv_lora_rank, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
        "indexer.wq_b.weight": (config.index_n_heads * width, config.q_lora_rank),
        "indexer.wk.weight": (width, hidden),
        "indexer.weights_proj.weight": (config.index_n_heads, hidden),
        "indexer.index_kpool_compress_gate.weight": (width, hidden),
    }


def _swiglu(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
