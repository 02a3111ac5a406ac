"""A trained model as a checkpoint folder: published names, bf16 shards, config, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import expected_tensors
from tfglm.checkpoint.safetensors import INDEX_FILE, build_header
from tfglm.checkpoint.vocabulary import tokenizer_config
from training.model import Trained

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
SHARD_BYTES = 15 << 20
_OUTSIDE = ("lm_head.",)


def checkpoint_tensors(model: Trained) -> dict[str, Tensor]:
    """Every tensor under its published name, experts unstacked, in the published dtype, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        name = name if name.startswith(_OUTSIDE) else f"model.{name}"
        if ".experts." in name:
            head, _, projection = name.rpartition(".")
            for expert, matrix in enumerate(value):
                tensors[f"{head}.{expert}.{projection}.weight"] = matrix
        else:
            tensors[name] = value
    specs = expected_tensors(model.config)
    missing, extra = specs.keys() - tensors.keys(), tensors.keys() - specs.keys()
    assert not missing and not extra, f"missing {sorted(missing)[:3]}, extra {sorted(extra)[:3]}"
    return {name: tensors[name].detach().to("cpu", DTYPES[spec.dtype]) for name, spec in specs.items()}


def load_tensors(model: Trained, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `checkpoint_tensors`."""
    state = {}
    for name, value in model.state_dict().items():
        name_there = name if name.startswith(_OUTSIDE) else f"model.{name}"
        if ".experts." in name:
            head, _, projection = name_there.rpartition(".")
            state[name] = torch.stack([tensors[f"{head}.{e}.{projection}.weight"] for e in range(len(value))])
        else:
            state[name] = tensors[name_there]
    model.load_state_dict(state)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file; the tensors' dtypes are bfloat16 or float32."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    wide_first = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    with path.open("wb") as out:
        out.write(build_header({name: (names[t.dtype], tuple(t.shape)) for name, t in wide_first.items()}))
        for tensor in wide_first.values():
            out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def write_shards(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def write_small_files(folder: Path, raw: Mapping[str, Any], tokenizer_json: str) -> None:
    """Everything of a checkpoint but its weights."""
    _write_json(folder / "config.json", raw)
    generation = {
        "eos_token_id": raw["eos_token_id"], "pad_token_id": raw["pad_token_id"], "temperature": 0.6, "top_p": 0.95,
    }  # fmt: skip
    _write_json(folder / "generation_config.json", generation)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(raw["max_position_embeddings"]))
    template = files("tfglm.checkpoint").joinpath("data/chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def export(model: Trained, raw: Mapping[str, Any], tokenizer_json: str, folder: Path) -> ModelConfig:
    """Write the whole checkpoint; returns its config."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, checkpoint_tensors(model))
    write_small_files(folder, raw, tokenizer_json)
    return ModelConfig.from_file(folder / "config.json")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
