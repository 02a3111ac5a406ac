"""Muon for matrices, Adam for the rest.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": momentum whose singular values are
all brought near 1 by a few steps of a Newton-Schulz iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95


def orthogonalised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A batch of matrices [n, rows, columns] with singular values near 1, in float32."""
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).to(dtype)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).float()


class Muon(torch.optim.Optimizer):
    """Parameters are matrices [.., rows, columns]; those of one shape go together."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[tuple(parameter.shape[-2:])].append(parameter)
            for shape, members in shapes.items():
                self._move(members, shape, group["lr"], group["weight_decay"])

    def _move(self, members: list[nn.Parameter], shape: tuple[int, ...], lr: float, decay: float) -> None:
        gradients = [parameter.grad for parameter in members]
        momenta = []
        for parameter in members:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momenta.append(state["momentum"])
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, momenta, _MOMENTUM)
        flat = torch.cat([update.reshape(-1, *shape) for update in nesterov])
        on_gpu = flat.is_cuda
        moved = orthogonalised(flat, torch.bfloat16 if on_gpu else torch.float32)
        moved *= max(1.0, shape[0] / shape[1]) ** 0.5
        pieces = moved.split([parameter.numel() // (shape[0] * shape[1]) for parameter in members])
        torch._foreach_mul_(members, 1 - lr * decay)
        updates = [piece.view_as(parameter) for piece, parameter in zip(pieces, members, strict=True)]
        torch._foreach_add_(members, updates, alpha=-lr)


def optimisers(model: nn.Module, *, muon_lr: float, adam_lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; Adam for embedding, head, norms and routers, and for indexers, which follow
    a loss of their own."""
    matrices, tables, small, indexers = [], [], [], []
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            indexers.append(parameter)
        elif name.startswith(("embed_tokens", "lm_head", "markov_head")):
            tables.append(parameter)
        elif parameter.dim() < 2 or name.endswith((".gate.weight", "confidence_head.proj.weight")):
            small.append(parameter)
        else:
            matrices.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": tables, "lr": adam_lr},
        {"params": small, "lr": adam_lr},
        {"params": indexers, "lr": adam_lr},
    ]
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, muon_lr, decay),
        torch.optim.Adam([g for g in groups if g["params"]], betas=(0.9, 0.95), eps=1e-10, fused=fused),
    ]


def set_lr(optimisers: list[torch.optim.Optimizer], share: float) -> None:
    """Every learning rate as a share of the one it began with."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group.setdefault("first_lr", group["lr"])
            group["lr"] = group["first_lr"] * share
