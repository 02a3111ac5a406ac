"""A whole checkpoint: BF16 in, EXL3 experts out, one layer in memory at a time, resumable wherever it was stopped.

Only the routed experts change (they are all but 3 % of GLM-5.3); every other tensor is copied as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tfglm import __version__
from tfglm.checkpoint.names import layer_prefix
from tfglm.checkpoint.safetensors import INDEX_FILE
from tfglm.checkpoint.store import Checkpoint
from tfglm.errors import CheckpointError, ConfigError
from tfglm.formats.exl3_code import BLOCK
from tfglm.formats.exl3_tensors import QUANT_METHOD
from tfglm.models import moe
from tfglm.models.exl3_loader import experts_in_memory
from tfglm.models.mtp import load_mtp
from tfglm.models.source import CheckpointSource
from tfglm.models.weights import LayerWeights, ModelWeights, MoeWeights, load_layer
from tfglm.ops.base import PlainExperts, Routing
from tfglm.quantize import experts
from tfglm.quantize.allocate import budgets
from tfglm.quantize.encoder import search_on
from tfglm.quantize.experts import ExpertLayer, LayerReport
from tfglm.quantize.files import Manifest, header_names, read_shard, write_json, write_shard
from tfglm.quantize.place import Place, place
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.walk import Walk

REPORT_FILE = "quantize-report.json"
_REST_FILE = "model-rest.safetensors"
_EMBED = "model.embed_tokens.weight"
_MATRICES = 3  # of an expert
_CHUNK_ROWS = 2048  # that go through a feed-forward part together

Progress = Callable[[int, int], None]
"""Called with experts done and experts there are."""


@dataclass(frozen=True)
class Report:
    """A finished quantisation. bits: mean width of a routed expert's weight. nbytes: of all tensors of the output.
    layers: figures of each quantised layer."""

    recipe: Recipe
    bits: float
    nbytes: int
    calibration_tokens: int
    layers: tuple[LayerReport, ...]


def quantise_checkpoint(
    source: Checkpoint,
    target: Path,
    recipe: Recipe,
    sequences: Sequence[Sequence[int]],
    device: str = "cpu",
    progress: Progress = lambda done, total: None,
) -> Report:
    """Write `source` with its routed experts quantised into the folder `target`.

    sequences: token ids of the calibration text. device: cpu, cuda or auto. A run that was stopped goes on after the
    last finished layer, on the same machine to the same bytes. Raises ConfigError and CheckpointError.
    """
    _check(source, target)
    where = place(device, source.config, max(map(len, sequences)))
    manifest = Manifest.open(target, _job(source, recipe, sequences))
    with torch.inference_mode():
        _Run(source, manifest, recipe, where, sequences, progress).layers()
    rest = _REST_FILE
    if not manifest.done(rest):
        write_shard(target / rest, {name: source.read(name) for name in source.entries if _layer_of(name) is None})
        manifest.add(rest)
    return _finish(source, manifest, recipe, sequences)


class _Run:
    """The layers of one job, in order."""

    def __init__(
        self,
        source: Checkpoint,
        manifest: Manifest,
        recipe: Recipe,
        place: Place,
        sequences: Sequence[Sequence[int]],
        progress: Progress,
    ) -> None:
        self._checkpoint, self._config = source, source.config
        self._source = CheckpointSource(source)
        self._manifest = manifest
        self._recipe = recipe
        self._progress = progress
        self._place, self._ops = place, place.ops
        self._embed = self._source.tensor(_EMBED)
        self._walk = Walk(self._config, place, self._embed, sequences)
        count = self._config.n_routed_experts
        self._sparse = [n for n, kind in enumerate(self._config.mlp_layer_types) if kind == "sparse"]
        self._sparse += [self._config.num_hidden_layers] * self._config.num_nextn_predict_layers
        matrices = [_MATRICES * count] * len(self._sparse)
        self._budgets = dict(zip(self._sparse, budgets(recipe.bits, matrices, recipe.widths), strict=True))
        self._done = 0

    def layers(self) -> None:
        for number, layer in self._each_layer():
            inputs = self._walk.attention(layer)
            if not bool(torch.isfinite(inputs).all()):
                raise self._not_finite(number)
            name = _layer_file(number)
            if isinstance(layer.ffn, MoeWeights):
                self._walk.add(self._sparse_layer(number, layer.ffn, inputs))
            else:
                self._walk.add(self._in_chunks(partial(moe.mlp, self._ops, layer.ffn), inputs))
                if not self._manifest.done(name):
                    write_shard(self._manifest.folder / name, self._plain_tensors(number))
                    self._manifest.add(name)

    def _not_finite(self, number: int) -> CheckpointError:
        """What is to blame for rows in layer `number` that are no numbers."""
        before = self._plain_tensors(number - 1) if number else {_EMBED: self._embed}
        for name, tensor in (before | self._plain_tensors(number)).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return CheckpointError(
                    f"{name} has values that are not finite; fetch the file that holds it again ({INDEX_FILE} names it)"
                )
        return CheckpointError(
            f"{self._checkpoint.path}: the rows that enter layer {number} are not finite, the weights there are; "
            "quantise with other --calibration text, or with --device cpu if this was a GPU"
        )

    def _each_layer(self) -> Iterator[tuple[int, LayerWeights]]:
        """Every layer of the trunk, then the MTP layer, behind whose entrance the rows then stand."""
        for number in range(self._config.num_hidden_layers):
            yield number, self._place.layer(load_layer(self._config, self._source, number))
        if self._config.num_nextn_predict_layers:
            norm = self._source.tensor("model.norm.weight").float()
            trunk = ModelWeights(self._embed, (), norm, self._source.linear("lm_head"))
            weights = load_mtp(trunk, self._config, self._source)
            self._walk.enter_mtp(norm, weights)
            [layer] = weights.layer.layers
            yield self._config.num_hidden_layers, self._place.layer(layer)

    def _sparse_layer(self, number: int, weights: MoeWeights, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's branch through its quantised experts, which are made and stored unless they are there."""
        routing = self._routing(weights, inputs)
        name, count = _layer_file(number), self._config.n_routed_experts
        path, prefix = self._manifest.folder / name, f"{layer_prefix(number)}.mlp.experts"
        if self._manifest.done(name):
            tensors = read_shard(path)
            self._advance(count)
        else:
            assert isinstance(weights.experts, PlainExperts)
            tensors, report = self._quantise(number, prefix, inputs, routing, weights.experts)
            write_shard(path, tensors | self._plain_tensors(number))
            self._manifest.add(name, dataclasses.asdict(report), number)
        quantised = self._place.experts(experts_in_memory(tensors, prefix, count))
        weights = dataclasses.replace(weights, experts=quantised)
        return self._in_chunks(partial(moe.feed_forward, self._ops, self._config, weights), inputs)

    def _routing(self, weights: MoeWeights, inputs: torch.Tensor) -> Routing:
        parts = [
            self._ops.route(rows, weights.gate, weights.correction, self._config) for rows in inputs.split(_CHUNK_ROWS)
        ]
        return Routing(torch.cat([part.experts for part in parts]), torch.cat([part.weights for part in parts]))

    def _in_chunks(self, branch: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(rows) for rows in inputs.split(_CHUNK_ROWS)])

    def _quantise(
        self, number: int, prefix: str, inputs: torch.Tensor, routing: Routing, plain: PlainExperts
    ) -> tuple[dict[str, torch.Tensor], LayerReport]:
        started, finished = time.monotonic(), []
        layer = ExpertLayer(prefix, inputs, routing, plain, self._recipe, search_on(inputs.device))
        for expert in layer.quantised(layer.widths(self._budgets[number])):
            finished.append(expert)
            self._advance(1)
        tensors = {
            f"{prefix}.{expert}.{field}": tensor
            for expert, done in enumerate(finished)
            for field, tensor in done.tensors.items()
        }
        return tensors, experts.report(number, finished, time.monotonic() - started)

    def _plain_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """What a layer has besides routed experts, as stored."""
        names = [name for name in self._checkpoint.entries if _layer_of(name) == number and ".mlp.experts." not in name]
        return {name: self._checkpoint.read(name) for name in names}

    def _advance(self, experts_done: int) -> None:
        self._done += experts_done
        self._progress(self._done, len(self._sparse) * self._config.n_routed_experts)


