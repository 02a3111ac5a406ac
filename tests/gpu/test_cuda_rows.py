"""Norms, rotary embedding and elementwise work on the GPU against float64, and row by row."""

import pytest
import torch

from tfglm.ops import cuda_rows
from tfglm.ops.base import Rope

pytestmark = pytest.mark.gpu

ROUNDING = 2.0**-8


def random(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(got: torch.Tensor, want: torch.Tensor, roundings: float) -> None:
    """Each value within so many roundings to bfloat16 (half a step is at most 2^-8 of a value)."""
    size = want.abs() + want.square().mean(dim=-1, keepdim=True).sqrt() * 0.01
    assert not got.isnan().any()
    assert ((got.double() - want).abs() <= roundings * ROUNDING * size).all()


@pytest.mark.parametrize("width", [128, 264, 2048, 6144])
def test_rms_norm(width: int, device: torch.device) -> None:
    wide = random(5, width + 64, seed=1, device=device).bfloat16()
    x, weight = wide[:, 8 : 8 + width], random(width, seed=2, device=device).bfloat16().float()
    got = cuda_rows.rms_norm(x, weight, 1e-5, poisoned(5, width, device=device))
    exact = x.double() * torch.rsqrt(x.double().square().mean(dim=1, keepdim=True) + 1e-5)
    assert_close(got, exact * weight, 2.02)
    assert torch.equal(cuda_rows.rms_norm(x[3:4], weight, 1e-5, poisoned(1, width, device=device))[0], got[3])


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("width", [128, 6144])
def test_add_rms_norm(width: int, as_float: bool, device: torch.device) -> None:
    dtype = torch.float32 if as_float else torch.bfloat16
    x, weight = (
        random(4, width, seed=3, device=device).bfloat16(),
        random(width, seed=4, device=device).bfloat16().float(),
    )
    branch = random(4, width, seed=5, device=device).to(dtype)
    total, out = (poisoned(4, width, device=device) for _ in range(2))
    cuda_rows.add_rms_norm(x, branch, weight, 1e-5, total, out)
    assert torch.equal(total, (x.float() + branch.bfloat16().float()).bfloat16())
    exact = total.double() * torch.rsqrt(total.double().square().mean(dim=1, keepdim=True) + 1e-5)
    assert_close(out, exact * weight, 2.02)
    alone, normed = x[2:3].clone(), poisoned(1, width, device=device)
    cuda_rows.add_rms_norm(alone, branch[2:3], weight, 1e-5, alone, normed)
    assert torch.equal(alone[0], total[2])
    assert torch.equal(normed[0], out[2])


def test_angles_up_to_a_million_tokens(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 77, 4095, 131072, 1048575], device=device)
    frequencies = 1.0 / 8e6 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    rope = cuda_rows.angles(
        positions,
        frequencies.to(device),
        poisoned(6, 32, device=device, dtype=torch.float32),
        poisoned(6, 32, device=device, dtype=torch.float32),
    )
    angle = (positions.cpu().float()[:, None] * frequencies).double()
    assert torch.equal(rope.cos.cpu(), torch.cos(angle).float().bfloat16().float())
    assert torch.equal(rope.sin.cpu(), torch.sin(angle).float().bfloat16().float())


@pytest.mark.parametrize(("heads", "width", "rotary", "at"), [(5, 40, 16, 24), (22, 256, 64, 192), (32, 128, 64, 0)])
def test_rotate_a_part_of_each_head(heads: int, width: int, rotary: int, at: int, device: torch.device) -> None:
    x = random(7, heads, width, seed=7, device=device).bfloat16()
    angle = random(7, rotary // 2, seed=8, device=device)
    rope = Rope(angle.cos().contiguous(), angle.sin().contiguous())
    part = x[:, :, at : at + rotary]
    even, odd = part.double()[..., 0::2], part.double()[..., 1::2]
    cos, sin = rope.cos.double()[:, None], rope.sin.double()[:, None]
    want = torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    got = cuda_rows.rotate(part, rope, poisoned(7, heads, rotary, device=device))
    assert_close(got, want, 1.01)
    inside = x.clone()
    view = inside[:, :, at : at + rotary]
    cuda_rows.rotate(view, rope, view)
    assert torch.equal(view, got)
    rest = [i for i in range(width) if not at <= i < at + rotary]
    assert torch.equal(inside[:, :, rest], x[:, :, rest])


@pytest.mark.parametrize("inner", [384, 2048, 12288])
def test_swiglu(inner: int, device: torch.device) -> None:
    x = random(3, 2 * inner, seed=9, device=device).bfloat16() * 4
    got = cuda_rows.swiglu(x, poisoned(3, inner, device=device))
    gate, up = x.double().chunk(2, dim=1)
    assert_close(got, gate / (1 + torch.exp(-gate)) * up, 2.02)


def test_combine_adds_in_the_order_of_choice(device: torch.device) -> None:
    slots, weights = random(5 * 8, 132, seed=10, device=device), random(5, 8, seed=11, device=device)
    last = random(5, 132, seed=12, device=device)
    got = cuda_rows.combine(slots, weights, last, poisoned(5, 132, device=device, dtype=torch.float32))
    want = (slots.double().view(5, 8, 132) * weights.double()[:, :, None]).sum(dim=1) + last.double()
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
    out = poisoned(1, 132, device=device, dtype=torch.float32)
    alone = cuda_rows.combine(slots[24:32], weights[3:4], last[3:4], out)
    assert torch.equal(alone[0], got[3])


def test_embed(device: torch.device) -> None:
    table = random(50, 136, seed=12, device=device).bfloat16()
    tokens = torch.tensor([0, 49, 7, 7], device=device)
    assert torch.equal(cuda_rows.embed(table, tokens, poisoned(4, 136, device=device)), table[tokens])
