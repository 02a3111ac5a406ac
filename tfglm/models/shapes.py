"""The products a model makes, for checking that a machine computes them row by row."""

from __future__ import annotations

from collections.abc import Iterable

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.ops.reference import list_width
from tfglm.ops.rows import MIN_COLUMNS, Shapes


def shapes_of(config: ModelConfig, quantised: Iterable[tuple[int, int]] = ()) -> Shapes:
    """quantised: (inputs, outputs), padded, of the linears that are not plain matrices."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    index_heads, index_width = config.index_n_heads, config.index_head_dim
    linears = set(quantised) | {
        (hidden, config.q_lora_rank + latent + rotary),
        (config.q_lora_rank, heads * config.qk_head_dim),
        (config.q_lora_rank, index_heads * index_width),
        (hidden, index_width + index_heads),
        (heads * value, hidden),
        (hidden, config.n_routed_experts),
        (hidden, config.vocab_size),
    }
    inners = {config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts}
    if "dense" in config.mlp_layer_types:
        inners.add(config.intermediate_size)
    for inner in inners:
        linears |= {(hidden, 2 * inner), (inner, hidden)}
    widths, width = set(), MIN_COLUMNS
    while width < list_width(config.index_topk):
        widths.add(width)
        width *= 2
    widths.add(width)
    return Shapes(
        linears=frozenset(linears),
        experts=frozenset({(hidden, 2 * config.moe_intermediate_size), (config.moe_intermediate_size, hidden)}),
        groups=frozenset({(heads, nope, latent), (heads, latent, value)}),
        scores=frozenset({(heads, inner, width) for width in widths for inner in (latent, rotary)}),
        sums=frozenset({(heads, width, latent) for width in widths} | {(1, index_heads, PAGE)}),
        shared=frozenset({(index_heads, index_width, PAGE)}),
        widths=frozenset(
            widths | inners | {hidden, config.q_lora_rank, latent, rotary // 2, index_width, config.n_routed_experts}
        ),
    )
