"""Which expert gets how many bits: the least summed error at an exact mean width.

The error of a matrix at a width is known before any code is searched: the code's error on evenly spread weights (NMSE,
a constant of codebook and width) times what the calibration says white noise in that matrix would cost. So choosing
widths is a knapsack with few sizes, solved exactly by dynamic programming.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tfglm.errors import ConfigError

# Squared error over that of the weights, N(0, 1) weights at the best input scale, 300 tiles, by bits. The three
# codebooks differ by less than 2 % below 5 bits.
NMSE: Mapping[float, float] = {
    1: 0.2732, 1.5: 0.1379, 2: 0.0686, 2.5: 0.0346, 3: 0.0174, 3.5: 0.0088, 4: 0.00450, 5: 0.00119, 6: 3.1e-4,
    7: 8.4e-5, 8: 2.4e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """Matrices that take one width: how many (of equal size), and their error for each width on offer."""

    matrices: int
    errors: tuple[float, ...]


def allocate(items: Sequence[Item], widths: Sequence[float], half_bits: int) -> list[float]:
    """A width for each item, such that the widths of all matrices sum to half_bits / 2 and no other choice has a lower
    sum of errors. Of equal choices the one that gives later items fewer bits is taken.

    widths: on offer, ascending; errors of an item are in their order. Raises ConfigError when no choice has that sum.
    """
    sizes = [round(2 * width) for width in widths]
    least = np.array([0.0])  # [budget + 1]: lowest error of the items so far that spend exactly `budget` half-bits
    chosen: list[npt.NDArray[np.int8]] = []
    for item in items:
        spent = [item.matrices * size for size in sizes]
        reachable = min(len(least) + max(spent), half_bits + 1)
        trial = np.full((len(sizes), reachable), np.inf)
        for width, (cost, error) in enumerate(zip(spent, item.errors, strict=True)):
            room = max(0, min(len(least), reachable - cost))
            trial[width, cost : cost + room] = least[:room] + error
        chosen.append(np.argmin(trial, axis=0).astype(np.int8))
        least = trial.min(axis=0)
    if half_bits >= len(least) or not np.isfinite(least[half_bits]):
        matrices = sum(item.matrices for item in items)
        raise ConfigError(
            f"no choice of widths {', '.join(f'{w:g}' for w in widths)} for {matrices} matrices has a mean of "
            f"{half_bits / 2 / matrices:.4g} bits"
        )
    result = []
    for item, choice in zip(reversed(items), reversed(chosen), strict=True):
        width = int(choice[half_bits])
        result.append(widths[width])
        half_bits -= item.matrices * sizes[width]
    return result[::-1]


def budgets(mean: float, matrices: Sequence[int], widths: Sequence[float]) -> list[int]:
    """Half-bits for each of several groups of matrices, whose sum comes as near to the mean width as widths allow.

    Each group gets what its matrices are due plus what rounding kept from the groups before it.
    """
    sizes = [round(2 * width) for width in widths]
    low, high = min(sizes), max(sizes)
    step = math.gcd(*(size - low for size in sizes)) or 1  # what changing one matrix can change
    exact = Fraction(mean).limit_denominator(1000) * 2
    due, given, result = Fraction(0), 0, []
    for count in matrices:
        due += exact * count
        steps = int((due - given - low * count) / step + Fraction(1, 2))
        result.append(min(max(low * count + steps * step, low * count), high * count))
        given += result[-1]
    return result


def floored(importance: Sequence[float], share: float) -> list[float]:
    """Importances of a layer's experts, none below `share` of their mean: what the calibration text hardly asked for,
    other text may."""
    least = share * sum(importance) / len(importance)
    return [max(value, least) for value in importance]
