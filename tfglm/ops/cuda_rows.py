"""Launches of kernels/rows.cu: embedding, norms, rotary embedding, SwiGLU and the ordered sum of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfglm.ops import driver
from tfglm.ops.base import Rope
from tfglm.ops.cuda_launch import chained

_THREADS = 256
_WIDEST_NORM = 8 * 768


def _kernel(name: str) -> Callable[..., None]:
    return chained(driver.load("rows").kernel(name))


def embed(table: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows of table [vocab, width] bfloat16 at tokens int64 [R]."""
    _kernel("embed")((tokens.shape[0],), _THREADS, (table, tokens, out, table.shape[1]))
    return out


def angles(positions: torch.Tensor, frequencies: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
    """cos and sin float32 [R, D/2] of positions int64 [R] times frequencies float32 [D/2]."""
    half = frequencies.shape[0]
    _kernel("angles")((positions.shape[0],), 64, (positions, frequencies, cos, sin, half))
    return Rope(cos, sin)


def rotate(x: torch.Tensor, rope: Rope, out: torch.Tensor) -> torch.Tensor:
    """x [R, H, D] bfloat16, adjacent pairs, to out as halves; both may be views of wider heads, and out may be x."""
    rows, heads, _ = x.shape
    strides = (x.stride(0), x.stride(1), out, out.stride(0), out.stride(1))
    warps = min(heads, _THREADS // 32)
    _kernel("rotate")(
        (rows, -(-heads // warps)), 32 * warps, (x, *strides, rope.cos, rope.sin, heads, rope.cos.shape[1])
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """x [R, D] bfloat16 (rows may be strided), weight float32 [D]."""
    arguments = (x, x.stride(0), weight, out, out.stride(0), x.shape[1], eps)
    _kernel("rms_norm")((x.shape[0],), _THREADS, arguments)
    return out


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float, total: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + bf16(branch), which may be x itself, and out its norm. branch is bfloat16 or float32."""
    width = x.shape[1]
    assert width <= _WIDEST_NORM and width % 8 == 0, f"rows of {width} values; the kernel takes 8 a thread of 768"
    part = (branch, int(branch.dtype == torch.float32))
    threads = -(-width // 256) * 32
    _kernel("add_rms_norm")((x.shape[0],), threads, (x, *part, weight, total, out, width, eps))
    return total, out


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [R, 2I] bfloat16."""
    rows, inner = out.shape
    _kernel("swiglu")((rows, -(-inner // (8 * _THREADS))), _THREADS, (gate_up, out, inner))
    return out


def combine(slots: torch.Tensor, weights: torch.Tensor, last: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out [R, D] = the sum over picks, in order, of weights [R, k] times slots [R * k, D], then last; all float32."""
    rows, width = out.shape
    grid = (rows, -(-width // (4 * _THREADS)))
    _kernel("combine")(grid, _THREADS, (slots, weights, last, out, weights.shape[1], width))
    return out
