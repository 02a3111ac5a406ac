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
from tfglm.models.glm53 import Glm53, load_model
from tfglm.models.window import Rows
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows as RowMath

LENGTH = 330
"""Past one page, and ten times index_topk of the tiny model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("invariance") / "tiny"
    write_checkpoint(path, "tiny", seed=1)
    return path


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def model(folder: Path, request: pytest.FixtureRequest) -> Iterator[Glm53]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as checkpoint:
        model = load_model(checkpoint, tokens=16 * PAGE, kv=request.param)
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
    """Serial logits of three texts, by seed."""
    return {seed: serial(model, text(model, seed)) for seed in (1, 2, 3)}


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


@pytest.mark.parametrize("position", [0, 1, 20, 31, 33, 100, PAGE - 3, PAGE, 300])
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
    texts = {number: text(model, number) for number in expected}
    while any(stream.length < LENGTH for stream in streams.values()):
        waiting = [number for number, stream in streams.items() if stream.length < LENGTH]
        members = chance.sample(waiting, chance.randint(1, len(waiting)))
        window, places = [], []
        for number in members:
            start = streams[number].length
            rows = min(LENGTH - start, chance.choice([1, 1, 2, 5, 9, 16, 40]))
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


def test_without_tiles(model: Glm53) -> None:
    """The way out for a machine whose kernels do not keep the promise: near the usual logits, and as invariant."""
    plain = Glm53(model.config, model.weights, tokens=2 * PAGE, kv="fp32", ops=ReferenceOps(RowMath(alone=True)))
    tokens = text(model, 4, 70)
    expected = serial(plain, tokens)
    for size in (16, 70):
        stream = plain.open_stream()
        windows = [tokens[start : start + size] for start in range(0, 70, size)]
        assert_same(torch.cat([plain.forward([Rows(stream, w, len(w))]) for w in windows]), expected)
        stream.close()


def test_the_comparison_can_fail(model: Glm53, expected: dict[int, torch.Tensor]) -> None:
    """Ordinary arithmetic, one product for whatever rows there are, breaks the equality these tests assert."""

    class Untiled(RowMath):
        def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x @ weight.float().t()

    ordinary = Glm53(model.config, model.weights, tokens=2 * PAGE, ops=ReferenceOps(Untiled()))
    tokens = text(model, 4, 70)
    stream = ordinary.open_stream()
    together = ordinary.forward([Rows(stream, tokens, 70)])
    stream.close()
    assert not torch.equal(together, serial(ordinary, tokens))
