"""The values of a synthetic checkpoint: for each tensor a spread that keeps a random model's logits lively.

A linear layer keeps the size of what it is given (std 1/sqrt(fan in)); norms lie near 1; biases are small but not zero;
so every tensor shows in the logits and a swapped or forgotten one is found. Torch-free.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tfglm.checkpoint.names import TensorSpec
from tfglm.formats.exl3_code import CODEBOOK_SCALE, MARKERS

_BLOCK_VALUES = 1 << 22
_GAINS = {"lm_head": 2.5, "o_proj": 0.5, "down_proj": 0.5}
"""Logits of std about 2.5; branches smaller than the residual stream, so that layers do not blow up a rounding."""
_SHARED_SUH = re.compile(r"(\.mlp\.experts)\.\d+\.(?:gate|up)_proj\.suh$")
"""One stream for the input scales of gate and up of all experts of a layer."""
_DICE, _SIDES = 12, 256


def tensor_blocks(name: str, spec: TensorSpec, seed: int) -> Iterator[bytes]:
    """The tensor's bytes (row-major, little-endian), a block at a time.

    BF16 and F32 values are mean + std * normal, where each normal comes from 16 bits of the tensor's own random stream;
    the fields of an EXL3 linear are I16 random bits, F16 scales made likewise, and an I32 marker.
    """
    marker = name.rpartition(".")[2]
    if marker in MARKERS:
        yield MARKERS[marker].to_bytes(4, "little")
        return
    codes = _codes(name, spec)
    stream = np.random.Philox(key=_key(_SHARED_SUH.sub(r"\1.suh", name), seed))
    left = int(np.prod(spec.shape))
    while left:
        count = min(left, _BLOCK_VALUES)
        words = stream.random_raw(-(-count // 4)).astype("<u8", copy=False)
        yield codes[words.view("<u2")[:count]].tobytes()
        left -= count


def _codes(name: str, spec: TensorSpec) -> npt.NDArray[Any]:
    """The values that each of 65,536 equally likely 16-bit draws stands for, as stored."""
    if spec.dtype == "I16":
        return np.arange(1 << 16, dtype="<u2")
    if spec.dtype == "F16":
        signs = 1 - 2 * (np.arange(1 << 16, dtype=np.float32) % 2)
        size = _gain(name) * spec.shape[0] ** -0.5 / CODEBOOK_SCALE if name.endswith(".suh") else 1.0
        return (signs * np.float32(size) * (1 + np.float32(0.1) * _normal_table())).astype("<f2")
    mean, std = _distribution(name, spec)
    table = np.float32(mean) + np.float32(std) * _normal_table()
    return _bfloat16(table) if spec.dtype == "BF16" else table.astype("<f4")


def _distribution(name: str, spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation by the tensor's role."""
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.05
    if name.endswith("k_norm.bias"):
        return 0.0, 0.2
    if len(spec.shape) == 1:  # every other vector is the weight of a norm
        return 1.0, 0.1
    if name == "model.embed_tokens.weight":
        return 0.0, 1.0
    return 0.0, _gain(name) * spec.shape[1] ** -0.5


def _gain(name: str) -> float:
    """name: of a linear's field, P.weight or P.suh."""
    return _GAINS.get(name.rpartition(".")[0].rpartition(".")[2], 1.0)


def _key(name: str, seed: int) -> int:
    """The 128-bit Philox key of one tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")


@functools.cache
def _normal_table() -> npt.NDArray[np.float32]:
    """65,536 equally likely values of a normal distribution (mean 0, std 1).

    It is the sum of 12 dice of 256 sides: near enough to normal, and exact in integers, so that no platform's logarithm
    decides a bit of a checkpoint.
    """
    ways = np.array([1], dtype=object)
    for _ in range(_DICE):
        ways = np.convolve(ways, np.ones(_SIDES, dtype=object))
    below = np.cumsum(ways)
    total = int(below[-1])
    entries = 1 << 16
    targets = np.array([(2 * i + 1) * total // (2 * entries) for i in range(entries)], dtype=object)
    sums = np.searchsorted(below, targets, side="right")
    variance = Fraction(_DICE * (_SIDES**2 - 1), 12)
    mean = Fraction(_DICE * (_SIDES - 1), 2)
    return ((sums - float(mean)) / np.sqrt(float(variance))).astype(np.float32)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of finite float32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
