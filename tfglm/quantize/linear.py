"""One linear: float weights and what its inputs look like -> an EXL3 linear and the error it makes.

Steps, per matrix W [k, n] (y = x . W): scales and rotations spread the weights evenly (scales.py); rows of 16 are
replaced by codes from the last to the first, each absorbing the errors of those already done (LDLQ, hessian.py); the
scales are refitted to the codes found. Source: QuIP# (arXiv 2402.04396), QTIP (arXiv 2406.11235), exllamav3's EXL3.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from tfglm.formats.exl3 import pack_tiles
from tfglm.formats.exl3_code import CODEBOOK_SCALE, TILE
from tfglm.quantize import scales
from tfglm.quantize.encoder import Encoder, tile_order
from tfglm.quantize.hessian import Feedback

_BUFFER = 128
"""Rows that exchange feedback block by block; the rows before them get it in one product a buffer."""


@dataclass(frozen=True)
class Inputs:
    """The input side that linears share. su [k]: signs and scales. h [k, k]: damped, in the model's basis, None without
    calibration. feedback: its factor in the rotated basis."""

    su: torch.Tensor
    h: torch.Tensor | None
    feedback: Feedback


@dataclass(frozen=True)
class Quantised:
    """A finished linear. CPU tensors: trellis int16 [k/16, n/16, 16 * bits], suh float16 [k], svh float16 [n].

    error and signal: tr(E^T H E) and tr(W^T H W) of the stored weights (their ratio is the proxy error).
    noise: squared error of the codes over that of the weights in the rotated basis (NMSE).
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    error: float
    signal: float
    noise: float

    @property
    def proxy_error(self) -> float:
        return self.error / self.signal if self.signal else 0.0


def random_signs(name: str, size: int) -> torch.Tensor:
    """float32 [size] of +-1, always the same for a name."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    bits = np.random.Generator(np.random.Philox(key=key)).integers(0, 2, size)
    return torch.from_numpy(1.0 - 2.0 * bits).float()


def quantise(
    w: torch.Tensor, inputs: Inputs, sv: torch.Tensor, scale: float, encoder: Encoder, *, own_su: bool
) -> Quantised:
    """w float32 [k, n], sv [n] from `scales.output_scales`, scale from `scales.search_scale`.

    own_su: the input scales belong to this matrix alone and may be refitted; otherwise they are stored as given.
    """
    rotated = scales.to_rotated(w, inputs.su, sv) * scale
    states, codes = ldlq(rotated, inputs.feedback, encoder)
    noise = float((codes - rotated).square().sum() / rotated.square().sum().clamp_min(1e-30))
    metric = torch.eye(len(w), device=w.device) if inputs.h is None else inputs.h
    sv = sv / scale
    row_factor, column_factor = scales.refit(w, scales.from_rotated(codes, inputs.su, sv), metric, rows=own_su)
    suh, svh = (inputs.su * row_factor).half(), (sv * column_factor).half()
    missed = scales.from_rotated(codes, suh.float(), svh.float()) - w
    return Quantised(
        trellis=pack_tiles(states.cpu(), encoder.bits),
        suh=suh.cpu(),
        svh=svh.cpu(),
        error=float((missed * (metric @ missed)).sum()),
        signal=float((w * (metric @ w)).sum()),
        noise=noise,
    )


def expected_error(sv: torch.Tensor, spread: float) -> float:
    """tr(E^T H E) to expect per unit of NMSE, before any code is searched."""
    return CODEBOOK_SCALE**2 * spread * float(sv.square().sum())


def ldlq(w: torch.Tensor, feedback: Feedback, encoder: Encoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes for rotated weights [k, n]: states uint16 [k/16, n/16, 256] and the weights they stand for [k, n]."""
    to_stream, from_stream = tile_order(w.device)
    k, n = w.shape
    states = torch.empty(k // TILE, n // TILE, TILE * TILE, dtype=torch.uint16, device=w.device)
    if feedback.lower is None:
        tiles = scales.to_tiles(w, to_stream)
        found, values = encoder.encode(tiles.flatten(0, 1))
        return found.view(states.shape), scales.from_tiles(values.view(states.shape), from_stream)
    target, error, codes = w.clone(), torch.empty_like(w), torch.empty_like(w)
    for stop in range(k, 0, -_BUFFER):
        start = max(0, stop - _BUFFER)
        for row in range(stop - TILE, start - 1, -TILE):
            block = slice(row, row + TILE)
            done = slice(row + TILE, stop)
            wanted = target[block] + feedback.lower[done, block].T @ error[done]
            found, values = encoder.encode(scales.to_tiles(wanted, to_stream)[0])
            states[row // TILE] = found
            codes[block] = scales.from_tiles(values[None], from_stream)
            error[block] = w[block] - codes[block]
        target[:start] += feedback.lower[start:stop, :start].T @ error[start:stop]
    return states, codes
