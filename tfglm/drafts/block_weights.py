"""Reading the tensors of a block drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tfglm.checkpoint.safetensors import TensorEntry
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import expected_shapes, tensor_entries
from tfglm.errors import CheckpointError

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


def read_weights(folder: Path, config: BlockConfig, target_layers: int) -> tuple[dict[str, torch.Tensor], BlockConfig]:
    """The tensors of every safetensors file in a folder, checked against the config, which comes back with the layers
    that are really read: a drafter may leave the target's last stream unsaid, and its `fc` is one stream wider then.

    Raises CheckpointError for missing, extra or misshapen tensors.
    """
    entries = tensor_entries(folder)
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


def _read(entry: TensorEntry) -> torch.Tensor:
    data = bytearray(entry.nbytes)
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        if file.readinto(data) != entry.nbytes:
            raise CheckpointError(f"{entry.file} ends inside tensor {entry.name}")
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
