"""Random checkpoints in the exact layout of the published ones: config, shards, index, tokenizer, chat template.

The same (preset, seed, overrides) give the same bytes on every run and machine: each tensor has its own Philox stream,
keyed by seed and tensor name, and the step from random bits to bfloat16 is integer arithmetic and one table.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import TensorSpec, expected_tensors
from tfglm.checkpoint.presets import ADDED_TOKENS, PAD_COLUMNS, PRESETS, preset_config
from tfglm.checkpoint.safetensors import INDEX_FILE, ITEM_BYTES, build_header
from tfglm.checkpoint.synth_exl3 import quantization_config, with_exl3_experts
from tfglm.checkpoint.vocabulary import build_tokenizer, tokenizer_config
from tfglm.checkpoint.weights import tensor_blocks
from tfglm.errors import CheckpointError, ConfigError

__all__ = ["PRESETS", "write_checkpoint"]

DEFAULT_SHARD_BYTES = 5 << 30
CONFIG_FILE = "config.json"


def write_checkpoint(
    path: str | os.PathLike[str],
    preset: str = "tiny",
    seed: int = 0,
    *,
    shard_bytes: int | None = None,
    expert_bits: float | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> ModelConfig:
    """Write a random checkpoint into the folder `path` and return its config.

    overrides replace fields of config.json (num_hidden_layers=4). shard_bytes: largest shard, by default a third of the
    whole or 5 GiB. expert_bits: make the routed experts EXL3 of this mean width instead of BF16. progress(done, total)
    is called in bytes of weights. A folder that is not empty is refused unless `force`, which replaces an older
    checkpoint in it. Files appear under their names when all are complete, config.json last. Raises ConfigError or
    CheckpointError.
    """
    raw = preset_config(preset, overrides)
    if expert_bits is not None:
        raw["quantization_config"] = quantization_config(expert_bits)
    config = ModelConfig.from_dict(raw)
    specs = expected_tensors(config)
    if expert_bits is not None:
        specs = with_exl3_experts(specs, config, expert_bits, seed)
    total = sum(_nbytes(spec) for spec in specs.values())
    if shard_bytes is None:
        shard_bytes = min(DEFAULT_SHARD_BYTES, -(-total // 3))
    shards = _cut(specs, shard_bytes)
    target = Path(path)
    _check_target(target, total, force)
    try:
        with tempfile.TemporaryDirectory(prefix=".synth-", dir=target) as scratch:
            _write_shards(Path(scratch), specs, shards, seed, lambda done: progress and progress(done, total))
            _write_small_files(Path(scratch), raw)
            _move(Path(scratch), target)
    except OSError as exc:
        raise CheckpointError(f"{target}: writing the checkpoint failed: {exc.strerror}") from exc
    return config


def _write_shards(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    shards: list[list[str]],
    seed: int,
    progress: Callable[[int], object],
) -> None:
    """Write every shard and the index, one block of one tensor in memory at a time."""
    done = 0
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        with (folder / file).open("wb") as out:
            out.write(build_header({name: (specs[name].dtype, specs[name].shape) for name in names}))
            for name in names:
                for block in tensor_blocks(name, specs[name], seed):
                    out.write(block)
                    done += len(block)
                    progress(done)
    index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def _nbytes(spec: TensorSpec) -> int:
    count = ITEM_BYTES[spec.dtype]
    for width in spec.shape:
        count *= width
    return count


def _cut(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Tensor names by shard, in order; the wider dtype first within a shard, so that every tensor starts aligned."""
    if shard_bytes < 1:
        raise ConfigError(f"the shard size is {shard_bytes} bytes; at least 1 is needed")
    shards: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not shards or _nbytes(spec) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= _nbytes(spec)
    return [sorted(names, key=lambda name: -ITEM_BYTES[specs[name].dtype]) for names in shards]


def _check_target(target: Path, total: int, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a folder to write the checkpoint into is needed")
    if target.exists() and any(target.iterdir()) and not force:
        raise CheckpointError(
            f"{target} is not empty; choose another folder, or replace the checkpoint in it with --force"
        )
    if target.exists() and not _only_checkpoint(target):
        raise CheckpointError(f"{target} holds files but no checkpoint to replace; choose another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
    except OSError as exc:
        raise CheckpointError(f"{target} cannot be made: {exc.strerror}") from None
    if free < total:
        raise CheckpointError(f"{target} needs {total / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free there")


def _only_checkpoint(folder: Path) -> bool:
    """Whether the folder is empty or holds a checkpoint, whole or left by a run that was stopped."""
    names = {path.name for path in folder.iterdir()}
    shards = any(folder.glob("model*.safetensors"))
    return bool(names & {CONFIG_FILE, INDEX_FILE}) or shards or all(name.startswith(".synth-") for name in names)


def _write_small_files(folder: Path, raw: Mapping[str, Any]) -> None:
    _write_json(folder / CONFIG_FILE, raw)
    generation = {
        "eos_token_id": raw["eos_token_id"],
        "pad_token_id": raw["pad_token_id"],
        "temperature": 1.0,
        "top_p": 0.95,
    }
    _write_json(folder / "generation_config.json", generation)
    tokenizer = build_tokenizer(raw["vocab_size"] - ADDED_TOKENS - PAD_COLUMNS)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(raw["max_position_embeddings"]))
    template = files("tfglm.checkpoint").joinpath("data/chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _move(folder: Path, target: Path) -> None:
    """Give the finished files their names; an older checkpoint goes first, its config.json before all else."""
    for old in (target / CONFIG_FILE, target / INDEX_FILE, *target.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    names = sorted(file.name for file in folder.iterdir() if file.name != CONFIG_FILE)
    for name in (*names, CONFIG_FILE):
        (folder / name).replace(target / name)
