"""Each operation of the reference against numpy in float64, written from the formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.ops.base import PlainExperts, Rope, Routing, Selection, Span, Window
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows

PAGE = 8
CONFIG = ModelConfig.from_dict(
    {
        "model_type": "glm_moe_dsa",
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
        "num_hidden_layers": 4,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "eos_token_id": 1,
    }
)


@pytest.fixture(params=[False, True], ids=["tiles", "alone"])
def ops(request: pytest.FixtureRequest) -> ReferenceOps:
    return ReferenceOps(Rows(alone=request.param))


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def tensor(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64)).to(dtype)


def exact(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    """Within `tolerance` of the largest expected value: float32 sums of a few hundred terms."""
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    assert np.isfinite(exact(actual)).all()
    assert np.abs(exact(actual) - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def window_of(lengths: Sequence[tuple[int, int]], pages: Sequence[Sequence[int]]) -> Window:
    """A window over streams with (tokens before, rows) each, and their page numbers."""
    spans, start = [], 0
    for before, rows in lengths:
        spans.append(Span(start, start + rows, before))
        start += rows
    positions = torch.tensor([s.position + i for s in spans for i in range(s.stop - s.start)])
    stream_of = torch.tensor([n for n, s in enumerate(spans) for _ in range(s.stop - s.start)])
    table = torch.zeros(len(pages), max(len(p) for p in pages), dtype=torch.int64)
    for n, p in enumerate(pages):
        table[n, : len(p)] = torch.tensor(p)
    slots = table[stream_of, positions // PAGE] * PAGE + positions % PAGE
    return Window(positions, slots, table, stream_of, tuple(spans))


def rope_of(positions: Sequence[int], width: int) -> tuple[Rope, np.ndarray]:
    """The rotation of each position, and its angles [R, width / 2] in float64."""
    angles = np.array(positions)[:, None] * 8e6 ** (-np.arange(0, width, 2) / width)
    return Rope(tensor(np.cos(angles)), tensor(np.sin(angles))), angles


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [R, ..., width] as complex numbers of adjacent values, turned by angles; real parts, then imaginary ones."""
    width = 2 * angles.shape[1]
    turn = np.exp(1j * angles).reshape(len(x), *[1] * (x.ndim - 2), -1)
    turned = (x[..., 0:width:2] + 1j * x[..., 1:width:2]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., width:]], axis=-1)


def rms_normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def test_embed(ops: ReferenceOps, random: np.random.Generator) -> None:
    table = tensor(random.normal(size=(20, 6)), torch.bfloat16)
    tokens = torch.tensor([3, 19, 0, 3])
    close(ops.embed(table, tokens), exact(table)[[3, 19, 0, 3]], 0)


def test_angles(ops: ReferenceOps) -> None:
    """To float32's rounding of the angle, also where the angle is large."""
    positions = torch.tensor([0, 1, 77, 4095, 1048575])
    frequencies = torch.tensor([1.0, 0.03, 1.25e-7])
    rope = ops.angles(positions, frequencies)
    angles = (positions.float()[:, None] * frequencies).double().numpy()
    close(rope.cos, np.cos(angles), 1e-6)
    close(rope.sin, np.sin(angles), 1e-6)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (5, 3, 20)])
def test_rotate(ops: ReferenceOps, random: np.random.Generator, shape: tuple[int, ...]) -> None:
    rope, angles = rope_of([0, 1, 2, 900, 70000], 8)
    x = tensor(random.normal(size=shape))
    close(ops.rotate(x, rope), rotated(exact(x), angles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 30, 5), (9, 64, 24), (40, 17, 130)])
