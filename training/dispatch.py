"""Rows to experts and back: gathers in both directions, in the forward and in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Slots:
    """Where N rows with k picks each go in E experts with C places each.

    row_of_slot [E * C]: the row in a place, N for an empty one. slot_of_pick [N, k]: the place of a pick, E * C where
    it did not fit. pick_of_slot [E * C]: row * k + pick, N * k for an empty place. fits [N, k]. load [E]: picks of each
    expert, those that did not fit included.
    """

    row_of_slot: Tensor
    slot_of_pick: Tensor
    pick_of_slot: Tensor
    fits: Tensor
    load: Tensor


@torch.no_grad()
def slots_of(chosen: Tensor, experts: int, room: int) -> Slots:
    """chosen [N, k]: expert of each pick. Earlier rows come first where an expert has no room for all."""
    rows, picks = chosen.shape
    flat = chosen.flatten()
    one_hot = (flat[:, None] == torch.arange(experts, device=flat.device)).int()
    running = one_hot.cumsum(0)
    place = (running * one_hot).sum(1) - 1
    fits = place < room
    slot = torch.where(fits, flat * room + place, experts * room)
    pick_of_slot = torch.full((experts * room + 1,), rows * picks, dtype=torch.int64, device=flat.device)
    pick_of_slot.scatter_(0, slot, torch.arange(rows * picks, device=flat.device))
    pick_of_slot = pick_of_slot[:-1]
    row_of_slot = torch.where(pick_of_slot < rows * picks, pick_of_slot // picks, rows)
    return Slots(row_of_slot, slot.view(rows, picks), pick_of_slot, fits.view(rows, picks), running[-1])


class _Gather(torch.autograd.Function):
    """out[i] = x[index[i]], zero where index is len(x). The gradient gathers by `inverse` instead of adding at random
    places: row r of x was read at out[inverse[r, :]]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        parts = [_rows(gradients[0], inverse[:, column]) for column in range(inverse.shape[1])]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total, None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    inside = index < x.shape[0]
    return x[torch.where(inside, index, 0)] * inside[:, None].to(x.dtype)


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows of x [R, width] at index [S] (R: a row of zeros); inverse [R, m]: where each row went (S: nowhere)."""
    out: Tensor = _Gather.apply(x, index, inverse)
    return out
