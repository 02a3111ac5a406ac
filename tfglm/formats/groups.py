"""Dense weights in 4, 6 or 8 bits with a scale and a bias for every 64 columns, and in fp8 with a scale a row.

Pure functions on tensors of any device, so that a GPU converts its own weights while loading. Weights are packed in the
order in which matrix instructions consume them (tfglm/kernels/weights.cuh): pieces of 16 rows by 64 columns, in which
lane (g, t) = (lane / 4, lane % 4) owns, of rows g and g + 8, the columns (i / 8) * 32 + t * 8 + i % 8 for i = 0..15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.errors import ConfigError

GROUP = 64
"""Columns that share a scale and a bias; also the columns of a piece."""

ROWS = 16
"""Rows of a piece."""

PIECE_BYTES = {4: 512, 6: 768, 8: 1024}

_E4M3_MAX = 448.0


@dataclass(frozen=True)
class GroupCodes:
    """A weight [N, K] as codes: value = bf16(scale * code + bias).

    codes uint8 [N, K] below 2^bits; scale and bias bfloat16 [N, K / 64].
    """

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class PackedGroups:
    """The same, packed. shape is the weight's own (N, K); rows are padded to 16 with zeros.

    pieces uint8 [N / 16, K / 64, PIECE_BYTES[bits]]; scales bfloat16 [N / 16, K / 64, 16, 2] as pairs (scale, bias).
    """

    bits: int
    shape: tuple[int, int]
    pieces: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class PackedFp8:
    """A weight [N, K] as e4m3 codes in pieces uint8 [N / 16, K / 64, 1024], times scale float32 [N padded to 16]."""

    shape: tuple[int, int]
    pieces: torch.Tensor
    scale: torch.Tensor


# ---- groups of 64


def quantise(weight: torch.Tensor, bits: int) -> GroupCodes:
    """The nearest codes of weight [N, K] (any float dtype) between each group's least and greatest value.

    Raises ConfigError if bits is not 4, 6 or 8 or K is no multiple of 64.
    """
    if bits not in PIECE_BYTES:
        raise ConfigError(f"dense weights of {bits} bits are not supported; 4, 6 and 8 are")
    groups = _groups(weight.float())
    levels = (1 << bits) - 1
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    bias = low.bfloat16()
    scale = ((high - bias.float()) / levels).bfloat16()
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = ((groups - bias.float()[:, :, None]) / divisor[:, :, None]).round().clamp(0, levels)
    return GroupCodes(bits, codes.to(torch.uint8).flatten(1), scale, bias)


def dequantise(codes: GroupCodes) -> torch.Tensor:
    """The bfloat16 weight [N, K] that kernels multiply with: one rounding of scale * code + bias."""
    # In float64 the product and the sum are exact, so rounding twice (float32, then bfloat16) is all there is to avoid.
    exact = _groups(codes.codes.double()) * codes.scale.double()[:, :, None] + codes.bias.double()[:, :, None]
    return _round_once(exact).flatten(1)


def pack(codes: GroupCodes) -> PackedGroups:
    """Codes in the kernels' order."""
    lanes = _lanes(_padded_rows(codes.codes))
    if codes.bits == 8:
        pieces = _bytes(lanes)
    elif codes.bits == 4:
        pieces = _nibbles(lanes)
    else:
        pieces = torch.cat([_nibbles(lanes & 15), _crumbs(lanes >> 4)], dim=2)
    pairs = torch.stack([codes.scale, codes.bias], dim=2)
    scales = _padded_rows(pairs).unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()
    return PackedGroups(codes.bits, (codes.codes.shape[0], codes.codes.shape[1]), pieces, scales)


def unpack(packed: PackedGroups) -> GroupCodes:
    """The inverse of `pack`."""
    if packed.bits == 8:
        lanes = _from_bytes(packed.pieces)
    elif packed.bits == 4:
        lanes = _from_nibbles(packed.pieces)
    else:
        lanes = _from_nibbles(packed.pieces[:, :, :512]) | _from_crumbs(packed.pieces[:, :, 512:]) << 4
    rows = packed.shape[0]
    scales = packed.scales.transpose(1, 2).flatten(0, 1)[:rows]
    return GroupCodes(
        packed.bits, _from_lanes(lanes)[:rows], scales[:, :, 0].contiguous(), scales[:, :, 1].contiguous()
    )


# ---- fp8


