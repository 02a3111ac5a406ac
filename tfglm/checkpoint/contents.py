"""What a checkpoint holds, in figures: bytes by kind of tensor, and the widths of its quantised layers."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import layer_prefix
from tfglm.checkpoint.safetensors import TensorEntry
from tfglm.formats.exl3_tensors import Exl3Linear

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj$")
_KINDS = (
    ("routed experts", ".mlp.experts."),
    ("shared experts", ".mlp.shared_experts."),
    ("router", ".mlp.gate."),
    ("dense MLP", ".mlp."),
    ("indexer", ".self_attn.indexer."),
    ("attention", ".self_attn."),
)
"""The first that a name holds decides."""


@dataclass(frozen=True)
class Kind:
    """Tensors of one kind. stored: bytes by safetensors dtype, EXL3 linears (all their fields) apart. parameters: the
    weights that these stand for. bits: stored bits a parameter."""

    name: str
    tensors: int
    parameters: int
    nbytes: int
    stored: dict[str, int]

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(self.parameters, 1)


@dataclass(frozen=True)
class LayerWidths:
    """The routed experts of one layer. widths: matrices by bits a weight. paired: gate and up of each expert have the
    same width. mean: over all weights, scales not counted."""

    layer: int
    mean: float
    widths: dict[str, int]
    codebooks: tuple[str, ...]
    paired: bool


def kinds(config: ModelConfig, entries: Mapping[str, TensorEntry], linears: Mapping[str, Exl3Linear]) -> list[Kind]:
    """Every tensor counted once, the MTP layer's by themselves; the heaviest kind first."""
    mtp = layer_prefix(config.num_hidden_layers) + "."
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    stored: dict[str, Counter[str]] = defaultdict(Counter)
    for name, entry in entries.items():
        kind = "MTP layer" if name.startswith(mtp) else _kind(name)
        linear = linears.get(name.rpartition(".")[0])
        tensors[kind] += 1
        stored[kind]["EXL3" if linear else entry.dtype] += entry.nbytes
        if linear is None:
            parameters[kind] += math.prod(entry.shape)
        elif name.endswith(".trellis"):
            parameters[kind] += linear.k * linear.n
    found = [
        Kind(kind, tensors[kind], parameters[kind], sum(stored[kind].values()), dict(stored[kind])) for kind in tensors
    ]
    return sorted(found, key=lambda kind: -kind.nbytes)


def layer_widths(linears: Mapping[str, Exl3Linear]) -> list[LayerWidths]:
    """The layers whose routed experts are EXL3, by number."""
    layers: dict[int, dict[str, Exl3Linear]] = defaultdict(dict)
    for name, linear in linears.items():
        match = _EXPERT.match(name)
        if match:
            layers[int(match.group(1))][name] = linear
    result = []
    for number in sorted(layers):
        experts = layers[number]
        counted = Counter(f"{linear.bits:g}" for linear in experts.values())
        result.append(
            LayerWidths(
                layer=number,
                mean=statistics.fmean(linear.bits for linear in experts.values()),
                widths=dict(sorted(counted.items(), key=lambda item: float(item[0]))),
                codebooks=tuple(sorted({linear.codebook for linear in experts.values()})),
                paired=all(
                    linear.bits == experts[name.replace(".gate_proj", ".up_proj")].bits
                    for name, linear in experts.items()
                    if name.endswith(".gate_proj")
                ),
            )
        )
    return result


def _kind(name: str) -> str:
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return "embedding and head"
    return next((kind for kind, part in _KINDS if part in name), "norms")