def test_linear(
    ops: ReferenceOps, random: np.random.Generator, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, weight = tensor(random.normal(size=(rows, inputs))), tensor(random.normal(size=(outputs, inputs)), dtype)
    close(ops.linear(x, weight), exact(x) @ exact(weight).T)


def test_linear_of_no_rows(ops: ReferenceOps) -> None:
    assert ops.linear(torch.empty(0, 30), torch.ones(5, 30)).shape == (0, 5)


def test_linear_in_blocks(random: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight wider than a block, with a last block narrower than the smallest product."""
    monkeypatch.setattr("tfglm.ops.rows._PIECE_ELEMENTS", 32 * 20)
    x, weight = tensor(random.normal(size=(9, 20))), tensor(random.normal(size=(3 * 32 + 5, 20)))
    close(ReferenceOps().linear(x, weight), exact(x) @ exact(weight).T)


def test_rms_norm(ops: ReferenceOps, random: np.random.Generator) -> None:
    x, weight = tensor(random.normal(size=(7, 40)) * 3), tensor(random.normal(size=40))
    x[2] = 0
    close(ops.rms_norm(x, weight, 1e-5), rms_normed(exact(x), exact(weight), 1e-5))


def test_rms_norm_eps_counts(ops: ReferenceOps) -> None:
    x = torch.full((1, 8), 1e-3)
    close(ops.rms_norm(x, torch.ones(8), 1e-6), np.full((1, 8), 1 / math.sqrt(2)))


def test_add_rms_norm(ops: ReferenceOps, random: np.random.Generator) -> None:
    x, branch = tensor(random.normal(size=(7, 40))), tensor(random.normal(size=(7, 40)))
    weight = tensor(random.normal(size=40))
    total, normed = ops.add_rms_norm(x, branch, weight, 1e-5)
    close(total, exact(x) + exact(branch))
    close(normed, rms_normed(exact(x) + exact(branch), exact(weight), 1e-5))


def test_swiglu(ops: ReferenceOps, random: np.random.Generator) -> None:
    gate_up = tensor(random.normal(size=(7, 26)) * 4)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = np.split(exact(gate_up), 2, axis=1)
    close(ops.swiglu(gate_up), gate / (1 + np.exp(-gate)) * up)


def test_write_latent(ops: ReferenceOps, random: np.random.Generator) -> None:
    window = window_of([(5, 6), (0, 2)], [[3, 1], [2]])
    rope, angles = rope_of(window.positions.tolist(), 4)
    row, norm = tensor(random.normal(size=(8, 14))), tensor(random.normal(size=10))
    latent, key = torch.full((4, PAGE, 10), 7.0), torch.full((4, PAGE, 4), 7.0)
    ops.write_latent(row, norm, 1e-6, rope, window, latent, key)
    slots = [3 * PAGE + 5, 3 * PAGE + 6, 3 * PAGE + 7, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE, 2 * PAGE + 1]
    close(latent.flatten(0, 1)[slots], rms_normed(exact(row)[:, :10], exact(norm), 1e-6))
    close(key.flatten(0, 1)[slots], rotated(exact(row)[:, 10:], angles))
    untouched = [slot for slot in range(4 * PAGE) if slot not in slots]
    assert (latent.flatten(0, 1)[untouched] == 7).all() and (key.flatten(0, 1)[untouched] == 7).all()


def test_write_rounds_to_the_cache(ops: ReferenceOps, random: np.random.Generator) -> None:
    window = window_of([(0, 3)], [[0]])
    rope, _ = rope_of([0, 1, 2], 4)
    row, norm = tensor(random.normal(size=(3, 14))), torch.ones(10)
    planes = {
        dtype: (torch.zeros(1, PAGE, 10, dtype=dtype), torch.zeros(1, PAGE, 4, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    for latent, key in planes.values():
        ops.write_latent(row, norm, 1e-6, rope, window, latent, key)
    for full, half in zip(planes[torch.float32], planes[torch.bfloat16], strict=True):
        assert torch.equal(full.bfloat16(), half)


def test_write_index_key(ops: ReferenceOps, random: np.random.Generator) -> None:
    window = window_of([(7, 4)], [[1, 0]])
    rope, angles = rope_of([7, 8, 9, 10], 4)
    key, norm, bias = (tensor(random.normal(size=shape)) for shape in [(4, 12), (12,), (12,)])
    plane = torch.zeros(2, PAGE, 12)
    ops.write_index_key(key, norm, bias, rope, window, plane)
    x = exact(key)
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6) * exact(norm) + exact(bias)
    close(plane.flatten(0, 1)[[PAGE + 7, 0, 1, 2]], rotated(normed, angles))


def chosen_positions(scores: np.ndarray, count: int) -> list[int]:
    """The `count` best of the scores of tokens 0, 1, ..., by definition: higher first, ties to the lower position."""
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    return sorted(order[:count])


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_select(ops: ReferenceOps, random: np.random.Generator, count: int) -> None:
    """Integer data, so that every score is exact and many are equal; two streams, rows on both sides of `count`."""
    window = window_of([(20, 9), (0, 13)], [[4, 0, 2, 6], [1, 5]])
    heads, width = 4, 16  # both scales are powers of two
    plane = tensor(random.integers(-1, 2, size=(7, PAGE, width)))
    queries = tensor(random.integers(-1, 2, size=(22, heads, width)))
    weights = tensor(random.integers(-2, 3, size=(22, heads)))
    plane[6, 5:] = float("nan")  # slots past the first stream's 29 tokens hold anything
    selection = ops.select(queries, weights, window, plane, count)
    for row in range(22):
        stream, position = int(window.stream_of[row]), int(window.positions[row])
        slots = [int(window.pages[stream, t // PAGE]) * PAGE + t % PAGE for t in range(position + 1)]
        similarity = np.maximum(exact(plane).reshape(-1, width)[slots] @ exact(queries)[row].T * width**-0.5, 0)
        scores = similarity @ (exact(weights)[row] * heads**-0.5)
        expected = [slots[t] for t in chosen_positions(scores, count)]
        assert int(selection.counts[row]) == len(expected) == min(position + 1, count)
        assert selection.slots[row, : len(expected)].tolist() == expected
        written = [s for s in selection.slots[row].tolist() if s not in expected]
        assert all(slot in slots for slot in written), "padding must name written slots"


def test_index_scores_in_float(ops: ReferenceOps, random: np.random.Generator) -> None:
    plane, queries = tensor(random.normal(size=(3, PAGE, 12)), torch.bfloat16), tensor(random.normal(size=(6, 5, 12)))
    weights = tensor(random.normal(size=(6, 5)))
    scores = ops.index_scores(queries, weights, plane, torch.tensor([2, 0]))
    keys = exact(plane)[[2, 0]].reshape(-1, 12)
    similarity = np.maximum(np.einsum("rhd,td->rht", exact(queries), keys) / math.sqrt(12), 0)
    close(scores, np.einsum("rh,rht->rt", exact(weights) / math.sqrt(5), similarity))


def test_absorb_and_expand(ops: ReferenceOps, random: np.random.Generator) -> None:
    queries, key_up = tensor(random.normal(size=(9, 5, 12))), tensor(random.normal(size=(5, 12, 24)), torch.bfloat16)
    close(ops.absorb(queries, key_up), np.einsum("rhn,hnc->rhc", exact(queries), exact(key_up)))
    attended, value_up = tensor(random.normal(size=(9, 5, 24))), tensor(random.normal(size=(5, 7, 24)), torch.bfloat16)
    expected = np.einsum("rhc,hvc->rhv", exact(attended), exact(value_up)).reshape(9, -1)
    close(ops.expand(attended, value_up), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend(ops: ReferenceOps, random: np.random.Generator, dtype: torch.dtype) -> None:
    """Lists of many lengths, with entries past a list's end that must not count."""
    rows, heads, latent_width, rope_width, longest = 12, 3, 10, 4, 37
    latent = tensor(random.normal(size=(6, PAGE, latent_width)), dtype)
    key = tensor(random.normal(size=(6, PAGE, rope_width)), dtype)
    queries = tensor(random.normal(size=(rows, heads, latent_width)) * 2)
    rotary = tensor(random.normal(size=(rows, heads, rope_width)) * 2)
    slots = torch.from_numpy(np.stack([random.permutation(6 * PAGE)[:longest] for _ in range(rows)]))
    counts = torch.tensor([1, 2, 3, 15, 16, 17, 31, 32, 33, 36, 37, 1])
    angles = tensor(random.uniform(0, 6, size=(rows, rope_width // 2)))
    rope = Rope(angles.cos(), angles.sin())
    out = ops.attend(queries, rotary, Selection(slots, counts), 0.3, latent, key, rope)
    expected = np.zeros((rows, heads, latent_width))
    for row in range(rows):
        listed = slots[row, : counts[row]].numpy()
        latents, keys = exact(latent).reshape(-1, latent_width)[listed], exact(key).reshape(-1, rope_width)[listed]
        turned = rotated(exact(rotary)[row : row + 1], exact(angles)[row : row + 1])[0]
        scores = (exact(queries)[row] @ latents.T + turned @ keys.T) * 0.3
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected[row] = weights / weights.sum(1, keepdims=True) @ latents
    close(out, expected)


def route_by_definition(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> tuple[list[int], np.ndarray]:
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    size = len(choice) // config.n_group
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(config.n_group)]
    kept = sorted(range(config.n_group), key=lambda g: (-worth[g], g))[: config.topk_group]
    candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
    chosen = sorted(candidates, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    weights = scores[chosen]
    if config.norm_topk_prob:
        weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * config.routed_scaling_factor


@pytest.mark.parametrize("changes", [{}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}], ids=str)
def test_route(ops: ReferenceOps, random: np.random.Generator, changes: dict[str, int]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    x, gate = tensor(random.normal(size=(20, 16))), tensor(random.normal(size=(12, 16)), torch.bfloat16)
    bias = tensor(random.normal(size=12))
    routing = ops.route(x, gate, bias, config)
    logits = exact(x) @ exact(gate).T
    for row in range(20):
        chosen, weights = route_by_definition(logits[row], exact(bias), config)
        assert routing.experts[row].tolist() == chosen
        close(routing.weights[row], weights)


def test_route_ties_go_to_the_lower_expert(ops: ReferenceOps) -> None:
    gate = torch.zeros(12, 16)
    routing = ops.route(torch.ones(2, 16), gate, torch.zeros(12), CONFIG)
    assert routing.experts.tolist() == [[0, 1, 2]] * 2
    bias = torch.zeros(12)
    bias[[4, 9]] = 1
    assert ops.route(torch.ones(1, 16), gate, bias, CONFIG).experts.tolist() == [[4, 9, 0]]


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(ops: ReferenceOps, random: np.random.Generator, rows: int, dtype: torch.dtype) -> None:
    experts = PlainExperts(
        tensor(random.normal(size=(12, 2 * 10, 24)) / 4, dtype), tensor(random.normal(size=(12, 24, 10)) / 4, dtype)
    )
    x = tensor(random.normal(size=(rows, 24)))
    chosen = np.stack([random.permutation(12)[:3] for _ in range(rows)])
    weights = random.uniform(size=(rows, 3))
    out = ops.experts(x, Routing(torch.from_numpy(chosen), tensor(weights)), experts)
    expected = np.zeros((rows, 24))
    for row in range(rows):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            gate, up = np.split(exact(experts.gate_up)[expert] @ exact(x)[row], 2)
            expected[row] += weight * (exact(experts.down)[expert] @ (gate / (1 + np.exp(-gate)) * up))
    close(out, expected)


def test_experts_in_pieces(random: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large experts go a few at a time; the bits are the same."""
    experts = PlainExperts(torch.randn(12, 32, 24), torch.randn(12, 24, 16))
    routing = Routing(torch.tensor([[0, 3, 11], [5, 3, 2]]), torch.rand(2, 3))
    x = torch.randn(2, 24)
    whole = ReferenceOps().experts(x, routing, experts)
    monkeypatch.setattr("tfglm.ops.reference._PIECE_ELEMENTS", 2 * 32 * 24)
    assert torch.equal(ReferenceOps().experts(x, routing, experts), whole)