def _check(source: Checkpoint, target: Path) -> None:
    config = source.config
    if source.linears:
        raise CheckpointError(f"{source.path} is quantised already; a BF16 checkpoint is needed")
    if target.resolve() == source.path.resolve():
        raise ConfigError(f"{target} is the source itself; choose another folder")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % BLOCK:
            raise ConfigError(f"{name} is {getattr(config, name)}; EXL3 experts need a multiple of {BLOCK}")


def _job(source: Checkpoint, recipe: Recipe, sequences: Sequence[Sequence[int]]) -> str:
    """Hash of what decides every byte of the output."""
    shards = sorted({entry.file for entry in source.entries.values()})
    facts = {
        "version": __version__,
        "config": (source.path / "config.json").read_text(encoding="utf-8"),
        "tensors": [(e.name, e.dtype, e.shape, e.file.name, e.offset) for e in source.entries.values()],
        "shards": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in shards],
        "recipe": dataclasses.asdict(recipe),
        "calibration": [list(tokens) for tokens in sequences],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _layer_file(number: int) -> str:
    return f"model-layer-{number:03d}.safetensors"


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _finish(source: Checkpoint, manifest: Manifest, recipe: Recipe, sequences: Sequence[Sequence[int]]) -> Report:
    """Index, report and the source's small files; config.json last, so that an unfinished folder cannot be loaded."""
    folder = manifest.folder
    weight_map = {name: file for file in manifest.files for name in header_names(folder / file)}
    layers = tuple(LayerReport(**manifest.reports[number]) for number in sorted(manifest.reports, key=int))
    matrices = sum(layer.matrices for layer in layers)
    with_bits = sum(layer.bits * layer.matrices for layer in layers) / max(matrices, 1)
    nbytes = sum(file["bytes"] for file in manifest.files.values())
    report = Report(recipe, with_bits, nbytes, sum(map(len, sequences)), layers)
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    )
    write_json(folder / REPORT_FILE, dataclasses.asdict(report))
    for file in sorted(source.path.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(file, folder / file.name)
    raw: dict[str, Any] = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", raw | {"quantization_config": _quantization_config(report, sequences)})
    return report


def _quantization_config(report: Report, sequences: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    """The words of published packs; readers decide by the headers alone."""
    return {
        "quant_method": QUANT_METHOD,
        "bits": round(report.bits, 4),
        "codebook": report.recipe.codebook,
        "head_bits": 16,
        "out_scales": "always",
        "calibration": {"rows": len(sequences), "cols": max(map(len, sequences))},
        "scope": "glm53_routed_experts_only",
    }
