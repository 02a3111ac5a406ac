"""A row's logits are the same bits however the tokens before it were cut into windows and whatever is beside it.

This is what makes drafted replies equal serial ones, and replies together equal replies alone. Everything is compared
with one token at a time, one stream, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows as RowMath

LENGTH = 290
"""Past one page, and nine times index_topk of the tiny model."""
LENGTHS = {1: LENGTH, 2: LENGTH, 3: 60}
"""Of three texts, by seed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("invariance") / "tiny"
    write_checkpoint(path, "tiny", seed=1)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Glm53]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as checkpoint:
        model = load_model(checkpoint, tokens=16 * PAGE)
    assert isinstance(model.ops, ReferenceOps) and not model.ops.rows.alone
    yield model
    assert model.tokens_free == model.tokens_total, "a test left a stream open"
    torch.set_num_threads(threads)


def text(model: Glm53, seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(model.config.vocab_size), k=length)


def serial(model: Glm53, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every row, one token a forward."""
    stream = model.open_stream()
    rows = [model.forward([Rows(stream, [token], 1)]) for token in tokens]
    stream.close()
    return torch.cat(rows)


@pytest.fixture(scope="module")
def expected(model: Glm53) -> dict[int, torch.Tensor]:
    return {seed: serial(model, text(model, seed, length)) for seed, length in LENGTHS.items()}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (actual != expected).any(dim=1).nonzero().flatten().tolist()
    assert actual.shape == expected.shape and not wrong, f"rows {wrong[:10]} differ"


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 17, 64, 100, 256, LENGTH])
def test_any_chunk_size(model: Glm53, expected: dict[int, torch.Tensor], size: int) -> None:
    tokens, stream = text(model, 1), model.open_stream()
    windows = [tokens[start : start + size] for start in range(0, LENGTH, size)]
    logits = torch.cat([model.forward([Rows(stream, window, len(window))]) for window in windows])
    stream.close()
    assert_same(logits, expected[1])


@pytest.mark.parametrize("position", [0, 1, 20, 31, 33, 100, PAGE - 3, PAGE, 270])
def test_verify_windows(model: Glm53, expected: dict[int, torch.Tensor], position: int) -> None:
    """Windows of 1 to 16 rows below, across and above index_topk (32), and across a page."""
    tokens, stream = text(model, 1), model.open_stream()
    if position:
        model.forward([Rows(stream, tokens[:position], 0)])
    for rows in range(1, 17):
        logits = model.forward([Rows(stream, tokens[position : position + rows], rows)])
        assert_same(logits, expected[1][position : position + rows])
        stream.truncate(position)
    stream.close()


def test_rejected_rows_leave_nothing_behind(model: Glm53, expected: dict[int, torch.Tensor]) -> None:
    """Rows of other tokens, truncated away, as drafts that were not kept."""
    tokens, chance, stream = text(model, 1), random.Random(5), model.open_stream()
    while stream.length < LENGTH:
        start = stream.length
        kept = min(chance.randint(1, 6), LENGTH - start)
        wrong = text(model, chance.randrange(1000), chance.randint(1, 10))
        logits = model.forward([Rows(stream, tokens[start : start + kept] + wrong, kept + len(wrong))])
        assert_same(logits[:kept], expected[1][start : start + kept])
        stream.truncate(start + kept)
    stream.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_streams(model: Glm53, expected: dict[int, torch.Tensor], seed: int) -> None:
    """Three streams at different positions, each with a random number of rows or none, in random order."""
    chance = random.Random(seed)
    streams = {number: model.open_stream() for number in expected}
    texts = {number: text(model, number, length) for number, length in LENGTHS.items()}
    while waiting := [number for number, stream in streams.items() if stream.length < LENGTHS[number]]:
        members = chance.sample(waiting, chance.randint(1, len(waiting)))
        window, places = [], []
        for number in members:
            start = streams[number].length
            rows = min(LENGTHS[number] - start, chance.choice([1, 1, 2, 5, 9, 16, 40]))
            want = chance.choice([rows, 1, 0])
            window.append(Rows(streams[number], texts[number][start : start + rows], want))
            places.append((number, start + rows - want, start + rows))
        logits = model.forward(window)
        assert_same(logits, torch.cat([expected[number][start:stop] for number, start, stop in places]))
    for stream in streams.values():
        stream.close()


def test_reused_pages(model: Glm53, expected: dict[int, torch.Tensor]) -> None:
    """Pages in another order, full of another stream's rows."""
    other, tokens = model.open_stream(), text(model, 2)
    model.forward([Rows(other, text(model, 9, 3 * PAGE), 0)])
    stream = model.open_stream()
    model.forward([Rows(stream, tokens[:10], 0)])
    other.close()
    logits = [model.forward([Rows(stream, tokens[start : start + 64], len(tokens[start : start + 64]))])
              for start in range(10, LENGTH, 64)]  # fmt: skip
    stream.close()
    assert_same(torch.cat(logits), expected[2][10:])


def test_wanted_rows_do_not_change_each_other(model: Glm53, expected: dict[int, torch.Tensor]) -> None:
    tokens = text(model, 3, 50)
    for want in (1, 2, 7, 50):
        stream = model.open_stream()
        logits = model.forward([Rows(stream, tokens, want)])
        stream.close()
        assert_same(logits, expected[3][50 - want : 50])


@pytest.mark.parametrize("threads", [2, 5])
def test_several_threads(folder: Path, threads: int) -> None:
    """A BLAS that shares one product between threads adds in another order than one that does not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Checkpoint.open(folder) as checkpoint:
            model = load_model(checkpoint, tokens=4 * PAGE)
        assert isinstance(model.ops, ReferenceOps) and not model.ops.rows.alone
        tokens = text(model, 4, 50)
        expected = serial(model, tokens)
        for size in (5, 16, 50):
            stream = model.open_stream()
            windows = [tokens[start : start + size] for start in range(0, 50, size)]
            assert_same(torch.cat([model.forward([Rows(stream, w, len(w))]) for w in windows]), expected)
            stream.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("alone", [False, True], ids=["fp32 cache", "rows multiplied alone"])
def test_other_arithmetic(model: Glm53, alone: bool) -> None:
    """A float32 cache; and the way out for a machine whose kernels do not keep the promise."""
    other = Glm53(model.config, model.weights, tokens=2 * PAGE, kv="fp32", ops=ReferenceOps(RowMath(alone=alone)))
    tokens = text(model, 4, 60)
    expected = serial(other, tokens)
    for size in (16, 60):
        stream = other.open_stream()
        windows = [tokens[start : start + size] for start in range(0, 60, size)]
        assert_same(torch.cat([other.forward([Rows(stream, w, len(w))]) for w in windows]), expected)
        stream.close()


def test_the_comparison_can_fail(model: Glm53, expected: dict[int, torch.Tensor]) -> None:
    """A kernel that adds in another order for one row than for several, as ordinary ones do, breaks the equality."""

    class ByShape(RowMath):
        def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return super().linear(x.flip(1), weight.flip(1)) if len(x) > 1 else super().linear(x, weight)

    ordinary = Glm53(model.config, model.weights, tokens=2 * PAGE, ops=ReferenceOps(ByShape()))
    tokens = text(model, 4, 30)
    stream = ordinary.open_stream()
    together = ordinary.forward([Rows(stream, tokens, 30)])
    stream.close()
    assert not torch.equal(together, serial(ordinary, tokens))
