"""EXL3 arithmetic written anew for the tests, in float64 torch, from the format's definition alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VECTORS = Path(__file__).parent.parent / "vectors"
BLOCK = 128


def vectors(name: str) -> np.lib.npyio.NpzFile:
    return np.load(VECTORS / f"{name}.npz")


def table(codebook: str, device: str = "cuda") -> torch.Tensor:
    """float64 [65536]: the reference's table."""
    return torch.from_numpy(vectors("exl3_vectors")[f"codebook_{codebook}_u16"].view(np.float16)).to(device).double()


def decode(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """int16 [k/16, n/16, 8 * k2] -> float64 [k, n]."""
    rows, columns, words = trellis.shape
    k2 = words // 8
    ring = trellis.contiguous().view(torch.int32).long() & 0xFFFFFFFF  # [rows, columns, 4 * k2]
    position = torch.arange(256, device=trellis.device)
    start = ((position + 1) * k2 // 2 - 16) % (128 * k2)
    first, offset = start // 32, start % 32
    pair = (ring[..., first] << 32) | ring[..., (first + 1) % (4 * k2)]
    weights = table(codebook, str(trellis.device))[(pair >> (48 - offset)) & 0xFFFF]  # [rows, columns, 256]
    lane, slot = position // 8, position % 8
    row = 2 * (lane % 4) + slot % 2 + 8 * (slot // 2 % 2)
    column = lane // 4 + 8 * (slot // 4)
    tiles = torch.empty(rows, columns, 16, 16, dtype=torch.float64, device=trellis.device)
    tiles[:, :, row, column] = weights
    return tiles.transpose(1, 2).reshape(rows * 16, columns * 16)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """float64 [..., n]: each block of 128 times the orthonormal Sylvester matrix."""
    h = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (x.reshape(*x.shape[:-1], -1, BLOCK) @ (h / BLOCK**0.5)).reshape(x.shape)


def linear(x: torch.Tensor, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: str) -> torch.Tensor:
    """float64 [rows, n] = x . W, nothing rounded."""
    return rotate(rotate(x.double() * suh.double()) @ decode(trellis, codebook)) * svh.double()


@dataclass
class Layer:
    """Random experts of one layer."""

    gate: list[torch.Tensor]
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    suh: torch.Tensor
    svh: torch.Tensor
    down_suh: torch.Tensor
    down_svh: torch.Tensor
    codebook: str

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """float64 [rows, hidden] with the model's bf16 roundings between the matrices."""
        suh = (self.suh, self.suh) if self.suh.dim() == 1 else (self.suh[0, e], self.suh[1, e])
        own = 16 * self.gate[e].shape[1]
        if not own:
            return torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        gate = linear(x, self.gate[e], suh[0], self.svh[0, e, :own], self.codebook).bfloat16().double()
        up = linear(x, self.up[e], suh[1], self.svh[1, e, :own], self.codebook).bfloat16().double()
        h = ((gate / (1 + (-gate).exp())).bfloat16().double() * up).bfloat16()
        return linear(h, self.down[e], self.down_suh[e, :own], self.down_svh[e], self.codebook)

    def forward(
        self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for e in range(len(self.gate)):
            row, slot = (picks == e).nonzero(as_tuple=True)
            if len(row):
                out.index_add_(0, row, self.expert(e, x[row]) * weights[row, slot].double()[:, None])
        return out if shared is None else out + shared.double()


def signed(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """float16 around +-1."""
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * (0.5 + torch.rand(shape, generator=generator))).half()


def random_layer(
    experts: int,
    hidden: int,
    columns: int | list[int],
    widths: list[tuple[int, int, int]],
    codebook: str,
    shared_scale: bool,
    seed: int,
) -> Layer:
    """columns: inner columns of all experts, or of each. widths: twice the bits of gate, up and down, dealt to experts
    in turn. Scales past an expert's own columns are no numbers."""
    g = torch.Generator().manual_seed(seed)

    def words(rows: int, columns: int, k2: int) -> torch.Tensor:
        shape = (rows // 16, columns // 16, 8 * k2)
        return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=g).cuda()

    own = [columns] * experts if isinstance(columns, int) else columns
    width = max(own)
    chosen = [widths[e % len(widths)] for e in range(experts)]
    absent = torch.arange(width) >= torch.tensor(own)[:, None]
    scale = (signed(g, hidden) if shared_scale else signed(g, 2, experts, hidden)).float() / (1.24 * hidden**0.5)
    return Layer(
        gate=[words(hidden, size, k2[0]) for size, k2 in zip(own, chosen, strict=True)],
        up=[words(hidden, size, k2[1]) for size, k2 in zip(own, chosen, strict=True)],
        down=[words(size, hidden, k2[2]) for size, k2 in zip(own, chosen, strict=True)],
        suh=scale.half().cuda(),
        svh=signed(g, 2, experts, width).masked_fill(absent, float("nan")).cuda(),
        down_suh=(signed(g, experts, width).float() / (1.24 * width**0.5))
        .half()
        .masked_fill(absent, float("nan"))
        .cuda(),
        down_svh=signed(g, experts, hidden).cuda(),
        codebook=codebook,
    )
