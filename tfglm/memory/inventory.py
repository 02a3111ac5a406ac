"""What a checkpoint holds, as far as its size in memory goes: from headers, or from the published configuration.

Torch-free, and no tensor is read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfglm.checkpoint.config import ModelConfig, require_folder
from tfglm.checkpoint.jsonfile import read_object
from tfglm.checkpoint.names import TensorSpec, expected_tensors
from tfglm.checkpoint.presets import preset_config
from tfglm.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, TensorEntry, read_header
from tfglm.errors import CheckpointError
from tfglm.formats.exl3_tensors import find_linears

PUBLISHED_BITS, PUBLISHED_MTP_BITS = 2.75, 4.0
"""Mean widths of the routed experts of the trunk and of the MTP layer in Mia-AiLab/GLM-5.3-EXL3-2.75bpw-TensorFold."""

EXPERT = re.compile(r"\.experts\.(\d+)\.")

Alike = Counter[tuple[str, TensorSpec, float | None]]
"""Tensors that weigh the same by one of their names, shape before quantisation and bits of EXL3, with their number."""


@dataclass(frozen=True)
class Inventory:
    """config, and the bits a weight of every matrix that is stored as EXL3, by its name without ".weight".

    shared_scales: gate and up of all experts of a layer have the same input scales, of which one copy is kept; headers
    cannot say so.
    """

    name: str
    config: ModelConfig
    exl3_bits: Mapping[str, float]
    shared_scales: bool = False
    _alike: dict[int, Alike] = field(default_factory=dict, repr=False, compare=False)

    def alike(self, ways: int) -> Alike:
        """All tensors, with those counted together that weigh the same on every rank: the experts of a layer whose
        numbers agree modulo `ways`."""
        if ways not in self._alike:
            self._alike[ways] = Counter(
                (
                    EXPERT.sub(lambda match: f".experts.{int(match.group(1)) % ways}.", tensor),
                    spec,
                    self.exl3_bits.get(tensor.removesuffix(".weight")),
                )
                for tensor, spec in expected_tensors(self.config).items()
            )
        return self._alike[ways]


def of_folder(folder: Path) -> Inventory:
    """The checkpoint in `folder`. Raises ConfigError and CheckpointError; names and shapes are not compared with the
    configuration, as `Checkpoint.open` does."""
    require_folder(folder)
    config = ModelConfig.from_file(folder / "config.json")
    headers = {entry.name: entry for file in _shards(folder) for entry in _entries(file)}
    bits = {name: linear.bits for name, linear in find_linears(headers).items()}
    return Inventory(folder.resolve().name, config, bits)


def published(name: str) -> Inventory:
    """The published GLM-5.3, its routed experts quantised to 2.75 bits on average."""
    config = ModelConfig.from_dict(preset_config("full-layers", {"num_hidden_layers": 78, "n_routed_experts": 256}))
    mtp = f"model.layers.{config.num_hidden_layers}."
    bits = {
        tensor.removesuffix(".weight"): PUBLISHED_MTP_BITS if tensor.startswith(mtp) else PUBLISHED_BITS
        for tensor in expected_tensors(config)
        if ".mlp.experts." in tensor
    }
    return Inventory(name, config, bits, shared_scales=True)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / SINGLE_FILE]
    files = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index}: weight_map is no object of tensor names and file names")
    return [folder / file for file in sorted(set(files.values()))]


def _entries(file: Path) -> list[TensorEntry]:
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from None
    try:
        return read_header(fd, file)
    finally:
        os.close(fd)
