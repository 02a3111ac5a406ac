"""Calibration: the text, the walk through the layers against the model's own forward, and what each expert has seen."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import CheckpointError, ConfigError
from tfglm.models import moe
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.mtp import Mtp, load_mtp
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.window import Rows
from tfglm.ops.base import PlainExperts, Routing
from tfglm.quantize import experts
from tfglm.quantize.allocate import NMSE, floored
from tfglm.quantize.encoder import search_on_cpu
from tfglm.quantize.experts import ExpertLayer
from tfglm.quantize.hessian import DAMPING
from tfglm.quantize.place import CpuPlace
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.text import conversations, sequences
from tfglm.quantize.walk import Walk

FIELDS = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
SEQUENCES = [[(31 * i + 7 * s) % 1400 for i in range(length)] for s, length in enumerate((150, 90, 300))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Glm53, Mtp]:
    """A model with full and shared indexer layers, and sequences far longer than its selection."""
    out = tmp_path_factory.mktemp("walk") / "tiny"
    write_checkpoint(out, "tiny", 3, **FIELDS)
    with Checkpoint.open(out) as checkpoint:
        model = load_model(checkpoint, tokens=1024, kv="bf16")
        return model, Mtp(model, load_mtp(model.weights, model.config, CheckpointSource(checkpoint)))


@torch.inference_mode()
def test_the_walk_is_the_forward_pass(loaded: tuple[Glm53, Mtp]) -> None:
    model, mtp = loaded
    assert set(model.config.indexer_types) == {"full", "shared"}
    walk = Walk(model.config, CpuPlace(model.config, 300), model.weights.embed, SEQUENCES)
    for layer in model.weights.layers:
        walk.add(moe.feed_forward(model.ops, model.config, layer.ffn, walk.attention(layer)))
    tapped = []
    for number, tokens in enumerate(SEQUENCES):
        stream = model.open_stream()
        passed = model.forward_tapped([Rows(stream, tokens, 0)], Taps(normed=True, layers=(5,)))
        stream.close()
        torch.testing.assert_close(walk.x[number], passed.streams[5], rtol=1e-5, atol=1e-5)
        assert passed.normed is not None
        tapped.append(passed.normed)

    walk.enter_mtp(model.weights.norm, mtp.weights)
    [layer] = mtp.weights.layer.layers
    walk.add(moe.feed_forward(model.ops, model.config, layer.ffn, walk.attention(layer)))
    for number, tokens in enumerate(SEQUENCES):
        trunk, following = model.open_stream(), [*tokens[1:], tokens[0]]
        step = mtp.absorb([Rows(mtp.open_stream(trunk), following, len(following))], tapped[number])
        trunk.close()
        rows = model.ops.rms_norm(walk.x[number], mtp.weights.layer.norm, model.config.rms_norm_eps)
        torch.testing.assert_close(rows, step.rows, rtol=1e-4, atol=1e-4)


# ---- what an expert has seen
def layer_of(count: int = 3, rows: int = 400, **recipe: object) -> ExpertLayer:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 128, generator=random)
    chosen = torch.randint(count - 1, (rows, 1), generator=random)  # the last expert is never chosen
    routing = Routing(chosen, torch.rand(rows, 1, generator=random) + 0.1)
    plain = PlainExperts(
        torch.randn(count, 256, 128, generator=random) / 11, torch.randn(count, 128, 128, generator=random) / 11
    )
    return ExpertLayer("layer", x, routing, plain, Recipe(2.75, (2.0, 3.0, 4.0), **recipe), search_on_cpu)


def test_hessians_of_an_expert_are_those_of_its_rows() -> None:
    layer = layer_of()
    picked = layer._routing.experts[:, 0] == 1
    x, w = layer._rows[picked].double().numpy(), layer._routing.weights[picked, 0].double().numpy()
    gate, up = (m.double().numpy().T for m in layer._experts.gate_up[1].chunk(2))
    hidden = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    seen = layer.seen(1)
    assert seen.rows == len(x)
    for found, rows in ((seen.gate_up, x), (seen.down, hidden)):
        expected = np.einsum("r,ri,rj->ij", w**2, rows, rows) / np.sum(w**2)
        expected += DAMPING * np.trace(expected) / 128 * np.eye(128)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * expected.max())
    output = w[:, None] * (hidden @ layer._experts.down[1].double().numpy().T)
    assert seen.energy == pytest.approx(np.sum(output**2) / 400, rel=1e-4)


def test_what_is_not_finite_is_named() -> None:
    layer = layer_of()
    parts = layer._rows, layer._routing, layer._experts, layer.recipe, search_on_cpu
    layer._routing.weights[7] = float("nan")
    with pytest.raises(CheckpointError, match=r"routing by model\.layers\.3\.mlp\.gate\.weight is not finite; fetch"):
        ExpertLayer("model.layers.3.mlp.experts", *parts)
    layer._experts.gate_up[2, 200, 5] = float("inf")  # of an expert that no row has chosen
    with pytest.raises(CheckpointError, match=r" layer\.2\.up_proj\.weight has values that are not finite; fetch"):
        ExpertLayer("layer", *parts)


def test_an_output_that_is_not_finite_is_named() -> None:
    layer = layer_of()
    layer._rows[layer._routing.experts[:, 0] == 1] = 1e30
    with pytest.raises(CheckpointError, match=r" layer\.1: its output on the calibration rows is not finite"):
        layer.widths(30)


def test_an_expert_nobody_chose_takes_the_layers_rows() -> None:
    layer = layer_of()
    seen = layer.seen(2)
    assert seen.rows == 0 and seen.energy == 0
    mean = layer._rows.T @ layer._rows / 400
    assert seen.gate_up is not None and seen.down is not None
    torch.testing.assert_close(seen.gate_up, mean + DAMPING * mean.diagonal().mean() * torch.eye(128))
    assert torch.equal(seen.down, (1 + DAMPING) * torch.eye(128))


def test_widths_follow_importance_and_the_budget() -> None:
    layer = layer_of(5)
    layer._routing.weights[layer._routing.experts == 0] *= 3
    widths = layer.widths(round(2 * 2.8 * 15))
    assert sum(2 * gate_up + down for gate_up, down in widths) == 2.8 * 15
    assert sum(widths[0]) == max(sum(pair) for pair in widths) > 6
    assert sum(widths[4]) == min(sum(pair) for pair in widths)  # never chosen


def test_mixed_widths_beat_the_line_between_uniform_ones() -> None:
    """By the errors that the widths are chosen on, weighed by importance."""
    layer = layer_of(8)
    seen = [layer.seen(expert) for expert in range(8)]
    importance = floored([found.energy for found in seen], 0.1)
    relative = [layer._expected(expert, found) for expert, found in enumerate(seen)]

    def error(widths: list[tuple[float, float]]) -> float:
        return sum(
            weight * (gate_up * NMSE[a] + down * NMSE[b])
            for weight, (gate_up, down), (a, b) in zip(importance, relative, widths, strict=True)
        )

    mixed = error(layer.widths(2 * 66))
    two, three = (error([(width, width)] * 8) for width in (2.0, 3.0))
    assert mixed < 0.97 * (0.25 * two + 0.75 * three)


@pytest.mark.parametrize("shared", [True, False])
def test_gate_and_up_of_all_experts_share_their_input_scales(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_SCALE_TILES", 8)
    layer = layer_of(2, shared_suh=shared)
    done = list(layer.quantised([(4.0, 4.0), (2.0, 3.0)]))
    vectors = [expert.tensors[f"{name}_proj.suh"] for expert in done for name in ("gate", "up")]
    assert all(torch.equal(vector, vectors[0]) for vector in vectors[1:]) == shared
    assert [expert.widths for expert in done] == [(4, 4, 4), (2, 2, 3)]
    assert [t.shape[2] for t in (done[1].tensors[f"{n}_proj.trellis"] for n in ("gate", "up", "down"))] == [32, 32, 48]
    for expert in done:
        for matrix, width in zip(expert.matrices, expert.widths, strict=True):
            assert matrix.proxy_error < 1.15 * {2: 0.0686, 3: 0.0174, 4: 0.0045}[int(width)]


# ---- text
def render(messages: object) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)  # type: ignore[attr-defined]


def test_text_becomes_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# One\n\nfirst\n\nsecond\n\n\n# Two\n\nthird\n")
    chats = conversations(tmp_path / "a.txt")
    assert [render(chat) for chat in chats] == [
        "<user># One<assistant>first<user>second",
        "<user># Two<assistant>third",
    ]
    lines = [{"messages": [{"role": "user", "content": "hi"}]}, {"text": "x\n\ny"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [render(chat) for chat in conversations(tmp_path / "b.jsonl")] == ["<user>hi", "<user>x<assistant>y"]
    built_in = conversations(None)
    assert len(built_in) > 5 and all(chat[0]["role"] == "user" for chat in built_in)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"text": "a"}\n{"prompt": "b"}', "line 2: .* is needed"),
        ('{"messages": "b"}', "line 1: .* is needed"),
    ],
)
def test_lines_that_are_no_conversation(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        conversations(tmp_path / "a.jsonl")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("a.txt", "none.txt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as UTF-8 text"):
            conversations(tmp_path / name)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("length", "tokens", "sizes"),
    [(40, 1000, [40, 40, 20]), (64, 64, [64]), (1000, 30, [30]), (42, 1000, [42, 42, 16]), (45, 1000, [45, 45])],
)
def test_sequences_of_tokens(length: int, tokens: int, sizes: list[int]) -> None:
    chats = [[{"role": "user", "content": "x" * 14}]] * 5  # 20 bytes each
    encode: Callable[[str], list[int]] = bytes_of
    found = sequences(chats, render, encode, length=length, tokens=tokens)
    assert [len(part) for part in found] == sizes
    assert [i for part in found for i in part] == bytes_of(render([chats[0][0]] * 5))[: sum(sizes)]


def test_too_little_text() -> None:
    with pytest.raises(ConfigError, match="has 9 tokens; at least 16 are needed"):
        sequences([[{"role": "user", "content": "abc"}]], render, bytes_of, length=100, tokens=100)
