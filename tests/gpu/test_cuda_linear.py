"""Dense layers on the GPU: right against float64, and the same bits whatever window a row is in."""

import pytest
import torch

from tfglm.formats import groups
from tfglm.ops import cuda_linear

pytestmark = pytest.mark.gpu

KINDS = ["bf16", "fp8", "q4", "q6", "q8"]


def weight_values(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What a packed weight stands for, float64."""
    if kind == "bf16":
        return weight.bfloat16().double()
    if kind == "fp8":
        codes, scale = groups.unpack_fp8(groups.pack_fp8(weight))
        return codes.double() * scale.double()[:, None]
    return groups.dequantise(groups.quantise(weight, int(kind[1:]))).double()


def random(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 96, 128), (7, 40, 192), (16, 200, 640), (50, 136, 576), (130, 264, 256)]
)
def test_linear_against_float64(kind: str, rows: int, n: int, k: int, device: torch.device) -> None:
    weight, x = random(n, k, seed=1, device=device), random(rows, k, seed=2, device=device).bfloat16()
    dense = cuda_linear.pack(weight, kind)
    want = x.double() @ weight_values(weight, kind).T
    single = cuda_linear.linear(x, dense, poisoned(rows, n, dtype=torch.float32, device=device))
    assert relative_error(single, want) < 1e-5
    half = cuda_linear.linear(x, dense, poisoned(rows, n, dtype=torch.bfloat16, device=device))
    assert torch.equal(half, single.bfloat16())


@pytest.mark.parametrize("k", [24, 48, 72, 1000])
def test_bf16_columns_need_no_whole_piece(k: int, device: torch.device) -> None:
    weight, x = random(33, k, seed=3, device=device), random(20, k, seed=4, device=device).bfloat16()
    dense = cuda_linear.pack(weight, "bf16")
    got = cuda_linear.linear(x, dense, poisoned(20, 33, dtype=torch.float32, device=device))
    assert relative_error(got, x.double() @ weight.bfloat16().double().T) < 1e-5
    assert torch.equal(got[:9], cuda_linear.linear(x[:9], dense, poisoned(9, 33, dtype=torch.float32, device=device)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [cuda_linear.WIDE, cuda_linear.SMALL, cuda_linear.FEW], ids=lambda tile: tile.name)
def test_a_row_has_the_same_bits_in_every_window(
    kind: str, tile: cuda_linear.Tile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 1 to 16 rows, and a row's place in a prompt, whichever tile multiplies it."""
    monkeypatch.setattr(cuda_linear, "prompt_tile", lambda *_: tile)
    n, k = 72, 704
    dense = cuda_linear.pack(random(n, k, seed=5, device=device), kind)
    x = random(140, k, seed=6, device=device).bfloat16()
    whole = cuda_linear.linear(x, dense, poisoned(140, n, dtype=torch.float32, device=device))
    for rows in range(1, 17):
        part = cuda_linear.linear(x[124 : 124 + rows], dense, poisoned(rows, n, dtype=torch.float32, device=device))
        assert torch.equal(part, whole[124 : 124 + rows]), rows
    part = cuda_linear.linear(x[100:140], dense, poisoned(40, n, dtype=torch.float32, device=device))
    assert torch.equal(part, whole[100:140])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [cuda_linear.WIDE, cuda_linear.SMALL, cuda_linear.FEW], ids=lambda tile: tile.name)
def test_results_go_to_their_rows_alone(
    tile: cuda_linear.Tile, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a part of wider rows, aligned or not, and not past the last row or column."""
    monkeypatch.setattr(cuda_linear, "prompt_tile", lambda *_: tile)
    rows, n, k = 100, 140, 128
    x = random(rows, k, seed=12, device=device).bfloat16()
    dense = cuda_linear.pack(random(n, k, seed=13, device=device), "q8")
    want = cuda_linear.linear(x[:60], dense, poisoned(60, n, dtype=dtype, device=device))
    for first, width in ((0, 144), (8, 160), (3, 149)):
        out = poisoned(rows + 1, width, dtype=dtype, device=device)
        cuda_linear.linear(x, dense, out[:rows, first : first + n])
        assert torch.equal(out[:60, first : first + n], want)
        assert not out[:rows, first : first + n].isnan().any()
        assert out[:, :first].isnan().all() and out[:, first + n :].isnan().all() and out[rows].isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_per_head_against_float64(rows: int, device: torch.device) -> None:
    heads, n, k = 5, 48, 24
    weight = random(heads, n, k, seed=7, device=device).bfloat16()
    queries = random(rows, heads, 40, seed=8, device=device).bfloat16()
    out = poisoned(rows, heads, n + 16, dtype=torch.bfloat16, device=device)
    cuda_linear.per_head(queries[:, :, 8:32], weight, out[:, :, :n])
    want = torch.einsum("rhk,hnk->rhn", queries[:, :, 8:32].double(), weight.double())
    assert relative_error(out[:, :, :n], want) < 4e-3
    assert out[:, :, n:].isnan().all()
    alone = cuda_linear.per_head(
        queries[:1, :, 8:32], weight, poisoned(1, heads, n, dtype=torch.bfloat16, device=device)
    )
    assert torch.equal(alone[0], out[0, :, :n])


def test_experts_against_float64_and_alone(device: torch.device) -> None:
    experts, picks, n, k, rows = 6, 2, 72, 128, 40
    weights = random(experts, n, k, seed=9, device=device).bfloat16()
    x = random(rows, k, seed=10, device=device).bfloat16()
    choice = torch.randint(0, experts - 1, (rows * picks,), generator=torch.Generator().manual_seed(11)).to(device)
    choice[choice == 2] = 3  # an expert nobody chose, and one that many did

    def run(pairs: torch.Tensor) -> torch.Tensor:
        order = pairs[choice[pairs].argsort(stable=True)]
        starts = torch.searchsorted(choice[order].contiguous(), torch.arange(experts + 1, device=device))
        out = poisoned(rows * picks, n, dtype=torch.float32, device=device)
        ids = torch.arange(experts, dtype=torch.int32, device=device)
        return cuda_linear.experts(x, picks, weights, out, order.int(), starts.int(), ids)

    whole = run(torch.arange(rows * picks, device=device))
    want = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(picks, 0), weights.double()[choice])
    assert relative_error(whole, want) < 1e-5
    few = run(torch.tensor([3, 17, 60], device=device))
    assert torch.equal(few[[3, 17, 60]], whole[[3, 17, 60]])
    assert few[0].isnan().all()
