"""Noise keyed by (seed, absolute position, token id): the same draw whenever, wherever and beside whomever it is made.

No generator state exists, so a reply does not depend on call order, on other replies or on how many rows were verified
at once. The hash is splitmix64's finalizer (public domain, S. Vigna).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_WORD = (1 << 64) - 1
_SEED_STEP = 0x9E3779B97F4A7C15
_POSITION_STEP = 0xD1B54A32D192ED03
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float64 [n], for each of ids (any integer dtype, [n]) at one absolute position.

    The greatest of logit + gumbel over a set of tokens is a draw from the softmax of their logits. Seeds are taken
    modulo 2^64. The one hash value in 2^53 whose uniform rounds to 1 gives infinity, which orders like any other value.
    """
    words = ids.astype(np.uint64)
    words ^= np.uint64(noise_key(seed, position))
    _mix(words)
    words >>= np.uint64(11)
    noise = words.astype(np.float64)
    noise *= 2.0**-53
    noise += 2.0**-54
    with np.errstate(divide="ignore"):
        for _ in range(2):
            np.log(noise, out=noise)
            np.negative(noise, out=noise)
    return noise


def noise_key(seed: int, position: int) -> int:
    """What the noise at one position is made from, together with a token's id: 0 to 2^64-1."""
    key = _mix_scalar((seed + _SEED_STEP) & _WORD)
    return _mix_scalar(key ^ (position * _POSITION_STEP & _WORD))


def derived_seed(prompt: Sequence[int] | np.ndarray, salt: str) -> int:
    """The seed of a request that names none, 0 to 2^63-1: same prompt and salt, same seed. Half a million tokens take
    some milliseconds, and one if they come as an array of uint32."""
    digest = hashlib.sha256(salt.encode() + b"|")
    digest.update(np.asarray(prompt, "<u4").tobytes())
    return int.from_bytes(digest.digest()[:8], "little") & (_WORD >> 1)


def _mix_scalar(x: int) -> int:
    x = (x ^ x >> 30) * _FIRST & _WORD
    x = (x ^ x >> 27) * _SECOND & _WORD
    return x ^ x >> 31


def _mix(x: np.ndarray) -> None:
    """splitmix64's finalizer on uint64 [n], in place."""
    shifted = np.empty_like(x)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        x ^= shifted
        x *= np.uint64(factor)
