"""A model over ranks gives what it gives on one, to rounding; and every rank has the same rows, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from threaded_ranks import spread

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import RanksError
from tfglm.formats.exl3_code import MARKERS
from tfglm.layout import Layout, Placement, Share
from tfglm.memory.inventory import Inventory
from tfglm.memory.weights import weight_bytes
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.shapes import shapes_of
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.weights import load_weights
from tfglm.models.window import Rows
from tfglm.ops import rows as rows_module
from tfglm.ops.exl3_weights import Exl3Weight
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows as RowMath

TOLERANCE = 2e-5
"""Of logits of size 8, as between this program and transformers. Caches are float32: bfloat16 would turn one different
rounding into a thousandth."""
LENGTH = 70

UNEVEN = {"num_hidden_layers": 4, "vocab_size": 1000, "intermediate_size": 200, "moe_intermediate_size": 320}
"""Blocks and rows that are not whole: 16 units of 64 vocabulary rows, the last cut; 3 blocks of 128 columns, likewise;
2 of the dense MLP, so that a third rank has none of it."""
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "uneven": UNEVEN,
    "two shared experts": {"num_hidden_layers": 4, "n_shared_experts": 2},
    "exl3": {"num_hidden_layers": 5, "expert_bits": 2.75},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    opened = {}
    for name, fields in MODELS.items():
        path = tmp_path_factory.mktemp("split") / name.replace(" ", "-")
        write_checkpoint(path, "tiny", seed=3, **fields)
        opened[name] = Checkpoint.open(path)
    yield opened
    for checkpoint in opened.values():
        checkpoint.close()


def text(checkpoint: Checkpoint, seed: int = 1, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(checkpoint.config.vocab_size), k=length)


def logits(model: Glm53, tokens: list[int], chunk: int) -> torch.Tensor:
    stream = model.open_stream()
    windows = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
    rows = torch.cat([model.forward([Rows(stream, window, len(window))]) for window in windows])
    stream.close()
    return rows


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_rank(checkpoints: dict[str, Checkpoint], name: str, ranks: int) -> None:
    checkpoint = checkpoints[name]
    tokens = text(checkpoint)
    expected = logits(load_model(checkpoint, tokens=PAGE, kv="fp32"), tokens, LENGTH)
    with spread(checkpoint, ranks, tokens=PAGE, kv="fp32") as models:
        found = logits(models[0], tokens, LENGTH)
    assert found.shape == expected.shape
    difference = (found - expected).abs()
    # EXL3 rounds the experts' inputs to fp16: where ranks turn one such rounding over, a product moves by 2^-11.
    if name == "exl3":
        assert float(difference.mean()) < 1e-3 and float(difference.max()) < 0.05
    else:
        assert float(difference.max()) < TOLERANCE, float(difference.max())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["tiny", "exl3"])
def test_placement_by_expert(checkpoints: dict[str, Checkpoint], name: str, ranks: int) -> None:
    """Experts of one layer with different numbers of columns."""
    checkpoint = checkpoints[name]
    tokens = text(checkpoint)
    expected = logits(load_model(checkpoint, tokens=PAGE, kv="fp32"), tokens, LENGTH)
    with spread(checkpoint, ranks, tokens=PAGE, kv="fp32", placement=Placement.BY_EXPERT) as models:
        found = logits(models[0], tokens, LENGTH)
        assert torch.equal(logits(models[0], tokens, 7), found)
    assert float((found - expected).abs().mean()) < (1e-3 if name == "exl3" else TOLERANCE / 4)


@pytest.mark.parametrize("name", ["uneven", "exl3"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_every_rank_has_the_same_rows(checkpoints: dict[str, Checkpoint], name: str, ranks: int) -> None:
    checkpoint = checkpoints[name]
    layers = tuple(range(checkpoint.config.num_hidden_layers + 1))
    with spread(checkpoint, ranks, tokens=PAGE) as models:
        passed: dict[Glm53, list[Any]] = {model: [] for model in models}
        for model in models:
            record(model, passed[model])
        stream = models[0].open_stream()
        for window in (text(checkpoint), [5], [6, 7, 8]):
            models[0].forward_tapped([Rows(stream, window, 1)], Taps(True, layers))
        stream.close()
    first, *others = (passed[model] for model in models)
    assert len(first) == 3
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine.logits, theirs.logits)
            assert torch.equal(mine.normed, theirs.normed)
            assert all(torch.equal(mine.streams[layer], theirs.streams[layer]) for layer in layers)
    for model in models[1:]:
        for mine, theirs in zip(models[0].cache.layers, model.cache.layers, strict=True):
            planes = zip((mine.latent, mine.rope, mine.index), (theirs.latent, theirs.rope, theirs.index), strict=True)
            for a, b in planes:
                assert (
                    a is None or b is None or torch.equal(a.flatten(0, 1)[: LENGTH + 4], b.flatten(0, 1)[: LENGTH + 4])
                )


def record(model: Glm53, passed: list[Any]) -> None:
    forward = model._forward

    def recorded(*arguments: Any) -> Any:
        passed.append(forward(*arguments))
        return passed[-1]

    model._forward = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["tiny", "uneven", "exl3"])
def test_a_row_is_its_own_on_three_ranks(checkpoints: dict[str, Checkpoint], name: str) -> None:
    """However a text is cut into windows, and whatever is beside it."""
    checkpoint = checkpoints[name]
    mine, other = text(checkpoint, 1), text(checkpoint, 2)
    with spread(checkpoint, 3, tokens=4 * PAGE) as models:
        model = models[0]
        expected = logits(model, mine, 1)
        for chunk in (2, 7, 16, 17, LENGTH):
            assert torch.equal(logits(model, mine, chunk), expected), chunk
        beside, stream = model.open_stream(), model.open_stream()
        found = []
        for start in range(0, LENGTH, 5):
            part = slice(start, start + 5)
            both = [Rows(beside, other[part], 0), Rows(stream, mine[part], 5)]
            found.append(model.forward(both if start % 2 else both[::-1]))
        assert torch.equal(torch.cat(found), expected)
        stream.truncate(40)
        assert torch.equal(model.forward([Rows(stream, mine[40:43], 3)]), expected[40:43])


def test_every_linear_quantised(tmp_path: Path, checkpoints: dict[str, Checkpoint]) -> None:
    """Cuts between 128-column blocks keep a linear in its bits, others decode it."""
    path = tmp_path / "all"
    quantise_everything(checkpoints["two shared experts"].path, path)
    with Checkpoint.open(path) as checkpoint:
        tokens = text(checkpoint)
        expected = logits(load_model(checkpoint, tokens=PAGE, kv="fp32"), tokens, LENGTH)
        with spread(checkpoint, 3, tokens=PAGE, kv="fp32") as models:
            found = logits(models[0], tokens, LENGTH)
            layer = models[0].weights.layers[0]
            assert torch.equal(found, logits(models[0], tokens, 3))
    assert isinstance(layer.attention.o_proj, torch.Tensor)  # 64 of 160 columns
    assert isinstance(models[0].weights.head, Exl3Weight)  # 512 of 1,536 rows
    assert float((found - expected).abs().mean()) < 0.05


def quantise_everything(folder: Path, out: Path) -> None:
    """A copy of a checkpoint in which every matrix but embedding and router is EXL3."""
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    packed = {}
    random_bits = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.endswith(("embed_tokens.weight", "gate.weight")):
            packed[name] = tensor
            continue
        n, k = (-(-size // 128) * 128 for size in tensor.shape)
        prefix = name.removesuffix(".weight")
        words = torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, 64), generator=random_bits, dtype=torch.int16)
        signs = [torch.randint(0, 2, (size,), generator=random_bits) * 2 - 1.0 for size in (k, n)]
        packed |= {f"{prefix}.trellis": words, f"{prefix}.suh": (signs[0] * tensor.shape[1] ** -0.5 / 1.24).half()}
        packed |= {f"{prefix}.svh": signs[1].half(), f"{prefix}.mcg": torch.tensor(MARKERS["mcg"]).int()}
    save_file(packed, out / "model.safetensors")
    for file in ("config.json", "generation_config.json"):
        (out / file).write_bytes((folder / file).read_bytes())


def test_a_rank_reads_its_part(checkpoints: dict[str, Checkpoint]) -> None:
    """Of what is cut a third, to a block; all of what is not."""
    for name in ("tiny", "exl3"):
        checkpoint = checkpoints[name]
        layout = Layout.of(checkpoint.config, 3)
        read = []
        for rank in range(3):
            source = CheckpointSource(checkpoint, share=Share(layout, rank))
            load_weights(checkpoint.config, source)
            read.append(source.nbytes_read)
        whole = CheckpointSource(checkpoint)
        load_weights(checkpoint.config, whole)
        cut = ("q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
        trunk = {
            n: e.nbytes for n, e in checkpoint.entries.items() if f"layers.{len(layer_types(checkpoint))}." not in n
        }
        replicated = sum(nbytes for n, nbytes in trunk.items() if not any(part in n for part in cut))
        scales = sum(nbytes for n, nbytes in trunk.items() if n.endswith((".suh", ".svh", ".mcg")))
        assert whole.nbytes_read == sum(trunk.values())
        assert sum(read) == pytest.approx(whole.nbytes_read + 2 * (replicated + scales), rel=1e-3)
        assert max(read) < replicated + scales + 0.45 * (whole.nbytes_read - replicated - scales)


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("name", ["tiny", "exl3"])
def test_every_rank_holds_what_was_planned(checkpoints: dict[str, Checkpoint], name: str, ranks: int) -> None:
    checkpoint = checkpoints[name]
    bits = {linear: packed.bits for linear, packed in checkpoint.linears.items()}
    layout = Layout.of(checkpoint.config, ranks)
    planned = weight_bytes(Inventory(name, checkpoint.config, bits), layout, dense="bf16", head="bf16")
    for rank, plan in enumerate(planned):
        weights = load_weights(checkpoint.config, CheckpointSource(checkpoint, share=Share(layout, rank)))
        held = tensor_bytes(weights, set())
        assert held == pytest.approx(plan.experts + plan.dense + plan.vocabulary, rel=0.01), rank


def tensor_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all tensors that hang on a value, each memory once; without what a module decodes in time."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        fresh = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if fresh else 0
    if isinstance(value, tuple):
        return sum(tensor_bytes(item, seen) for item in value)
    return sum(tensor_bytes(item, seen) for item in vars(value).values()) if hasattr(value, "__dict__") else 0


def layer_types(checkpoint: Checkpoint) -> tuple[str, ...]:
    return checkpoint.config.mlp_layer_types


def test_what_fails_after_the_announcement_ends_all_ranks(checkpoints: dict[str, Checkpoint]) -> None:
    with spread(checkpoints["uneven"], 3, tokens=PAGE) as models:
        model = models[0]
        stream = model.open_stream()
        with pytest.raises(ValueError, match="token ids -1"):  # before it: nobody was told
            model.forward([Rows(stream, [-1], 1)])
        model.forward([Rows(stream, [1], 1)])
        attend, model.ops.attend = model.ops.attend, no_memory  # type: ignore[method-assign]
        with pytest.raises(RanksError, match="rank 0 failed at 'forward': RuntimeError: no more memory"):
            model.forward([Rows(stream, [1], 1)])
        model.ops.attend = attend  # type: ignore[method-assign]
        with pytest.raises(RanksError, match="no more memory"):
            model.forward([Rows(stream, [1], 1)])


def no_memory(*_: object) -> torch.Tensor:
    raise RuntimeError("no more memory")


@pytest.mark.parametrize("name", ["tiny", "uneven"])
def test_the_trial_covers_every_ranks_shapes(checkpoints: dict[str, Checkpoint], name: str) -> None:
    checkpoint = checkpoints[name]
    for ranks in (3, 8):
        with spread(checkpoint, ranks, tokens=PAGE) as models:
            recorders = []
            for model in models:
                assert isinstance(model.ops, ReferenceOps)
                model.ops.rows = recorder = Recording()
                recorders.append(recorder)
            logits(models[0], text(checkpoint), 30)
        for rank, recorder in enumerate(recorders):
            shapes = shapes_of(checkpoint.config, share=Share(Layout.of(checkpoint.config, ranks), rank))
            assert recorder.linears <= shapes.linears | shapes.experts
            assert recorder.groups <= shapes.groups | {(n, k, m) for k, m in shapes.experts for n in range(1, 9)}


class Recording(RowMath):
    """Notes the shapes of what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linears: set[tuple[int, int]] = set()
        self.groups: set[tuple[int, int, int]] = set()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.linears.add((weight.shape[1], weight.shape[0]))
        return super().linear(x, weight)

    def grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.groups.add((weight.shape[0], weight.shape[2], weight.shape[1]))
        return super().grouped(x, weight)


def test_one_rank_that_goes_row_by_row_takes_all_with_it(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicated products must have the same bits on all ranks."""
    own = shapes_of(checkpoints["uneven"].config, share=Share(Layout.of(checkpoints["uneven"].config, 3), 1))
    monkeypatch.setattr(rows_module, "broken_shapes", lambda rows, shapes: ["one"] if shapes == own else [])
    with spread(checkpoints["uneven"], 3, tokens=PAGE) as models:
        assert [model.ops.rows.alone for model in models] == [True] * 3  # type: ignore[attr-defined]
