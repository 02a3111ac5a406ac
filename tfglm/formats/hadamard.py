"""The block-diagonal Hadamard rotation of EXL3: 128-wide Sylvester blocks, natural order, scaled by 1/sqrt(128).

It is symmetric and its own inverse. The butterfly's order of additions is fixed, so the bits of a row depend on that
row alone and another implementation of the same order gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tfglm.formats.exl3_code import BLOCK

# 1/sqrt(128) as the float32 every implementation of the format multiplies by.
SCALE = 0.08838834764831845

Array = TypeVar("Array", npt.NDArray[np.float32], npt.NDArray[np.float64], torch.Tensor)


def butterfly(x: Array) -> Array:
    """x times the unscaled +-1 blocks along the last axis (a multiple of 128): strides 1, 2, 4 .. 64, in x's dtype."""
    stack = torch.stack if isinstance(x, torch.Tensor) else np.stack
    y = x
    for stride in (1, 2, 4, 8, 16, 32, 64):
        pairs = y.reshape(*x.shape[:-1], x.shape[-1] // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = stack((low + high, low - high), -2)
    return y.reshape(x.shape)


def rotate(x: Array) -> Array:
    """x times the orthonormal blocks along the last axis; applying it twice gives x back (to rounding)."""
    return butterfly(x) * SCALE


@cache
def signs_matrix() -> npt.NDArray[np.float64]:
    """float64 [128, 128], read-only: the unscaled block, (-1)^(number of common one bits of row and column)."""
    matrix = butterfly(np.eye(BLOCK))
    matrix.setflags(write=False)
    return matrix
