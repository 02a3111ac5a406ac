"""Grouped EXL3 experts on the GPU against float64, and bit for bit against themselves in other company."""

from __future__ import annotations

import exl3_math
import pytest
import torch

from tfglm.errors import CheckpointError
from tfglm.ops import exl3_experts_cuda as experts_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

MIXED = [(4, 4, 6), (6, 6, 6), (8, 8, 8), (6, 6, 4), (4, 4, 4)]
SPLIT = [(4, 6, 8), (8, 4, 6), (6, 8, 4)]
EVERY = [(k2, 18 - k2, 16) for k2 in (2, 4, 6, 8, 10, 12, 14, 16)]
HALVES = [(3, 3, 5), (7, 7, 7), (5, 5, 3)]
TOLERANCE = 7e-3  # bf16 roundings between the matrices flip by one unit here and there; 5e-3 was seen of one small row


def tables(layer: exl3_math.Layer) -> experts_cuda.ExpertTables:
    return experts_cuda.expert_tables(
        layer.gate,
        layer.up,
        layer.down,
        suh=layer.suh,
        svh=layer.svh,
        down_suh=layer.down_suh,
        down_svh=layer.down_svh,
        codebook=layer.codebook,
    )


def routing(rows: int, slots: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    picks = torch.stack([torch.randperm(experts, generator=g)[:slots] for _ in range(rows)])
    return picks.int().cuda(), torch.rand(rows, slots, generator=g).cuda()


def run(
    path: str,
    t: experts_cuda.ExpertTables,
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call with poisoned output and scratch."""
    rows, slots = picks.shape
    sizes = (rows, slots, t.experts, t.hidden, t.width)
    if path == "decode":
        workspace = experts_cuda.DecodeWorkspace.allocate(*sizes, t.shared_scale, x.device)
        scratch = (workspace.rotated, workspace.sums, workspace.activated, workspace.results)
    else:
        workspace = experts_cuda.PromptWorkspace.allocate(*sizes, t.shared_scale and t.paired, x.device)
        scratch = (workspace.rotated, workspace.activated, workspace.results)
    for buffer in scratch:
        buffer.fill_(float("nan"))
    out = torch.full((rows, t.hidden), float("nan"), device="cuda")
    getattr(experts_cuda, path)(t, x, picks, weights, workspace, out, shared)
    return out


def check(path: str, layer: exl3_math.Layer, rows: int, slots: int, seed: int, with_shared: bool = False) -> None:
    t = tables(layer)
    picks, weights = routing(rows, slots, t.experts, seed)
    random = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, t.hidden, device="cuda", generator=random).bfloat16()
    shared = torch.randn(rows, t.hidden, device="cuda", generator=random) if with_shared else None
    expected = layer.forward(x, picks, weights, shared)
    got = run(path, t, x, picks, weights, shared).double()
    assert ((got - expected).norm() / expected.norm()).item() < TOLERANCE


CASES = [
    # experts, hidden, width, widths, codebook, one input scale
    (16, 256, 128, MIXED, "mcg", True),
    (9, 384, 640, MIXED, "mul1", True),
    (32, 1024, 768, MIXED, "3inst", False),
    (12, 512, 384, SPLIT, "mcg", True),
    (12, 640, 256, SPLIT, "mcg", False),
    (16, 256, 256, EVERY, "mcg", True),
    (9, 256, 128, HALVES, "mul1", False),
    (24, 6144, 640, MIXED, "mcg", True),
    # experts that differ in their inner columns, as ranks have them under Placement.BY_EXPERT
    (9, 512, [256, 128, 256, 128, 128, 256, 128, 256, 128], MIXED, "mcg", True),
    (7, 256, [128, 0, 256, 384, 0, 128, 128], SPLIT, "mcg", True),
    (8, 256, [128, 256, 0, 128, 256, 256, 128, 384], MIXED, "mul1", False),
    (12, 6144, [768, 640, 640] * 4, MIXED, "mcg", True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_decode_equals_float64(case: tuple, rows: int) -> None:
    check("decode", exl3_math.random_layer(*case, seed=rows), rows, 5, rows, with_shared=rows == 3)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_prompt_equals_float64(case: tuple, rows: int) -> None:
    check("prompt", exl3_math.random_layer(*case, seed=rows), rows, 5, rows, with_shared=rows == 37)


@pytest.mark.parametrize("path", ["decode", "prompt"])
def test_all_rows_on_the_same_experts(path: str) -> None:
    layer = exl3_math.random_layer(4, 512, 256, MIXED, "mcg", True, seed=5)
    for rows in (9, 16):
        check(path, layer, rows, 4, rows)


@pytest.mark.parametrize("path", ["decode", "prompt"])
@pytest.mark.parametrize("shared_scale", [True, False])
def test_missing_picks_are_skipped(path: str, shared_scale: bool) -> None:
    layer = exl3_math.random_layer(8, 256, 256, MIXED, "mcg", shared_scale, seed=6)
    t = tables(layer)
    picks, weights = routing(7, 4, 8, 6)
    picks[1, 2], picks[4], picks[6, 0] = 8, 1 << 20, 9
    x, shared = torch.randn(7, 256, device="cuda").bfloat16(), torch.randn(7, 256, device="cuda")
    for last in (shared, None):
        expected = layer.forward(x, picks, weights, last)
        got = run(path, t, x, picks, weights, last)
        assert torch.equal(got[4], torch.zeros(256, device="cuda") if last is None else shared[4])
        assert ((got.double() - expected).norm() / expected.norm()).item() < TOLERANCE


UNEVEN = [(640, 768, 128, 0)[e % 4] for e in range(20)]


@pytest.mark.parametrize("columns", [640, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("shared_scale", [True, False])
def test_decode_row_has_the_same_bits_in_any_window(shared_scale: bool, columns: int | list[int]) -> None:
    layer = exl3_math.random_layer(20, 1024, columns, MIXED, "mcg", shared_scale, seed=7)
    t = tables(layer)
    picks, weights = routing(16, 8, 20, 7)
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    alone = torch.cat([run("decode", t, x[i : i + 1], picks[i : i + 1], weights[i : i + 1]) for i in range(16)])
    for rows in range(2, 17):
        first = (rows * 5) % (17 - rows)
        window = slice(first, first + rows)
        assert torch.equal(run("decode", t, x[window], picks[window], weights[window]), alone[window])


@pytest.mark.parametrize("columns", [384, UNEVEN[:8]], ids=["even", "uneven"])
def test_prompt_row_has_the_same_bits_in_any_chunk(columns: int | list[int]) -> None:
    layer = exl3_math.random_layer(8, 512, columns, MIXED, "mcg", True, seed=8)
    t = tables(layer)
    picks, weights = routing(420, 4, 8, 8)
    x = torch.randn(420, 512, device="cuda").bfloat16()
    whole = run("prompt", t, x, picks, weights)
    for window in (slice(0, 1), slice(3, 20), slice(100, 260), slice(160, 420)):
        assert torch.equal(run("prompt", t, x[window], picks[window], weights[window]), whole[window])


@pytest.mark.parametrize("path", ["decode", "prompt"])
def test_graph_replay_equals_eager_and_leaves_counters_clean(path: str) -> None:
    layer = exl3_math.random_layer(20, 1024, 640, MIXED, "mcg", True, seed=9)
    t = tables(layer)
    rows = 6 if path == "decode" else 200
    x, out = torch.empty(rows, 1024, device="cuda").bfloat16(), torch.empty(rows, 1024, device="cuda")
    picks, weights = routing(rows, 8, 20, 0)
    cls = experts_cuda.DecodeWorkspace if path == "decode" else experts_cuda.PromptWorkspace
    workspace = cls.allocate(rows, 8, 20, 1024, 640, True, x.device)
    run(path, t, x, picks, weights)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(experts_cuda, path)(t, x, picks, weights, workspace, out)
    for seed in range(6):
        x.copy_(torch.randn(rows, 1024))
        more, other = routing(rows, 8, 20, seed)
        picks.copy_(more)
        weights.copy_(other)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(path, t, x, picks, weights))


def test_sizes_that_do_not_fit_are_refused() -> None:
    layer = exl3_math.random_layer(2, 256, 256, MIXED, "mcg", True, seed=1)
    layer.up[1] = layer.up[1][:, :8]
    with pytest.raises(CheckpointError, match=r"trellis 3 .*expected \(16, 16\) tiles"):
        tables(layer)
