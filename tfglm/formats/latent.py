"""Rows of the latent cache as bytes: bf16, fp8, fp4 and fp4x, as pure functions of one row.

A token's cache row in a layer has three parts: the latent (kv_lora_rank values after kv_a_layernorm), the rotary key
(qk_rope_head_dim values after RoPE) and, on layers with an indexer, the index key. Every encoder reads one row and
nothing else, so a prompt chunk, a verify window and a serial step write the same bytes for the same row.

| format | latent of 512 | rotary of 64 | index key of 128 |
|---|---|---|---|
| bf16 | 1024 bf16 | 128 bf16 | 256 bf16 |
| fp8 | 528: codes, scale, zeros | 128 bf16 | 256 bf16 |
| fp4 | 304: codes, block scales, scale, zeros | 128 bf16 | 256 bf16 |
| fp4x | 304: as fp4, then the rotary scale | 64 codes | 132: codes, scale |

fp8 codes are e4m3fn and fp4 codes e2m1 (OCP Microscaling Formats, MX v1.0); scales of whole rows are powers of two, so
they never round. Little endian throughout.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 16
"""Values that share one e4m3 block scale in an fp4 row."""

_ALIGN = 16
_E4M3_MAX_CODE = 0x7E
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class KvFormat(enum.Enum):
    """How the rows of the latent cache are stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    FP4X = "fp4x"


@dataclass(frozen=True)
class RowBytes:
    """Bytes a token takes in one layer. index counts only on layers that have an indexer."""

    latent: int
    rotary: int
    index: int


