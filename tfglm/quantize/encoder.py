"""Who searches the rings: the CPU (compiled or numpy) or a GPU kernel, behind one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from tfglm.formats.exl3 import stream_positions
from tfglm.formats.exl3_code import codebook_table
from tfglm.formats.exl3_viterbi import encode_tiles


class Search(Protocol):
    """float32 [t, 256] in stream order, near the codebook's size -> uint16 [t, 256]: states, on the same device."""

    def __call__(self, tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor: ...


def search_on_cpu(tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
    """float32 costs: never a worse ring than the reference's fp16 ones."""
    return encode_tiles(tiles, bits, codebook, costs="fp32")


def search_on(device: torch.device) -> Search:
    """The fastest search for tensors of a device."""
    if device.type == "cpu":
        return search_on_cpu
    from tfglm.ops import exl3_cuda  # needs a driver

    def search(tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
        if bits in exl3_cuda.ENCODE_BITS:
            return exl3_cuda.encode_tiles(tiles, int(bits), codebook)
        return search_on_cpu(tiles.cpu(), bits, codebook).to(tiles.device)

    return search


@dataclass(frozen=True)
class Encoder:
    """One codebook at one width."""

    search: Search
    bits: float
    codebook: str

    def encode(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [t, 256] in stream order -> states uint16 [t, 256] and the float32 weights they stand for."""
        states = self.search(tiles, self.bits, self.codebook)
        return states, table_on(self.codebook, tiles.device)[states.int()]

    def decoded(self, tiles: torch.Tensor) -> torch.Tensor:
        """The float32 weights that the code has for tiles [t, 256]."""
        return self.encode(tiles)[1]


@cache
def table_on(codebook: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(codebook_table(codebook).astype(np.float32)).to(device)


@cache
def tile_order(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-major place of each stream position, and stream position of each row-major place: int64 [256] each."""
    positions = stream_positions()
    return torch.from_numpy(np.argsort(positions)).to(device), torch.from_numpy(positions).to(device)
