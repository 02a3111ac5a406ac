"""The tensors of a block drafter: names and shapes of the published files, and their reading."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from tfglm.checkpoint.safetensors import TensorEntry, read_header
from tfglm.drafts.block_config import BlockConfig
from tfglm.errors import CheckpointError

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}

Shapes = dict[str, tuple[int, ...]]


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


def read_weights(folder: Path, config: BlockConfig, target_layers: int) -> tuple[dict[str, torch.Tensor], BlockConfig]:
    """The tensors of every safetensors file in a folder, checked against the config, which comes back with the layers
    that are really read: a drafter may leave the target's last stream unsaid, and its `fc` is one stream wider then.

    Raises CheckpointError for missing, extra or misshapen tensors.
    """
    entries = _entries(folder)
    fc = entries.get("fc.weight")
    layers = config.layers
    if fc is not None and fc.shape[-1] == (len(layers) + 1) * config.hidden_size and layers[-1] < target_layers:
        layers = (*layers, target_layers)
    if layers[-1] > target_layers:
        raise CheckpointError(f"{folder} reads layer {layers[-1]} of its target; this checkpoint has {target_layers}")
    config = replace(config, layers=layers)
    expected = expected_shapes(config, len(layers))
    missing, extra = sorted(expected.keys() - entries.keys()), sorted(entries.keys() - expected.keys())
    if missing or extra:
        names = ", ".join((missing or extra)[:3])
        raise CheckpointError(f"{folder} {'lacks' if missing else 'has no place for'} the tensors {names}")
    for name, shape in expected.items():
        if entries[name].shape != shape or entries[name].dtype not in DTYPES:
            raise CheckpointError(
                f"{entries[name].file}: tensor {name} is {entries[name].dtype} {list(entries[name].shape)}; its config "
                f"asks for {list(shape)} in {', '.join(DTYPES)}"
            )
    return {name: _read(entry) for name, entry in entries.items()}, config


def _entries(folder: Path) -> dict[str, TensorEntry]:
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


def _read(entry: TensorEntry) -> torch.Tensor:
    data = bytearray(entry.nbytes)
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        if file.readinto(data) != entry.nbytes:
            raise CheckpointError(f"{entry.file} ends inside tensor {entry.name}")
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
