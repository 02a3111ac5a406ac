"""Launches of kernels/sample.cu: from rows of logits to tokens without bringing the rows to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tfglm.ops import driver
from tfglm.ops.cuda_launch import chained

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Uninitialised memory on the device."""

_CHUNK = 1024
_BEST_BYTES = 16
_CUT_BYTES = 8


@dataclass(frozen=True)
class Draws:
    """How to choose each row's token; one value a row, on the device.

    temperature float64: 0 asks for the greatest value, else at least 1e-6. top_k int32: 0 keeps all. top_p float64: 1
    keeps all. log_min_p float64: -inf keeps all. keys int64: the row's noise key, of seed and position.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    keys: torch.Tensor


def sample(logits: torch.Tensor, vocabulary: int, draws: Draws, tokens: torch.Tensor, empty: Empty) -> torch.Tensor:
    """tokens int32 [R] of logits float32 [R, at least vocabulary]; -1 for a row whose best logit is NaN or infinite.

    As engine.sampler.choose does it for rows without penalties, bias or masked tokens.
    """
    rows, chunks = logits.shape[0], -(-vocabulary // _CHUNK)
    kernels = driver.load("sample")
    bests, scored = (empty((rows, chunks, _BEST_BYTES), torch.uint8) for _ in range(2))
    masses = empty((rows, vocabulary), torch.int64)
    cuts = empty((rows, _CUT_BYTES), torch.uint8)
    row = (logits, logits.stride(0), vocabulary)
    d = draws
    chained(kernels.kernel("sample_tops"))((chunks, rows), 256, (*row, bests))
    chained(kernels.kernel("sample_masses"))((chunks, rows), 256, (*row, bests, d.temperature, d.top_p, masses))
    cut = (*row, d.temperature, d.top_k, d.top_p, masses, cuts)
    chained(kernels.kernel("sample_cut"))((rows,), 1024, cut)
    score = (*row, bests, d.temperature, d.log_min_p, d.keys, cuts, scored)
    chained(kernels.kernel("sample_scores"))((chunks, rows), 256, score)
    chained(kernels.kernel("sample_tokens"))((rows,), 256, (bests, scored, d.temperature, chunks, tokens))
    return tokens
