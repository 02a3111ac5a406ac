"""Launches of kernels/sample.cu: from rows of logits to tokens without bringing the rows to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tfglm.ops import driver
from tfglm.ops.cuda_launch import chained
from tfglm.ops.draw import Draw

_CHUNK = 1024
_BEST_BYTES = 16
_CUT_BYTES = 8
_WORD = 1 << 64


@dataclass(frozen=True)
class Draws:
    """How to choose each row's token (see `Draw`); one value a row, on the device: float64, top_k int32, keys int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class Scratch:
    """Of `sample`, for up to so many rows and a vocabulary up to so many columns."""

    bests: torch.Tensor
    scored: torch.Tensor
    masses: torch.Tensor
    cuts: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, columns: int, device: torch.device) -> Scratch:
        def empty(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        bests = rows * -(-columns // _CHUNK) * _BEST_BYTES
        return cls(empty(bests), empty(bests), empty(rows * columns, torch.int64), empty(rows * _CUT_BYTES))


def sample(logits: torch.Tensor, vocabulary: int, draws: Draws, tokens: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """tokens int32 [R] of logits float32 [R, at least vocabulary]; -1 for a row whose best logit is NaN or infinite.

    As engine.sampler.choose does it for rows without penalties, bias or masked tokens.
    """
    rows, chunks = logits.shape[0], -(-vocabulary // _CHUNK)
    kernels = driver.load("sample")
    row = (logits, logits.stride(0), vocabulary)
    d, s = draws, scratch
    chained(kernels.kernel("sample_tops"))((chunks, rows), 256, (*row, s.bests))
    chained(kernels.kernel("sample_masses"))((chunks, rows), 256, (*row, s.bests, d.temperature, d.top_p, s.masses))
    cut = (*row, d.temperature, d.top_k, d.top_p, s.masses, s.cuts)
    chained(kernels.kernel("sample_cut"))((rows,), 1024, cut)
    score = (*row, s.bests, d.temperature, d.log_min_p, d.keys, s.cuts, s.scored)
    chained(kernels.kernel("sample_scores"))((chunks, rows), 256, score)
    chained(kernels.kernel("sample_tokens"))((rows,), 256, (s.bests, s.scored, d.temperature, chunks, tokens))
    return tokens


class Sampler:
    """Draws tokens from up to `rows` rows of `columns` logits. All its memory is allocated at the start.

    `launch` and `tokens` belong together: between them the stream must have come to its end, and no other launch may
    begin before.
    """

    def __init__(self, columns: int, rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._rows = rows
        self._scratch = Scratch.allocate(rows, columns, device)
        self._given = torch.empty(5, rows, dtype=torch.int64, pin_memory=pinned)
        self._there = torch.empty(5, rows, dtype=torch.int64, device=device)
        self._drawn = torch.empty(rows, dtype=torch.int32, device=device)
        self._tokens = torch.empty(rows, dtype=torch.int32, pin_memory=pinned)

    def launch(self, logits: torch.Tensor, draws: Sequence[Draw | None]) -> None:
        """Begin to draw from logits float32 [R, columns] on the device. Raises ValueError for too many rows."""
        count = len(draws)
        if count > self._rows or count != logits.shape[0]:
            raise ValueError(f"{count} draws from {logits.shape[0]} rows; they must be as many, {self._rows} at most")
        given = self._given.numpy()
        floats, top_k = given.view(np.float64), given[4].view(np.int32)
        vocabulary = 0
        for row, draw in enumerate(draws):
            if draw is None:
                floats[:3, row], given[3, row], top_k[row] = (0.0, 1.0, 0.0), 0, 0
                continue
            vocabulary = draw.vocabulary
            floats[:3, row], top_k[row] = (draw.temperature, draw.top_p, draw.log_min_p), min(draw.top_k, vocabulary)
            given[3, row] = draw.key - _WORD if draw.key >> 63 else draw.key
        there = self._there.copy_(self._given, non_blocking=True)
        temperature, top_p, log_min_p = there[:3].view(torch.float64)
        on_device = Draws(temperature, there[4].view(torch.int32), top_p, log_min_p, there[3])
        sample(logits, vocabulary, on_device, self._drawn, self._scratch)
        self._tokens.copy_(self._drawn, non_blocking=True)

    def tokens(self, draws: Sequence[Draw | None]) -> list[int | None]:
        """What was drawn; None where nothing was to be."""
        drawn = self._tokens[: len(draws)].tolist()
        return [None if draw is None else token for draw, token in zip(draws, drawn, strict=True)]
