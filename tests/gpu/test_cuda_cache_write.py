"""Cache rows written by the GPU: values against float64, bytes against the numpy formats."""

import numpy as np
import pytest
import torch

from tfglm.formats import latent as formats
from tfglm.formats.latent import KvFormat
from tfglm.ops import cuda_cache
from tfglm.ops.base import Rope

pytestmark = pytest.mark.gpu

PAGES, PAGE = 2, 256
SIZES = [(512, 64, 128), (48, 16, 32)]
QUERIES = 264


class Written:
    """A window of rows and the planes they were written to in one format."""

    def __init__(self, kv: KvFormat, sizes: tuple[int, int, int], rows: list[int], device: torch.device) -> None:
        c, d, width = sizes
        generator = torch.Generator().manual_seed(c)
        every = torch.randn(40, c + d + width, generator=generator) * 10 ** torch.randn(40, 1, generator=generator)
        queries = torch.randn(40, QUERIES, generator=generator)[rows].bfloat16().to(device)
        every[3] = 0
        every[4, :c] *= 1e-20
        a = every[rows].bfloat16().to(device)
        norm, weight, bias = (
            torch.randn(n, generator=generator).bfloat16().float().to(device) for n in (c, width, width)
        )
        angle = torch.randn(40, d // 2, generator=generator)[rows].to(device)
        rope = Rope(angle.cos().bfloat16().float(), angle.sin().bfloat16().float())
        slots = (torch.randperm(PAGES * PAGE, generator=generator)[:40])[rows].to(device)
        size = formats.row_bytes(kv, c, d, width)
        self.planes = [
            torch.full((PAGES, PAGE, n), 0xA5, dtype=torch.uint8, device=device)
            for n in (size.latent, size.rotary, size.index)
        ]
        q_norm = torch.randn(QUERIES, generator=generator).bfloat16().float().to(device)
        self.q = torch.full((len(rows), QUERIES), float("nan"), dtype=torch.bfloat16, device=device)
        whole = torch.cat([queries, a[:, : c + d], queries], dim=1)  # rows are wider than what is read of them
        planes = self.planes[:2]
        cuda_cache.split_latents(whole, q_norm, norm, 1e-5, rope, slots, kv, *planes, self.q)
        exact = queries.double() * torch.rsqrt(queries.double().square().mean(dim=1, keepdim=True) + 1e-5) * q_norm
        self.q_error = ((self.q.double() - exact).abs() / (exact.abs() + 1e-30)).max()
        cuda_cache.write_index_key(a[:, c + d :], weight, bias, rope, slots, kv, self.planes[2])
        self.slots = slots.cpu()
        self.inputs = (a.cpu().double(), norm.cpu().double(), weight.cpu().double(), bias.cpu().double())
        self.rope = (rope.cos.cpu().double(), rope.sin.cpu().double())

    def rows(self) -> list[np.ndarray]:
        return [plane.cpu().flatten(0, 1)[self.slots].numpy() for plane in self.planes]


def rotated(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    even, odd = x[:, 0::2], x[:, 1::2]
    return torch.cat([even * rope[0] - odd * rope[1], odd * rope[0] + even * rope[1]], dim=1)


@pytest.mark.parametrize("sizes", SIZES)
def test_bf16_rows_against_float64(sizes: tuple[int, int, int], device: torch.device) -> None:
    c, d, _ = sizes
    written = Written(KvFormat.BF16, sizes, list(range(40)), device)
    a, norm, weight, bias = written.inputs
    latent, rotary, index = (torch.from_numpy(formats.unpack_bf16(rows)).double() for rows in written.rows())
    x, key = a[:, :c], a[:, c + d :]
    want = [
        x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-5) * norm,
        rotated(a[:, c : c + d], written.rope),
        (key - key.mean(dim=1, keepdim=True)) * torch.rsqrt(key.var(dim=1, correction=0, keepdim=True) + 1e-6) * weight
        + bias,
    ]
    want[2] = torch.cat([rotated(want[2][:, :d], written.rope), want[2][:, d:]], dim=1)
    for got, exact in zip((latent, rotary, index), want, strict=True):
        size = exact.abs() + exact.abs().amax(dim=1, keepdim=True)
        assert ((got - exact).abs() <= 2.0**-7 * size).all()
    assert written.q_error < 2.02 * 2.0**-8  # two roundings
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    untouched[written.slots] = False
    assert all((plane.cpu().flatten(0, 1)[untouched] == 0xA5).all() for plane in written.planes)


@pytest.mark.parametrize("kv", [KvFormat.FP8, KvFormat.FP4, KvFormat.FP4X])
@pytest.mark.parametrize("sizes", SIZES)
def test_packed_bytes_equal_numpy(kv: KvFormat, sizes: tuple[int, int, int], device: torch.device) -> None:
    plain = [formats.unpack_bf16(rows) for rows in Written(KvFormat.BF16, sizes, list(range(40)), device).rows()]
    want = [*formats.pack_rows(kv, plain[0], plain[1]), formats.pack_index(kv, plain[2])]
    for got, packed in zip(Written(kv, sizes, list(range(40)), device).rows(), want, strict=True):
        assert np.array_equal(got, packed)


@pytest.mark.parametrize("kv", list(KvFormat))
def test_bytes_of_a_row_do_not_depend_on_its_window(kv: KvFormat, device: torch.device) -> None:
    whole = Written(kv, SIZES[1], list(range(16)), device)
    for rows in ([5], [5, 11], list(range(9)), list(range(15, -1, -1))):
        part = Written(kv, SIZES[1], rows, device)
        assert all(np.array_equal(p, w[rows]) for p, w in zip(part.rows(), whole.rows(), strict=True))
        assert torch.equal(part.q, whole.q[rows])
