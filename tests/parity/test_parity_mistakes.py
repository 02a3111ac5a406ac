"""Mistakes that are easy to make in this model, each made on purpose: the comparison with transformers must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from reference_models import TOLERANCE, default_pair, run_in_chunks, token_ids

from tfglm.checkpoint.config import ModelConfig
from tfglm.models.glm53 import Glm53
from tfglm.models.weights import MlpWeights, load_weights
from tfglm.ops.base import Rope, Routing, Selection, Window
from tfglm.ops.reference import ReferenceOps

State = dict[str, torch.Tensor]
LENGTH = 96


def with_config(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: dataclasses.replace(config, **changes)


def half_split(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotation of DeepSeek-V3.2's indexer: x[i] with x[i + D/2] instead of x[2i] with x[2i + 1]."""
    shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = rope.cos.view(shape), rope.sin.view(shape)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class HalfSplitIndexer(ReferenceOps):
    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return half_split(x, rope) if x.shape[-1] > 2 * rope.cos.shape[1] else super().rotate(x, rope)


class HalfSplitAttention(ReferenceOps):
    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return super().rotate(x, rope) if x.shape[-1] > 2 * rope.cos.shape[1] else half_split(x, rope)


class IndexerRotatesLast(ReferenceOps):
    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return super().rotate(x.flip(-1), rope).flip(-1)


class UnrotatedLatentKey(ReferenceOps):
    def write_latent(self, row: torch.Tensor, norm: torch.Tensor, eps: float, rope: Rope, *rest: Any) -> None:
        super().write_latent(row, norm, eps, Rope(torch.ones_like(rope.cos), torch.zeros_like(rope.sin)), *rest)


class RotaryKeyNormalised(ReferenceOps):
    def write_latent(self, row: torch.Tensor, norm: torch.Tensor, eps: float, *rest: Any) -> None:
        latent, key = row.split([norm.shape[0], row.shape[1] - norm.shape[0]], dim=1)
        key = self.rms_norm(key, torch.ones(key.shape[1]), eps)
        super().write_latent(torch.cat([latent, key], dim=1), norm, eps, *rest)


