"""Routed experts of synthetic checkpoints as EXL3: which tensors, which width each, in the published packs' layout.

Trellises are random bits (every bit pattern is a valid one), gate and up of all experts of a layer share one suh, an
expert's gate and up have one width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import TensorSpec, layer_prefix
from tfglm.errors import ConfigError
from tfglm.formats.exl3_code import BLOCK
from tfglm.formats.exl3_tensors import QUANT_METHOD, stored_tensors

CODEBOOK = "mcg"
WIDTHS = (2, 3, 4)


def quantization_config(bits: float) -> dict[str, Any]:
    """The field of config.json that says so, with the published pack's words."""
    return {
        "quant_method": QUANT_METHOD,
        "bits": bits,
        "codebook": CODEBOOK,
        "head_bits": 16,
        "scope": "glm53_routed_experts_only",
    }


def with_exl3_experts(
    specs: Mapping[str, TensorSpec], config: ModelConfig, bits: float, seed: int
) -> dict[str, TensorSpec]:
    """The tensors with every routed expert's matrices replaced by EXL3 ones of a mean of `bits` a weight in each layer.

    Raises ConfigError for a mean or widths of the model that cannot be.
    """
    if not WIDTHS[0] <= bits <= WIDTHS[-1]:
        raise ConfigError(f"experts of {bits:g} bits were asked for; {WIDTHS[0]} to {WIDTHS[-1]} can be made")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % BLOCK:
            raise ConfigError(f"{name} is {getattr(config, name)}; EXL3 experts need a multiple of {BLOCK}")
    result: dict[str, TensorSpec] = {}
    widths: dict[str, int] = {}
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        experts = f"{layer_prefix(layer)}.mlp.experts"
        for expert, (gate_up, down) in enumerate(drawn_widths(config.n_routed_experts, bits, f"{seed}/{experts}")):
            widths |= dict.fromkeys((f"{experts}.{expert}.gate_proj", f"{experts}.{expert}.up_proj"), gate_up)
            widths[f"{experts}.{expert}.down_proj"] = down
    for name, spec in specs.items():
        linear = name.removesuffix(".weight")
        if linear not in widths:
            result[name] = spec
            continue
        outputs, inputs = spec.shape
        stored = stored_tensors(linear, inputs, outputs, widths[linear], CODEBOOK)
        result |= {field: TensorSpec(shape, dtype) for field, (dtype, shape) in stored.items()}
    return result


def drawn_widths(experts: int, bits: float, key: str) -> list[tuple[int, int]]:
    """(gate and up, down) of each expert: at random, with the mean over all matrices as near to `bits` as can be."""
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])))
    widths = np.full((experts, 2), WIDTHS[0])
    cost = np.broadcast_to([2, 1], widths.shape)
    left = round(bits * 3 * experts) - 3 * experts * WIDTHS[0]
    while left:
        candidates = np.flatnonzero((widths < WIDTHS[-1]) & (cost <= left))
        if not len(candidates):
            break
        place = np.unravel_index(random.choice(candidates), widths.shape)
        widths[place] += 1
        left -= int(cost[place])
    return [(int(gate_up), int(down)) for gate_up, down in widths]
