"""The products a model makes, for checking that a machine computes them row by row."""

from __future__ import annotations

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.ops.reference import list_width
from tfglm.ops.rows import TILE, Shapes


def shapes_of(config: ModelConfig) -> Shapes:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    index_heads, index_width = config.index_n_heads, config.index_head_dim
    linears = {
        (hidden, config.q_lora_rank + latent + rotary),
        (config.q_lora_rank, heads * config.qk_head_dim),
        (config.q_lora_rank, index_heads * index_width),
        (hidden, index_width + index_heads),
        (heads * value, hidden),
        (hidden, config.n_routed_experts),
        (hidden, config.vocab_size),
    }
    inners = {config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts}
    for inner in inners | ({config.intermediate_size} if "dense" in config.mlp_layer_types else set()):
        linears |= {(hidden, 2 * inner), (inner, hidden)}
    widths, width = set(), TILE
    while width < list_width(config.index_topk):
        widths.add(width)
        width *= 2
    widths.add(width)
    batches = {(index_heads, index_width, PAGE), (1, index_heads, PAGE)}
    for width in widths:
        batches |= {(heads, latent, width), (heads, rotary, width), (heads, width, latent)}
    return Shapes(
        linears=frozenset(linears),
        heads=frozenset({(heads, nope, latent), (heads, latent, value)}),
        batches=frozenset(batches),
        widths=frozenset(widths | {hidden, config.q_lora_rank, latent, index_width, config.n_routed_experts}),
    )
