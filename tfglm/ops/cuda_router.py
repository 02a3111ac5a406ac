"""Launches of kernels/router.cu: the choice of experts and the rows of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.ops import driver
from tfglm.ops.base import Routing
from tfglm.ops.cuda_launch import chained

MAX_EXPERTS = 512
MAX_PICKS = 32


@dataclass(frozen=True)
class Groups:
    """The pairs (row, pick) of a window by expert. All int32.

    pairs [R * k]: row * k + pick, by expert and then by number. experts [G]: those that have pairs, ascending.
    starts [G + 1]: where each one's pairs begin; groups past the last have none.
    """

    pairs: torch.Tensor
    starts: torch.Tensor
    experts: torch.Tensor


def route(
    logits: torch.Tensor, correction: torch.Tensor, normalise: bool, factor: float, experts: torch.Tensor,
    weights: torch.Tensor,
) -> Routing:  # fmt: skip
    """The best experts int32 [R, k] of logits float32 [R, E] by sigmoid(logit) + correction, with their weights."""
    rows, count = logits.shape
    picks = experts.shape[1]
    assert count <= MAX_EXPERTS and picks <= MAX_PICKS, f"{picks} of {count} experts are more than the kernel ranks"
    arguments = (logits, correction, experts, weights, rows, count, picks, int(normalise), factor)
    chained(driver.load("router").kernel("route"))((-(-rows // 4),), 128, arguments)
    return Routing(experts, weights)


def group(experts: torch.Tensor, count: int, groups: Groups) -> Groups:
    """Fill `groups` for experts int32 [R, k] out of `count`."""
    total = experts.numel()
    threads = -(-count // 32) * 32
    arguments = (experts, total, count, groups.pairs, groups.starts, groups.experts, groups.experts.shape[0])
    chained(driver.load("router").kernel("group_pairs"))((1,), threads, arguments)
    return groups