def row_bytes(kv: KvFormat, latent: int, rotary: int, index: int) -> RowBytes:
    """Bytes of a row whose parts hold `latent`, `rotary` and `index` values."""
    latent_bytes = {
        KvFormat.BF16: 2 * latent,
        KvFormat.FP8: _aligned(latent + 4),
        KvFormat.FP4: _aligned(latent // 2 + latent // BLOCK + 8),
        KvFormat.FP4X: _aligned(latent // 2 + latent // BLOCK + 8),
    }[kv]
    small = kv is KvFormat.FP4X
    return RowBytes(latent_bytes, rotary if small else 2 * rotary, index + 4 if small else 2 * index)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


# ---- whole rows


def pack_rows(kv: KvFormat, latent: F32, rotary: F32) -> tuple[U8, U8]:
    """The latent plane [rows, row_bytes.latent] and the rotary plane [rows, row_bytes.rotary] of some rows.

    latent [rows, kv_lora_rank] and rotary [rows, qk_rope_head_dim] are float32 that bfloat16 holds exactly.
    """
    if kv is KvFormat.BF16:
        return pack_bf16(latent), pack_bf16(rotary)
    if kv is KvFormat.FP8:
        return pack_fp8_latent(latent), pack_bf16(rotary)
    packed = pack_fp4_latent(latent)
    if kv is KvFormat.FP4:
        return packed, pack_bf16(rotary)
    codes, scales = pack_e4m3_row(rotary)
    at = rotary_scale_offset(latent.shape[1])
    packed[:, at : at + 4] = scales
    return packed, codes


def unpack_rows(kv: KvFormat, latent: U8, rotary: U8, latent_values: int) -> tuple[F32, F32]:
    """The values that readers see: latent [rows, latent_values] and rotary, each exact in bfloat16."""
    if kv is KvFormat.BF16:
        return unpack_bf16(latent), unpack_bf16(rotary)
    if kv is KvFormat.FP8:
        return unpack_fp8_latent(latent, latent_values), unpack_bf16(rotary)
    values = unpack_fp4_latent(latent, latent_values)
    if kv is KvFormat.FP4:
        return values, unpack_bf16(rotary)
    at = rotary_scale_offset(latent_values)
    return values, unpack_e4m3_row(rotary, latent[:, at : at + 4])


def pack_index(kv: KvFormat, keys: F32) -> U8:
    """Index keys [rows, index_head_dim], exact in bfloat16, as bytes [rows, row_bytes.index]."""
    if kv is not KvFormat.FP4X:
        return pack_bf16(keys)
    return np.concatenate(pack_e4m3_row(keys), axis=1)


def unpack_index(kv: KvFormat, packed: U8) -> F32:
    if kv is not KvFormat.FP4X:
        return unpack_bf16(packed)
    return unpack_e4m3_row(packed[:, :-4], packed[:, -4:])


# ---- the parts


def pack_bf16(values: F32) -> U8:
    """float32 [rows, n] as bfloat16 bytes [rows, 2n], rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").view(np.uint8)


def unpack_bf16(packed: U8) -> F32:
    bits = np.ascontiguousarray(packed).view("<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def pack_fp8_latent(values: F32) -> U8:
    """[rows, n] as [rows, aligned(n + 4)]: n codes, the row's scale, zeros."""
    rows, n = values.shape
    packed = np.zeros((rows, _aligned(n + 4)), np.uint8)
    packed[:, :n], packed[:, n : n + 4] = pack_e4m3_row(values)
    return packed


def unpack_fp8_latent(packed: U8, n: int) -> F32:
    return unpack_e4m3_row(packed[:, :n], packed[:, n : n + 4])


def pack_fp4_latent(values: F32) -> U8:
    """[rows, n] as [rows, aligned(n/2 + n/16 + 8)]: codes, e4m3 block scales, the row's scale, zeros.

    Two codes a byte, the even value in the low nibble; bit 3 of a code is the sign and never set on zero.
    """
    rows, n = values.shape
    scale, reciprocal = row_scale(values)
    y = values * reciprocal[:, None]
    blocks = y.reshape(rows, n // BLOCK, BLOCK)
    block_codes = encode_e4m3(np.abs(blocks).max(axis=2) / np.float32(6))
    divisor = decode_e4m3(block_codes)
    divisor[divisor == 0] = 1
    codes = encode_e2m1(blocks / divisor[:, :, None]).reshape(rows, n)
    packed = np.zeros((rows, _aligned(n // 2 + n // BLOCK + 8)), np.uint8)
    packed[:, : n // 2] = codes[:, 0::2] | codes[:, 1::2] << 4
    packed[:, n // 2 : _row_scale_offset(n)] = block_codes
    packed[:, _row_scale_offset(n) : rotary_scale_offset(n)] = _bytes_of(scale)
    return packed


def unpack_fp4_latent(packed: U8, n: int) -> F32:
    codes = np.stack([packed[:, : n // 2] & 15, packed[:, : n // 2] >> 4], axis=2).reshape(len(packed), n)
    block_scale = decode_e4m3(packed[:, n // 2 : _row_scale_offset(n)])
    scale = _floats_of(packed[:, _row_scale_offset(n) : rotary_scale_offset(n)])
    return decode_e2m1(codes) * np.repeat(block_scale, BLOCK, axis=1) * scale


def rotary_scale_offset(n: int) -> int:
    """Where an fp4x latent row of n values keeps the scale of the token's rotary codes (292 for 512 values)."""
    return _row_scale_offset(n) + 4


def _row_scale_offset(n: int) -> int:
    return n // 2 + n // BLOCK


def pack_e4m3_row(values: F32) -> tuple[U8, U8]:
    """[rows, n] as codes [rows, n] and the rows' scales as float32 bytes [rows, 4]."""
    scale, reciprocal = row_scale(values)
    return encode_e4m3(values * reciprocal[:, None]), _bytes_of(scale)


def unpack_e4m3_row(codes: U8, scales: U8) -> F32:
    return decode_e4m3(codes) * _floats_of(scales)


# ---- numbers


def row_scale(values: F32) -> tuple[F32, F32]:
    """2^(ceil(log2 amax) - 8) of each row and its reciprocal, float32 [rows]; 2^-126 for a row of zeros.

    Codes then stay within +-256, well inside e4m3's 448.
    """
    amax = np.abs(values).max(axis=1).astype(np.float32).view(np.uint32)
    exponent = (amax >> np.uint32(23)).astype(np.int64) + ((amax & np.uint32(0x7FFFFF)) != 0) - 8
    exponent = np.clip(exponent, 1, 254).astype(np.uint32)
    return (exponent << np.uint32(23)).view(np.float32), ((np.uint32(254) - exponent) << np.uint32(23)).view(np.float32)


def decode_e4m3(codes: U8) -> F32:
    return _E4M3[codes]


def encode_e4m3(values: F32) -> U8:
    """float32 to e4m3fn codes, to nearest even, saturating at 448; a zero of either sign keeps its sign bit."""
    magnitude = np.abs(values)
    code = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="left").astype(np.uint8)
    tie = magnitude == _E4M3_MIDPOINTS[np.minimum(code, _E4M3_MAX_CODE - 1)]
    code += (tie & (code < _E4M3_MAX_CODE)).astype(np.uint8) * (code & 1)
    return code | np.signbit(values).astype(np.uint8) << np.uint8(7)


def decode_e2m1(codes: U8) -> F32:
    return np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7])


def encode_e2m1(values: F32) -> U8:
    """float32 to e2m1 codes; a value halfway between two codes takes the larger magnitude; saturates at 6."""
    code = np.searchsorted(_E2M1_THRESHOLDS, np.abs(values), side="right").astype(np.uint8)
    return code | ((values < 0) & (code > 0)).astype(np.uint8) << np.uint8(3)


def _e4m3_table() -> F32:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[127] = np.nan
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


def _bytes_of(floats: F32) -> U8:
    return np.ascontiguousarray(floats, "<f4").view(np.uint8).reshape(-1, 4)


def _floats_of(packed: U8) -> F32:
    """Bytes [rows, 4] as float32 [rows, 1]."""
    return np.ascontiguousarray(packed).view("<f4").astype(np.float32)


_E4M3 = _e4m3_table()
_E4M3_MIDPOINTS = (_E4M3[:_E4M3_MAX_CODE] + _E4M3[1 : _E4M3_MAX_CODE + 1]) / 2
