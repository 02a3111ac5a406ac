"""What the calibration rows say about a linear's inputs: H = mean of x x^T, and how far errors may be fed back in it.

A linear's output error over the rows is tr(E^T H E) for an error E [k, n] of its weights. The block LDL factor of H
tells a quantiser that fixes 16 rows of weights at a time how the rows still open can make up for the error already made
(LDLQ; QuIP#, arXiv 2402.04396).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.formats.exl3_code import TILE

DAMPING = 0.025
"""Of the mean diagonal, added to the diagonal: the calibration text is a sample, not the truth."""
_RETRY_DAMPING, _RETRIES = 0.05, 10
_NO_SIGNAL = 1e-20


class HessianSum:
    """Sums w^2 x x^T over rows. float32 on the device of the rows."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(inputs, inputs, device=device)
        self.weight = 0.0
        self.rows = 0

    def add(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """x [R, inputs] of any float type; weights [R]: how much of the row's output is used (a routing weight)."""
        rows = x.float() if weights is None else x.float() * weights[:, None]
        self.total.addmm_(rows.T, rows)
        self.weight += float(len(x) if weights is None else weights.square().sum())
        self.rows += len(x)

    def mean(self) -> torch.Tensor:
        """[inputs, inputs]: the weighted mean, all zero without rows."""
        return self.total / max(self.weight, _NO_SIGNAL)


def filled_up(mean: torch.Tensor, rows: int, prior: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over at least as many rows as there are inputs; the missing ones are taken to be like `prior`.

    A rarely chosen expert has seen few rows and its H is singular. prior: mean over all rows of the layer; None: the
    inputs are taken to be independent and of equal size.
    """
    inputs = mean.shape[0]
    missing = max(0, inputs - rows)
    if not missing:
        return mean
    if prior is None:
        energy = float(mean.diagonal().mean()) if rows else 1.0
        prior = energy * torch.eye(inputs, device=mean.device)
    return (rows * mean + missing * prior) / inputs


@dataclass(frozen=True)
class Feedback:
    """The block LDL factor of a linear's H in its rotated basis.

    lower: [k, k] unit block-lower: lower[c, a] of 16-row blocks c > a weighs block c's error in block a's target.
    None: no calibration, no feedback. spread: trace of the block-diagonal D; white noise of variance s^2 on
    every weight leaves an output error of s^2 * spread a column after feedback.
    """

    lower: torch.Tensor | None
    spread: float


def damped(h: torch.Tensor) -> torch.Tensor | None:
    """H with its diagonal raised a little; None when it carries no signal (no rows, or values that are not finite)."""
    energy = float(h.diagonal().mean())
    if not energy > _NO_SIGNAL or not bool(torch.isfinite(h).all()):
        return None
    raised = h.clone()
    raised.diagonal().add_(DAMPING * energy)
    return raised


def feedback(rotated: torch.Tensor) -> Feedback:
    """Factor the damped H [k, k] of the rotated and scaled inputs."""
    inputs, factor = len(rotated), _cholesky(rotated)
    blocks = factor.reshape(inputs // TILE, TILE, inputs // TILE, TILE).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    identity = torch.eye(TILE, device=factor.device).expand_as(blocks)
    inverse = torch.linalg.solve_triangular(blocks, identity, upper=False)
    lower = torch.einsum("kbi,bij->kbj", factor.reshape(inputs, inputs // TILE, TILE), inverse)
    return Feedback(lower.reshape(inputs, inputs), float(blocks.square().sum()))


def _cholesky(h: torch.Tensor) -> torch.Tensor:
    energy = h.diagonal().mean()
    for attempt in range(_RETRIES + 1):
        raised = h.clone()
        raised.diagonal().add_(attempt * _RETRY_DAMPING * energy)
        factor, failed = torch.linalg.cholesky_ex(raised)
        # On a GPU a matrix that rounding has made indefinite came back without an error, as no numbers.
        if not int(failed) and bool(factor.isfinite().all()):
            return factor
    raise ArithmeticError(
        f"a {len(h)} x {len(h)} Hessian has no Cholesky factor even with half its mean diagonal added"
    )
