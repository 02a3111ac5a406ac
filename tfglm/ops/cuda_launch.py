"""Launching kernels that form chains: each may start while the one before it still runs (grid_wait in ptx.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tfglm.ops.driver import Kernel


def chained(kernel: Kernel) -> Callable[..., None]:
    """The launch of a kernel that begins with chain_start or grid_wait."""
    return functools.partial(kernel, overlap=_overlaps())


@functools.cache
def _overlaps() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
