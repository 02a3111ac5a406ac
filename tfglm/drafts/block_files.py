"""The tensors of a block drafter: names and shapes of the published files, and what a rank holds. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.safetensors import TensorEntry, read_header
from tfglm.drafts.block_config import BlockConfig
from tfglm.errors import CheckpointError
from tfglm.layout import run_of

Shapes = dict[str, tuple[int, ...]]

HOST_TABLES = ("markov_head.", "confidence_head.", "candidate_selector.predecessor", "candidate_selector.successor")
"""Tensors that are read on the host of rank 0, which alone chooses drafts, a few rows at a time."""

GPU_FORMAT = "q4"
"""Matrices on a GPU: 4 bits with a scale and a bias for every 64 columns."""

MLP_UNIT = 64
"""Columns of the MLP that stay together: a group of the 4-bit format."""

_CUT_AXIS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}


def expected_shapes(config: BlockConfig, taps: int) -> Shapes:
    """Every tensor of a drafter that reads `taps` streams. Embedding and head are the target's own."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    shapes: Shapes = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (width,),
            f"{prefix}self_attn.k_norm.weight": (width,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
        for conv in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            groups = hidden // config.conv_group
            shapes[f"{prefix}{conv}.base_kernel"] = (2, config.conv_taps, hidden)
            shapes[f"{prefix}{conv}.kernel_projection.weight"] = (2 * config.conv_taps * groups, hidden)
    return shapes | (_dflash2(config) if config.kind == "dflash2" else _dspark(config))


def _dspark(config: BlockConfig) -> Shapes:
    rank, hidden, shapes = config.markov_rank, config.hidden_size, Shapes()
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.vocab_size, rank)
        if config.markov_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif config.markov_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_with_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _dflash2(config: BlockConfig) -> Shapes:
    rank = config.selector_rank
    return {
        "candidate_selector.predecessor_codebook": (config.vocab_size, rank),
        "candidate_selector.successor_codebook": (config.vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, config.hidden_size),
    }


def held_part(config: BlockConfig, name: str, shape: Sequence[int], ranks: int, rank: int) -> tuple[slice, ...]:
    """What a rank holds of a tensor: rows of q, k, v, gate and up, columns of o and down; everything else whole."""
    whole = [slice(0, size) for size in shape]
    linear = name.rpartition(".weight")[0].rpartition(".")[2]
    if linear in _CUT_AXIS:
        axis, things, unit = _CUT_AXIS[linear], config.num_key_value_heads, 1
        if linear in ("gate_proj", "up_proj", "down_proj"):
            things, unit = config.intermediate_size, MLP_UNIT
        start, stop = (edge * shape[axis] // things for edge in run_of(things, unit, ranks, rank))
        whole[axis] = slice(start, stop)
    return tuple(whole)


def held_heads(config: BlockConfig, ranks: int, rank: int) -> int:
    """Key-value heads of a rank."""
    first, last = run_of(config.num_key_value_heads, 1, ranks, rank)
    return last - first


def page_rows(config: BlockConfig) -> int:
    """Rows of a page that a block after its end can attend to: the last ones."""
    return min(PAGE, config.window)


def pages_of_window(config: BlockConfig) -> int:
    """Pages that the rows before a page's end lie in, as far as a block attends to them."""
    return -(-config.window // PAGE)


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Where every tensor of a drafter's folder lies. Raises CheckpointError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors file; a drafter's folder has config.json and its weights")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            entries |= {entry.name: entry for entry in read_header(fd, file)}
        finally:
            os.close(fd)
    return entries
