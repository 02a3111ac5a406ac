"""Sparse attention on the GPU against float64 over the decoded cache, and bit for bit in every window."""

import math

import pytest
import torch

from tfglm.formats import latent as formats
from tfglm.formats.latent import KvFormat
from tfglm.ops import cuda_attention, driver
from tfglm.ops.base import Rope, Selection

pytestmark = pytest.mark.gpu

PAGE, PAGES, LIST = 256, 6, 640
SIZES = [(22, 512, 64), (5, 48, 16), (64, 48, 16)]


class Case:
    """A cache of random rows in one format, and rows with lists of every awkward length."""

    def __init__(self, kv: KvFormat, sizes: tuple[int, int, int], counts: list[int], device: torch.device) -> None:
        heads, latent, rotary = sizes
        generator = torch.Generator().manual_seed(heads)
        rows = len(counts)
        cached = torch.randn(PAGES * PAGE, latent + rotary, generator=generator).bfloat16().float().numpy()
        packed = formats.pack_rows(kv, cached[:, :latent].copy(), cached[:, latent:].copy())
        values = formats.unpack_rows(kv, *packed, latent)
        self.latents, self.rotaries = (torch.from_numpy(part).double() for part in values)
        self.planes = [torch.from_numpy(part).view(PAGES, PAGE, -1).to(device) for part in packed]
        self.queries = torch.randn(rows, heads, latent + rotary + 8, generator=generator).bfloat16().to(device)
        slots = torch.stack([torch.randperm(PAGES * PAGE, generator=generator)[:LIST] for _ in range(rows)])
        for row, count in enumerate(counts):
            slots[row, count:] = 2**30  # nothing past a list may be read
        self.selection = Selection(slots.int().to(device), torch.tensor(counts, dtype=torch.int32, device=device))
        angles = torch.rand(rows, rotary // 2, generator=generator) * 6
        self.rope = Rope(angles.cos().to(device), angles.sin().to(device))
        self.kv, self.sizes, self.device, self.scale = kv, sizes, device, 0.7 / math.sqrt(latent)

    def run(self, rows: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        heads, latent, rotary = self.sizes
        queries = self.queries[rows]
        out = torch.full((len(rows), heads, latent), float("nan"), dtype=dtype, device=self.device)
        log_sums = torch.full((len(rows), heads), float("nan"), device=self.device)
        cuda_attention.attend(
            queries[:, :, :latent], queries[:, :, latent : latent + rotary],
            Rope(self.rope.cos[rows], self.rope.sin[rows]),
            Selection(self.selection.slots[rows], self.selection.counts[rows]), self.scale, self.kv, *self.planes, LIST,
            out, lambda shape, kind: torch.full(shape, float("nan"), dtype=kind, device=self.device), log_sums,
        )  # fmt: skip
        return out, log_sums

    def exact(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, latent, rotary = self.sizes
        slots = self.selection.slots[row, : int(self.selection.counts[row])].long().cpu()
        query = self.queries[row].double().cpu()
        cos, sin = self.rope.cos[row].double().cpu(), self.rope.sin[row].double().cpu()
        even, odd = query[:, latent : latent + rotary : 2], query[:, latent + 1 : latent + rotary : 2]
        rotated = torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=1).float().bfloat16().double()
        scores = query[:, :latent] @ self.latents[slots].T + rotated @ self.rotaries[slots].T
        scores = scores * self.scale
        return scores.softmax(dim=1) @ self.latents[slots], scores.logsumexp(dim=1)


COUNTS = [1, 31, 32, 33, 64, 65, 127, 129, 160, 255, 256, 257, 383, 500, 639, 640, 7]


@pytest.mark.parametrize("kv", list(KvFormat))
@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize("prompt", [False, True])
def test_against_float64(kv: KvFormat, sizes: tuple[int, int, int], prompt: bool, device: torch.device) -> None:
    case = Case(kv, sizes, [*COUNTS, 640, 0], device)
    rows = list(range(18)) if prompt else [0, 3, 6, 12, 14, 17]
    out, log_sums = case.run(rows)
    for i, row in enumerate(rows):
        if not int(case.selection.counts[row]):
            assert not out[i].any()
            assert (log_sums[i] == -math.inf).all()
            continue
        want, total = case.exact(row)
        assert float((out[i].double().cpu() - want).norm() / want.norm()) < 4e-3  # weights are rounded to bfloat16
        assert torch.allclose(log_sums[i].double().cpu(), total, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kv", [KvFormat.BF16, KvFormat.FP4X])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_has_the_same_bits_in_every_window(
    kv: KvFormat, sizes: tuple[int, int, int], device: torch.device
) -> None:
    case = Case(kv, sizes, [*COUNTS, 640], device)
    whole, sums = case.run(list(range(17)))  # the prompt kernel
    windows = (
        [list(range(start, 16)) for start in range(16)] if sizes[1] < 512 else [[5], [6, 12], [14], list(range(8, 15))]
    )
    for rows in windows:
        part, part_sums = case.run(rows)
        assert torch.equal(part, whole[rows])
        assert torch.equal(part_sums, sums[rows])
    assert torch.equal(case.run([9, 14], torch.bfloat16)[0], whole[[9, 14]].bfloat16())


@pytest.mark.parametrize("kv", list(KvFormat))
def test_gpus_with_little_shared_memory_get_the_same_bits(
    kv: KvFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt kernel as GPUs with 99 KiB a block have it, on whichever GPU this is."""
    case, rows = Case(kv, SIZES[0], [*COUNTS, 640], device), list(range(18))
    out, sums = case.run(rows)
    load = driver.load
    monkeypatch.setattr(cuda_attention, "_has_room", lambda _: False)
    monkeypatch.setattr(driver, "load", lambda name, macros: load(name, {**macros, "TOTALS_SHARED": "0"}))
    others = case.run(rows)
    assert torch.equal(others[0], out)
    assert torch.equal(others[1], sums)
