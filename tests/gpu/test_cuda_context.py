"""Caches dealt out to ranks on a GPU: keys and parts against the reference's, replies exact among themselves.

The ranks are threads of one process on one GPU: right, and not fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from threaded_ranks import spread

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.formats.latent import KvFormat
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.ops import order
from tfglm.ops.base import Rope, Selection, Span, Window
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.reference import ReferenceOps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("dealt")
    write_checkpoint(path, "tiny", seed=3, num_hidden_layers=5, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_keys_are_the_best_of_what_is_cached_here(rows: int, device: torch.device) -> None:
    """Every third token is here; some rows see none, some fewer than are asked for."""
    heads, width, count, rank, ranks = 16, 32, 32, 2, 3
    random = torch.Generator().manual_seed(rows)
    queries = torch.randn(rows, heads, width, generator=random).bfloat16()
    weights = torch.randn(rows, heads, generator=random).bfloat16()
    plane = torch.randn(4, PAGE, width, generator=random).bfloat16()
    positions = torch.arange(rows) * 29 % 1500
    positions = positions.sort().values
    visible = (positions + ranks - rank) // ranks
    window = Window(
        positions, positions, torch.tensor([[2, 0, 3, 1]]), torch.zeros(rows, dtype=torch.int64), (Span(0, rows, 0),)
    )
    want = ReferenceOps().best_keys(queries.float(), weights.float(), window, visible, plane, count, rank, ranks)
    ops = CudaOps(Precision(), device)
    ops.context = 1536
    moved = replace(window, **{n: getattr(window, n).to(device) for n in ("positions", "slots", "pages", "stream_of")})
    raw = plane.view(torch.uint8).to(device)
    got = ops.best_keys(
        queries.to(device), weights.to(device), moved, visible.to(device), raw, count, rank, ranks
    ).cpu()
    for one, other in zip(got, want, strict=True):
        valid = other != order.NO_KEY
        assert int((one != order.NO_KEY).sum()) == int(valid.sum())
        mine, theirs = (set(order.indices_of(keys[keys != order.NO_KEY]).tolist()) for keys in (one, other))
        assert len(mine ^ theirs) <= 2  # scores of bfloat16 products may turn over at the edge
        assert all(position % ranks == rank for position in mine)


def test_parts_add_up_to_the_whole(device: torch.device) -> None:
    heads, latent, rotary, rows = 10, 48, 16, 6
    random = torch.Generator().manual_seed(1)
    ops = CudaOps(Precision(), device)
    ops.context = 256

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16().to(device)

    queries, turned = normal(rows, heads, latent), normal(rows, heads, rotary)
    planes = [normal(1, PAGE, width).view(torch.uint8) for width in (latent, rotary)]
    angles = torch.randn(rows, rotary // 2, generator=random).to(device)
    rope = Rope(angles.cos(), angles.sin())
    slots = torch.arange(96, device=device).expand(rows, -1).contiguous()
    counts = torch.tensor([1, 2, 3, 40, 95, 96], device=device)
    whole = ops.attend(queries, turned, Selection(slots.int(), counts.int()), 0.2, *planes, rope).float()
    parts = []
    for rank in range(3):
        own = (counts + 2 - rank) // 3
        part = ops.attend_part(queries, turned, Selection(slots * 3 % 96 + rank, own), 0.2, *planes, rope)
        assert bool((part.out[own == 0] == 0).all()) and bool((part.peak[own == 0] == float("-inf")).all())
        parts.append(part)
    peak = torch.stack([part.peak for part in parts]).amax(dim=0)
    weights = [torch.exp(part.peak - peak) * part.total for part in parts]
    added = sum(w[..., None] * part.out for w, part in zip(weights, parts, strict=True)) / sum(weights)[..., None]
    assert float((added - whole).abs().max()) < 0.02


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_and_written(model: Glm53, prompt: list[int], reply: list[int], chunks: list[int]) -> torch.Tensor:
    stream, found, start = model.open_stream(), [], 0
    for size in chunks:
        part = prompt[start : start + size]
        found.append(model.forward([Rows(stream, part, len(part), prompt=True)]))
        start += size
    found += [model.forward([Rows(stream, [token], 1)]) for token in reply]
    stream.close()
    return torch.cat(found)


@pytest.mark.parametrize("kv", list(KvFormat))
def test_ranks_reply_as_one_does_and_exactly_among_themselves(
    kv: KvFormat, tiny: Checkpoint, device: torch.device
) -> None:
    prompt, reply = text(300, 1), text(12, 2)
    one = load_model(tiny, tokens=2 * PAGE, device="cuda", kv=kv.value)
    expected = read_and_written(one, prompt, reply, [300])
    with spread(tiny, 3, tokens=2 * PAGE, device="cuda", kv=kv.value, cp=True) as [model, *_]:
        found = read_and_written(model, prompt, reply, [300])
        assert torch.equal(read_and_written(model, prompt, reply, [100, 100, 100]), found)
        stream = model.open_stream()
        model.forward([Rows(stream, prompt, 1, prompt=True)])
        window = model.forward([Rows(stream, reply, len(reply))])
    assert torch.equal(window, found[len(prompt) :])
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
    assert float(error) < 0.05
    assert float((found.argmax(dim=1) == expected.argmax(dim=1)).float().mean()) > 0.85
