"""From a linear's weights to evenly spread ones and back: signs, scales and Hadamard rotations around the tiles.

Notation of formats/exl3.py: W [k, n] = diag(suh) . Hk . Wq . Hn . diag(svh).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfglm.formats.exl3_code import BLOCK, CODEBOOK_SCALE, TILE
from tfglm.formats.hadamard import SCALE, signs_matrix

# Error feedback widens the targets beyond the weights; the scale is searched on tiles widened likewise (by bits).
_DRIFT = {1.0: 1.08, 1.5: 1.035, 2.0: 1.018, 2.5: 1.009, 3.0: 1.004}
_STEP = 0.075
# The finer the code, the more its range limits it and the smaller the weights should be: -2.5 % a bit.
_SHRINK = 0.025
_REFIT_ROUNDS = 2
_REFIT_DAMPING = 1e-6


def rotate_columns(x: torch.Tensor) -> torch.Tensor:
    """x . H along the last dimension, in blocks of 128."""
    return (x.reshape(-1, BLOCK) @ _block(x)).reshape(x.shape)


def rotate_rows(x: torch.Tensor) -> torch.Tensor:
    """H . x along the first of two dimensions, in blocks of 128."""
    return (_block(x) @ x.reshape(-1, BLOCK, x.shape[1])).reshape(x.shape)


def _block(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(signs_matrix() * SCALE).to(x)


def output_scales(w: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """sv [n] of w [k, n]: the column's sign, times its size relative to the mean column; 0 for columns of zeros."""
    sizes = w.square().mean(dim=0).sqrt()
    return signs * sizes / sizes.mean().clamp_min(torch.finfo(sizes.dtype).tiny)


def row_energy(w: torch.Tensor, sv: torch.Tensor) -> torch.Tensor:
    """[k]: squares of each row of w after the output side's scales and rotation, summed."""
    return rotate_columns(_over(w, sv)).square().sum(dim=1)


def input_scales(energy: torch.Tensor, columns: int, signs: torch.Tensor) -> torch.Tensor:
    """su [k] that brings every row to the codebook's size; energy: `row_energy` summed over `columns` columns."""
    return signs * (energy / columns).sqrt() / -CODEBOOK_SCALE


def to_rotated(w: torch.Tensor, su: torch.Tensor, sv: torch.Tensor) -> torch.Tensor:
    """The weights [k, n] between the rotations, near the codebook's size."""
    return rotate_rows(_over(rotate_columns(_over(w, sv)), su[:, None]))


def from_rotated(q: torch.Tensor, su: torch.Tensor, sv: torch.Tensor) -> torch.Tensor:
    """The model's own weights [k, n] again."""
    return su[:, None] * rotate_columns(rotate_rows(q)) * sv


def rotated_hessian(h: torch.Tensor, su: torch.Tensor) -> torch.Tensor:
    """H [k, k] as the weights between the rotations see it: their error weighs by the input scales too."""
    return rotate_rows(rotate_columns(su[:, None] * h * su))


def _over(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return w / torch.where(scales == 0, 1, scales)


# ---- one factor for all tiles ---------------------------------------------------------------------------------------
def sample_tiles(tiles: torch.Tensor, count: int) -> torch.Tensor:
    """About `count` of [k/16, n/16, 256]: three quarters along a wrapped diagonal, the rest with the largest and the
    smallest weights; all if there are no more."""
    rows, columns, _ = tiles.shape
    flat = tiles.reshape(rows * columns, -1)
    if len(flat) <= count:
        return flat
    along = torch.linspace(0, rows * columns - 1, 3 * count // 4).long() // columns
    diagonal = along * columns + (along + torch.arange(len(along))) % columns
    by_size = flat.square().sum(dim=1).argsort().cpu()
    extreme = max(1, count // 8)
    chosen = torch.cat([diagonal, by_size[:extreme], by_size[-extreme:]]).unique()
    return flat[chosen.to(flat.device)]


def search_scale(
    tiles: torch.Tensor, bits: float, spread: float, decoded: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """The factor g that leaves the least error of decoded(g * tiles) / g on sampled tiles [t, 256].

    decoded: tiles -> the weights that the code has for them. spread: standard deviation of all its weights, about the
    size that suits it.
    """
    widened = tiles * _DRIFT.get(bits, 1.0)
    errors: dict[int, float] = {}

    def error(step: int) -> float:
        if step not in errors:
            g = start * (1 + _STEP * step)
            errors[step] = float((decoded(g * widened) / g - widened).square().mean())
        return errors[step]

    start = spread / float(widened.square().mean().sqrt().clamp_min(1e-30)) * (1 - _SHRINK * bits)
    best = min(range(-2, 3), key=error)
    while error(best - 1) < error(best) and 1 + _STEP * (best - 2) > 0:
        best -= 1
    while error(best + 1) < error(best):
        best += 1
    below, at, above = error(best - 1), error(best), error(best + 1)
    return start * (1 + _STEP * (best + 0.5 * (below - above) / max(below - 2 * at + above, 1e-30)))


# ---- after the code has been chosen ---------------------------------------------------------------------------------
def refit(w: torch.Tensor, q: torch.Tensor, h: torch.Tensor, *, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors for su [k] and sv [n] that bring the finished weights q [k, n] closest to w under H. Costs no bits.

    rows False leaves su alone (it may be shared with other matrices).
    """
    row_factor, column_factor = torch.ones_like(q[:, 0]), torch.ones_like(q[0])
    hw = h @ w
    for _ in range(_REFIT_ROUNDS if rows else 1):
        now = row_factor[:, None] * q
        column_factor = _sane((now * hw).sum(dim=0) / (now * (h @ now)).sum(dim=0))
        if rows:
            now = q * column_factor
            system = (now @ now.T) * h
            system.diagonal().add_(_REFIT_DAMPING * system.diagonal().mean())
            solved, failed = torch.linalg.solve_ex(system, (now * hw).sum(dim=1))
            row_factor = torch.ones_like(solved) if int(failed) else _sane(solved)
    return row_factor, column_factor


def _sane(factor: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)


# ---- order of a tile ------------------------------------------------------------------------------------------------
def to_tiles(w: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[k, n] -> [k/16, n/16, 256] by a permutation of the 256 places of a tile."""
    k, n = w.shape
    return w.reshape(k // TILE, TILE, n // TILE, TILE).transpose(1, 2).reshape(k // TILE, n // TILE, -1)[..., order]


def from_tiles(tiles: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_tiles` for the inverse permutation."""
    rows, columns, _ = tiles.shape
    square = tiles[..., order].reshape(rows, columns, TILE, TILE).transpose(1, 2)
    return square.reshape(rows * TILE, columns * TILE)