def pack_fp8(weight: torch.Tensor) -> PackedFp8:
    """weight [N, K], K a multiple of 64, as e4m3 with one scale a row (its greatest magnitude becomes 448)."""
    values = _padded_rows(weight.float())
    scale = (values.abs().amax(dim=1) / _E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (values / scale[:, None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return PackedFp8((weight.shape[0], weight.shape[1]), _bytes(_lanes(codes)), scale)


def unpack_fp8(packed: PackedFp8) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as float8_e4m3fn [N, K] and scale float32 [N]; the weight is their product."""
    rows = packed.shape[0]
    codes = _from_lanes(_from_bytes(packed.pieces))[:rows].contiguous().view(torch.float8_e4m3fn)
    return codes, packed.scale[:rows]


# ---- orders within a piece


def _groups(weight: torch.Tensor) -> torch.Tensor:
    if weight.shape[1] % GROUP:
        raise ConfigError(f"a weight with {weight.shape[1]} columns cannot be cut into groups of {GROUP}")
    return weight.unflatten(1, (-1, GROUP))


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[0] % ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _lanes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] as [N / 16, K / 64, lane 32, row half 2, i 16]."""
    _groups(codes)
    parts = codes.unflatten(1, (-1, 2, 4, 8)).unflatten(0, (-1, 2, 8))  # [nb, half, g, kb, c, t, i8]
    return parts.permute(0, 3, 2, 5, 1, 4, 6).reshape(parts.shape[0], parts.shape[3], 32, 2, 16)


def _from_lanes(lanes: torch.Tensor) -> torch.Tensor:
    parts = lanes.unflatten(4, (2, 8)).unflatten(2, (8, 4))  # [nb, kb, g, t, half, c, i8]
    return parts.permute(0, 4, 2, 1, 5, 3, 6).reshape(lanes.shape[0] * ROWS, lanes.shape[1] * GROUP)


def _bytes(lanes: torch.Tensor) -> torch.Tensor:
    """[row half][lane][16], the two middle bytes of every four exchanged: halves of a word then hold neighbours."""
    words = lanes.unflatten(4, (4, 2, 2)).transpose(5, 6).flatten(4)
    return words.transpose(2, 3).flatten(2).contiguous()


def _from_bytes(pieces: torch.Tensor) -> torch.Tensor:
    words = pieces.unflatten(2, (2, 32, 16)).transpose(2, 3)
    return words.unflatten(4, (4, 2, 2)).transpose(5, 6).flatten(4)


def _nibbles(lanes: torch.Tensor) -> torch.Tensor:
    """[lane][row half][8 bytes]: nibble p of a word is its value 2p, nibble p + 4 its value 2p + 1 (p = 0..3)."""
    ordered = lanes.unflatten(4, (2, 4, 2)).transpose(5, 6).flatten(4)
    return (ordered[..., 0::2] | ordered[..., 1::2] << 4).flatten(2).contiguous()


def _from_nibbles(pieces: torch.Tensor) -> torch.Tensor:
    both = pieces.unflatten(2, (32, 2, 8))
    ordered = torch.stack([both & 15, both >> 4], dim=5).flatten(4)
    return ordered.unflatten(4, (2, 2, 4)).transpose(5, 6).flatten(4)


def _crumbs(lanes: torch.Tensor) -> torch.Tensor:
    """[lane][row half][4 bytes]: two bits a value, the eight even values first."""
    ordered = lanes.unflatten(4, (8, 2)).transpose(4, 5).flatten(4)
    fields = torch.stack([ordered[..., i::4] << (2 * i) for i in range(4)])
    return fields.sum(dim=0, dtype=torch.uint8).flatten(2)


def _from_crumbs(pieces: torch.Tensor) -> torch.Tensor:
    both = pieces.unflatten(2, (32, 2, 4))
    ordered = torch.stack([(both >> (2 * i)) & 3 for i in range(4)], dim=5).flatten(4)
    return ordered.unflatten(4, (2, 8)).transpose(4, 5).flatten(4)


def _round_once(exact: torch.Tensor) -> torch.Tensor:
    """float64 to bfloat16 with one rounding: float32 is made odd where it is inexact (Boldo and Melquiond, 2008)."""
    near = exact.float()
    bits = near.view(torch.int32)
    away = near.double().abs() > exact.abs()
    inexact = near.double() != exact
    bits = torch.where(inexact, torch.where(away, bits - 1, bits) | 1, bits)
    return bits.view(torch.float32).bfloat16()
