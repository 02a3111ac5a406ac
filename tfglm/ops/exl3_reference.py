"""EXL3 linears and experts in plain torch, float32 on a CPU: what is right.

Rounding: x . suh and the rotation of the inputs in float32, one rounding to fp16, products with the fp16 weights and
their sums in float32, rotation of the outputs and svh in float32. A rotation adds in a fixed order, value by value, so
a row's bits stay its own.
"""

from __future__ import annotations

import torch

from tfglm.formats.hadamard import rotate
from tfglm.ops.base import Routing
from tfglm.ops.exl3_weights import DOWN, GATE, UP, Exl3Experts, Exl3Weight
from tfglm.ops.rows import Rows


def linear(rows: Rows, x: torch.Tensor, weight: Exl3Weight) -> torch.Tensor:
    """x float32 [R, inputs] through the weight: [R, outputs]."""
    padded = torch.constant_pad_nd(x, (0, len(weight.suh) - x.shape[1]))
    sums = rows.linear(rotated_inputs(padded, weight.suh), weight.rotated)
    return (rotate(sums) * weight.svh.float())[:, : weight.outputs]


def experts(rows: Rows, x: torch.Tensor, routing: Routing, experts: Exl3Experts) -> torch.Tensor:
    """Each row through the experts it chose: x float32 [R, hidden] -> [R, k, hidden], unweighted."""
    picks = routing.experts.shape[1]
    order = routing.experts.flatten().argsort(stable=True)  # (row, pick) pairs as row * picks + pick, by expert
    expert, row = routing.experts.flatten()[order], order // picks
    counts = expert.bincount(minlength=experts.offsets.shape[1]).tolist()
    inner, most = experts.inner.tolist(), experts.down_suh.shape[1]

    def product(inputs: torch.Tensor, projection: int) -> torch.Tensor:
        """Columns that an expert lacks: those of gate and up are zero, and down reads none of them."""
        columns = x.shape[1] if projection == DOWN else most
        products = inputs.new_zeros(len(inputs), columns)
        for number, (part, to) in enumerate(zip(inputs.split(counts), products.split(counts), strict=True)):
            if len(part) and inner[number]:
                weight = experts.rotated(projection, number)
                to[:, : len(weight)] = rows.linear(part[:, : weight.shape[1]], weight)
        return products

    if experts.shared_suh:
        inputs = rotated_inputs(x, experts.suh)[row]
        gate, up = product(inputs, GATE), product(inputs, UP)
    else:
        gate, up = (product(rotated_inputs(x[row], experts.suh[p, expert]), p) for p in (GATE, UP))
    gate, up = (rotate(sums) * experts.svh[p, expert].float() for p, sums in ((GATE, gate), (UP, up)))
    down = product(rotated_inputs(rows.silu(gate) * up, experts.down_suh[expert]), DOWN)
    outputs = torch.empty_like(down)
    outputs[order] = rotate(down) * experts.down_svh[expert].float()
    return outputs.unflatten(0, (-1, picks))


def rotated_inputs(x: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """Inputs float32 as the weights see them: scaled, rotated, rounded once to fp16 (held as float32)."""
    return rotate(x * suh.float()).half().float()
