"""The products a model makes, for checking that a machine computes them row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.formats.exl3_code import BLOCK
from tfglm.layout import Family, Layout, Share
from tfglm.ops.reference import list_width
from tfglm.ops.rows import MIN_COLUMNS, Shapes


def shapes_of(
    config: ModelConfig, quantised: Iterable[tuple[int, int]] = (), share: Share | None = None, cp: bool = False
) -> Shapes:
    """quantised: (inputs, outputs), padded, of the linears that are not plain matrices. share: of a rank that holds a
    part of the model only. cp: it attends for all ranks' heads too (models/context.py)."""
    held = share or Share(Layout.of(config, 1), 0)
    hidden, latent = config.hidden_size, config.kv_lora_rank
    nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    index_heads, index_width = config.index_n_heads, config.index_head_dim
    [heads], [vocabulary] = _sizes(held, Family.HEADS, [0]), _sizes(held, Family.VOCABULARY, [0])
    attending = {heads} | ({held.layout.largest(Family.HEADS) * held.layout.ranks} if cp else set())
    routed, shared, dense = _inner_sizes(config, held)
    linears = set(quantised) | {
        (hidden, config.q_lora_rank + latent + rotary),
        (config.q_lora_rank, heads * config.qk_head_dim),
        (config.q_lora_rank, index_heads * index_width),
        (hidden, index_width + index_heads),
        (heads * value, hidden),
        (hidden, config.n_routed_experts),
        (hidden, vocabulary),
    }
    for inner in routed | shared | dense:
        linears |= {(hidden, 2 * inner), (inner, hidden)}
    widths, width = set(), MIN_COLUMNS
    while width < list_width(config.index_topk):
        widths.add(width)
        width *= 2
    widths.add(width)
    experts = {shape for inner in routed for shape in ((hidden, 2 * inner), (inner, hidden))}
    return Shapes(
        linears=_not_empty(linears),
        experts=_not_empty(experts),
        groups=_not_empty({(heads, nope, latent), (heads, latent, value)}),
        scores=_not_empty({(n, inner, width) for n in attending for width in widths for inner in (latent, rotary)}),
        sums=_not_empty({(n, width, latent) for n in attending for width in widths} | {(1, index_heads, PAGE)}),
        shared=frozenset({(index_heads, index_width, PAGE)}),
        widths=frozenset(
            widths
            | {inner for inner in routed | shared | dense if inner}
            | {hidden, config.q_lora_rank, latent, rotary // 2, index_width, config.n_routed_experts}
        ),
    )


def quantised_shapes(checkpoint: Checkpoint, share: Share) -> set[tuple[int, int]]:
    """(inputs, outputs), padded, of the parts a rank holds of the linears that are stored as EXL3."""
    shapes = set()
    for name in checkpoint.linears:
        rows, columns = share.part(name, checkpoint.shapes[name])
        shapes.add(tuple(-(-(kept.stop - kept.start) // BLOCK) * BLOCK for kept in (columns, rows)))
    return {(inputs, outputs) for inputs, outputs in shapes if inputs and outputs}


def _inner_sizes(config: ModelConfig, share: Share) -> tuple[set[int], set[int], set[int]]:
    """Inner columns held of routed experts, shared experts and dense MLPs, over all layers. Experts of one layer that
    differ in them are padded to the widest."""
    routed, shared, dense = set(), set(), set()
    # The MTP layer is sparse.
    layers = [*enumerate(config.mlp_layer_types), (config.num_hidden_layers, "sparse")]
    for layer, kind in layers:
        if kind == "sparse":
            routed.add(max(_sizes(share, Family.ROUTED, [layer], range(config.n_routed_experts))))
            shared |= _sizes(share, Family.SHARED, [layer])
        else:
            dense |= _sizes(share, Family.DENSE, [layer])
    return routed, shared, dense


def _sizes(share: Share, family: Family, layers: Iterable[int], experts: Iterable[int] = (0,)) -> set[int]:
    spans = (share.layout.share(family, layer, share.rank, expert) for layer in layers for expert in experts)
    return {stop - start for start, stop in spans}


S = TypeVar("S", bound=tuple[int, ...])


def _not_empty(shapes: set[S]) -> frozenset[S]:
    """Without the products of an empty share, which nobody makes."""
    return frozenset(shape for shape in shapes if all(shape))