class NoRelu(ReferenceOps):
    def index_scores(
        self, queries: torch.Tensor, head_weights: torch.Tensor, plane: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        return torch.einsum("rh,rhd,ptd->rpt", head_weights, queries, plane[pages]).flatten(1)


class ReluAfterWeighting(ReferenceOps):
    def index_scores(
        self, queries: torch.Tensor, head_weights: torch.Tensor, plane: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        return torch.einsum("rh,rhd,ptd->rhpt", head_weights, queries, plane[pages]).relu().sum(1).flatten(1)


class PositiveHeadWeights(ReferenceOps):
    def select(self, queries: torch.Tensor, head_weights: torch.Tensor, *rest: Any) -> Selection:
        return super().select(queries, head_weights.abs(), *rest)


class SelectsTheWorst(ReferenceOps):
    def select(self, queries: torch.Tensor, head_weights: torch.Tensor, *rest: Any) -> Selection:
        return super().select(queries, -head_weights, *rest)


class KeysOnlyWhereScored(ReferenceOps):
    """Skips the index keys of rows that attend to everything and so need no scores themselves."""

    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        super().write_index_key(key, norm, bias, rope, window, plane)
        plane.flatten(0, 1)[window.slots[window.positions < 16]] = 0


class KeyRootMeanSquare(ReferenceOps):
    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        key = self.rotate(self.rms_norm(key, norm, 1e-6) + bias, rope)
        plane.flatten(0, 1)[window.slots] = key


class KeyRotatedBeforeNorm(ReferenceOps):
    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        plane.flatten(0, 1)[window.slots] = self.rows.layer_norm(self.rotate(key, rope), norm, bias, 1e-6)


class LatentScale(ReferenceOps):
    """Scores scaled by the width of the absorbed query instead of that of the query head."""

    def attend(self, latent_queries: torch.Tensor, *rest: Any) -> torch.Tensor:
        rope_queries, selection, _, *planes = rest
        width = latent_queries.shape[2] + rope_queries.shape[2]
        return super().attend(latent_queries, rope_queries, selection, width**-0.5, *planes)


class AttendsToAll(ReferenceOps):
    def select(self, queries: torch.Tensor, head_weights: torch.Tensor, *rest: Any) -> Selection:
        window, plane, _ = rest
        return super().select(queries, head_weights, window, plane, LENGTH)


class NotItself(ReferenceOps):
    """A row's own token is left out of its list."""

    def attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, *rest: Any
    ) -> torch.Tensor:
        shorter = Selection(selection.slots, (selection.counts - 1).clamp(min=1))
        return super().attend(latent_queries, rope_queries, shorter, *rest)


class SharedLayersUseTheFirst(ReferenceOps):
    """Shared layers attend to the selection of the first full layer instead of the nearest below."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Selection | None = None
        self.just_selected = False

    def select(self, *given: Any) -> Selection:
        selection = super().select(*given)
        self.first = self.first or selection
        self.just_selected = True
        return selection

    def attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, *rest: Any
    ) -> torch.Tensor:
        own, self.just_selected = self.just_selected, False
        assert self.first is not None
        return super().attend(latent_queries, rope_queries, selection if own else self.first, *rest)


class BiasedWeights(ReferenceOps):
    def route(self, x: torch.Tensor, gate: torch.Tensor, correction: torch.Tensor, config: ModelConfig) -> Routing:
        chosen = super().route(x, gate, correction, config).experts
        weights = (torch.sigmoid(x @ gate.t()) + correction).gather(1, chosen)
        return Routing(chosen, weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor)


class SoftmaxRouter(ReferenceOps):
    def route(self, x: torch.Tensor, gate: torch.Tensor, correction: torch.Tensor, config: ModelConfig) -> Routing:
        chosen = super().route(x, gate, correction, config).experts
        weights = torch.softmax(x @ gate.t(), dim=1).gather(1, chosen)
        return Routing(chosen, weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor)


class PicksMisaligned(ReferenceOps):
    """Weights in expert order, experts in choice order."""

    def route(self, x: torch.Tensor, gate: torch.Tensor, correction: torch.Tensor, config: ModelConfig) -> Routing:
        routing = super().route(x, gate, correction, config)
        return Routing(routing.experts.sort(dim=1).values, routing.weights)


class GateAndUpSwapped(ReferenceOps):
    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return self.rows.silu(gate) * up


class ScaledEmbedding(ReferenceOps):
    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().embed(table, tokens) * table.shape[1] ** 0.5


class PositionsFromOneForQueries(ReferenceOps):
    """Query and key disagree about where position 0 is."""

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        if x.dim() == 2:
            return super().rotate(x, rope)
        return super().rotate(x, Rope(rope.cos.roll(-1, 0), rope.sin.roll(-1, 0)))


def rotary_part_first(state: State, config: ModelConfig) -> None:
    """The rotary values read as the first of each query head."""
    for name in [n for n in state if n.endswith("q_b_proj.weight")]:
        heads = state[name].unflatten(0, (config.num_attention_heads, -1))
        state[name] = heads.roll(-config.qk_nope_head_dim, dims=1).flatten(0, 1)


def values_before_keys(state: State, config: ModelConfig) -> None:
    for name in [n for n in state if n.endswith("kv_b_proj.weight")]:
        heads = state[name].unflatten(0, (config.num_attention_heads, -1))
        state[name] = heads.roll(-config.qk_nope_head_dim, dims=1).flatten(0, 1)


def without(suffix: str, value: float) -> Callable[[State, ModelConfig], None]:
    """Every tensor whose name ends in suffix filled with the value that switches it off."""

    def change(state: State, _: ModelConfig) -> None:
        names = [name for name in state if name.endswith(suffix)]
        assert names
        for name in names:
            state[name] = torch.full_like(state[name], value)

    return change


def norms_swapped(state: State, _: ModelConfig) -> None:
    for name in [n for n in state if n.endswith("input_layernorm.weight")]:
        other = name.replace("input_layernorm", "post_attention_layernorm")
        state[name], state[other] = state[other], state[name]


def experts_shifted(state: State, config: ModelConfig) -> None:
    """Router row e means expert e + 1."""
    for name in [n for n in state if n.endswith("mlp.gate.weight") or n.endswith("e_score_correction_bias")]:
        state[name] = state[name].roll(1, dims=0)


OPS: Mapping[str, type[ReferenceOps]] = {
    "indexer rotates halves": HalfSplitIndexer,
    "attention rotates halves": HalfSplitAttention,
    "rotation from the wrong end": IndexerRotatesLast,
    "latent key not rotated": UnrotatedLatentKey,
    "rotary key normalised": RotaryKeyNormalised,
    "no relu": NoRelu,
    "relu after weighting": ReluAfterWeighting,
    "head weights made positive": PositiveHeadWeights,
    "lowest scores selected": SelectsTheWorst,
    "no index keys below index_topk": KeysOnlyWhereScored,
    "index key by root mean square": KeyRootMeanSquare,
    "index key rotated before its norm": KeyRotatedBeforeNorm,
    "scale of the latent width": LatentScale,
    "no sparsity": AttendsToAll,
    "own token left out": NotItself,
    "shared layers reuse the first selection": SharedLayersUseTheFirst,
    "correction bias left in the weights": BiasedWeights,
    "softmax router": SoftmaxRouter,
    "weights given to other experts": PicksMisaligned,
    "gate and up swapped": GateAndUpSwapped,
    "embedding scaled": ScaledEmbedding,
    "query positions one off": PositionsFromOneForQueries,
}
CONFIGS: Mapping[str, Callable[[ModelConfig], ModelConfig]] = {
    "latent norms with rms_norm_eps": with_config(latent_norm_eps=1e-5),
    "no routed scaling": with_config(routed_scaling_factor=1.0),
    "weights not normalised": with_config(norm_topk_prob=False),
    "one token fewer": with_config(index_topk=15),
    "another rope_theta": with_config(rope_theta=10000.0),
    "one expert fewer": with_config(num_experts_per_tok=3),
}
STATES: Mapping[str, Callable[[State, ModelConfig], None]] = {
    "rotary part first in a query head": rotary_part_first,
    "values before keys in kv_b": values_before_keys,
    "no bias in the index key's norm": without("k_norm.bias", 0),
    "no weight in the index key's norm": without("k_norm.weight", 1),
    "no correction bias": without("e_score_correction_bias", 0),
    "query latent's norm without weight": without("q_a_layernorm.weight", 1),
    "latent's norm without weight": without("kv_a_layernorm.weight", 1),
    "last norm without weight": without("model.norm.weight", 1),
    "norms before attention and experts swapped": norms_swapped,
    "experts numbered from one": experts_shifted,
}
FAINT = {"latent norms with rms_norm_eps": 3 * TOLERANCE}
"""What a mistake must at least change in the logits, where it is not obvious."""


def largest_difference(
    ops: ReferenceOps | None = None,
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    state: Callable[[State, ModelConfig], None] = lambda state, config: None,
) -> float:
    pair, tokens = default_pair(), token_ids(1, LENGTH)
    changed = dict(pair.state)
    state(changed, pair.config)
    weights = load_weights(pair.config, changed.__getitem__)
    model = Glm53(config(pair.config), weights, tokens=256, kv="fp32", ops=ops or ReferenceOps())
    return float((run_in_chunks(model, tokens, LENGTH) - pair.expected(tokens)).abs().max())


def test_no_mistake() -> None:
    assert largest_difference() <= TOLERANCE


@pytest.mark.parametrize("name", OPS)
def test_mistake_in_an_operation(name: str) -> None:
    assert largest_difference(ops=OPS[name]()) > FAINT.get(name, 0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_mistake_in_a_field(name: str) -> None:
    assert largest_difference(config=CONFIGS[name]) > FAINT.get(name, 0.02)


@pytest.mark.parametrize("name", STATES)
def test_mistake_in_the_weights(name: str) -> None:
    assert largest_difference(state=STATES[name]) > FAINT.get(name, 0.02)


def test_shared_expert_left_out() -> None:
    pair, tokens = default_pair(), token_ids(1, LENGTH)
    model = pair.build(ops=ReferenceOps())
    layers = []
    for layer in model.weights.layers:
        if not isinstance(layer.ffn, MlpWeights):
            shared = dataclasses.replace(layer.ffn.shared, down=torch.zeros_like(layer.ffn.shared.down))
            layer = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, shared=shared))
        layers.append(layer)
    model.weights = dataclasses.replace(model.weights, layers=tuple(layers))
    assert float((run_in_chunks(model, tokens, LENGTH) - pair.expected(tokens)).abs().max()) > 0.02
