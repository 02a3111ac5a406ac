"""Which tensors of a checkpoint form EXL3 linears, and what their headers alone say: size, width, codebook.

A linear P is P.trellis with P.suh and P.svh (or, in old packs, the sign words P.su and P.sv), at most one marker that
names the codebook, and an optional P.bias. Packs of other programs that look alike and are not are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tfglm.errors import CheckpointError
from tfglm.formats.exl3_code import BLOCK, CODEBOOKS, MARKERS, TILE, half_bits

QUANT_METHOD = "exl3"
_FIELDS = {"trellis", "suh", "svh", "su", "sv", *MARKERS}
_RANK_SLICED = re.compile(r"\.rank\d+\.(trellis|suh|svh|su|sv)$")


class Header(Protocol):
    """A tensor as a safetensors header describes it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Exl3Linear:
    """One quantised linear of k inputs and n outputs (both multiples of 128, zero-padded by the quantiser if need be).

    bits: of a weight. signs_only: an old pack, whose scales are sign words. fields: which tensors it has.
    """

    k: int
    n: int
    bits: float
    codebook: str
    signs_only: bool
    fields: tuple[str, ...]

    @property
    def trellis_bytes(self) -> int:
        return int(self.k * self.n * self.bits) // 8


def find_linears(headers: Mapping[str, Header]) -> dict[str, Exl3Linear]:
    """The EXL3 linears among tensors, by prefix. Raises CheckpointError for an incomplete or foreign one."""
    for name in headers:
        if _RANK_SLICED.search(name):
            raise CheckpointError(
                f"tensor {name} is one rank's slice of an expert: a rank-sliced pack of another program; "
                "a pack with whole matrices (experts.E.gate_proj.trellis) is needed"
            )
    return {
        prefix: _linear(prefix, headers, fields) for prefix, fields in _by_prefix(headers).items() if fields & _FIELDS
    }


def _by_prefix(names: Iterable[str]) -> dict[str, set[str]]:
    fields: dict[str, set[str]] = {}
    for name in names:
        prefix, _, field = name.rpartition(".")
        fields.setdefault(prefix, set()).add(field)
    return fields


def _linear(prefix: str, headers: Mapping[str, Header], fields: set[str]) -> Exl3Linear:
    if "scale" in fields:
        raise CheckpointError(f"tensor {prefix}.scale: a scale of EXL3's first days, extinct; quantise the model anew")
    if set(MARKERS) <= fields:
        raise CheckpointError(f"{prefix} has both markers mcg and mul1; one codebook is needed")
    signs_only = "suh" not in fields and "su" in fields
    scales = ("su", "sv") if signs_only else ("suh", "svh")
    missing = sorted({"trellis", *scales} - fields)
    if missing:
        raise CheckpointError(f"{prefix} is an incomplete EXL3 linear: {prefix}.{missing[0]} is missing")
    foreign = sorted(fields - {"trellis", *scales, *MARKERS, "bias"})
    if foreign:
        raise CheckpointError(
            f"tensor {prefix}.{foreign[0]} has no place in an EXL3 linear: a marker or field of another program; "
            f"known: trellis, suh, svh, {', '.join(MARKERS)}, bias"
        )
    codebook = next((name for name in MARKERS if name in fields), "3inst")
    return _sized(prefix, headers, codebook, scales, fields)


def _sized(
    prefix: str, headers: Mapping[str, Header], codebook: str, scales: tuple[str, str], fields: set[str]
) -> Exl3Linear:
    shape = headers[f"{prefix}.trellis"].shape
    if len(shape) != 3 or math.prod(shape) == 0 or shape[0] % (BLOCK // TILE) or shape[1] % (BLOCK // TILE):
        raise CheckpointError(
            f"tensor {prefix}.trellis is {list(shape)}; [k/16, n/16, 16 * bits] with k and n multiples of 128 is needed"
        )
    k, n, bits = shape[0] * TILE, shape[1] * TILE, shape[2] / TILE
    try:
        half_bits(bits, codebook)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {prefix}.trellis is {list(shape)}: {error.message}") from None
    signs_only = scales[0] == "su"
    vector = ("I16", TILE) if signs_only else ("F16", 1)
    wanted: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
        "trellis": (("I16",), [shape]),
        scales[0]: ((vector[0],), [(k // vector[1],)]),
        scales[1]: ((vector[0],), [(n // vector[1],)]),
        "mcg": (("I32",), [(), (1,)]),
        "mul1": (("I32",), [(), (1,)]),
        "bias": (("F16", "F32"), [(n,)]),
    }
    for field in sorted(fields):
        header, (dtypes, shapes) = headers[f"{prefix}.{field}"], wanted[field]
        if header.dtype not in dtypes or header.shape not in shapes:
            raise CheckpointError(
                f"tensor {prefix}.{field} is {header.dtype} {list(header.shape)}; "
                f"its trellis asks for {' or '.join(dtypes)} {list(shapes[0])}"
            )
    return Exl3Linear(k, n, bits, codebook, signs_only, tuple(sorted(fields)))


def stored_tensors(prefix: str, k: int, n: int, bits: float, codebook: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors that a linear is stored as."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{prefix}.trellis": ("I16", (k // TILE, n // TILE, int(TILE * bits))),
        f"{prefix}.suh": ("F16", (k,)),
        f"{prefix}.svh": ("F16", (n,)),
    }
    return tensors | ({f"{prefix}.{codebook}": ("I32", ())} if codebook in MARKERS else {})


def check_marker(name: str, value: int) -> None:
    """Raise CheckpointError unless a marker tensor (called P.mcg or P.mul1) holds the one value that its codebook has.

    value: the int32 as stored, signed or not.
    """
    expected = MARKERS[name.rpartition(".")[2]]
    if value & 0xFFFFFFFF != expected:
        raise CheckpointError(
            f"tensor {name} is 0x{value & 0xFFFFFFFF:08X}, the marker of another codebook; 0x{expected:08X} is needed"
        )


def check_quantization_config(quantization: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a quantization_config that is not EXL3's or belongs to an incompatible variant of it.

    Its other fields repeat what the headers say and are not read.
    """
    method = quantization.get("quant_method")
    if method != QUANT_METHOD:
        raise CheckpointError(f"quantization_config: quant_method is {method!r}; supported: {QUANT_METHOD!r}")
    layout = quantization.get("rotation_layout")
    if layout is not None:
        raise CheckpointError(
            f"quantization_config: rotation_layout is {layout!r}, a variant of another program; "
            "a pack without that field is needed"
        )
    codebook = quantization.get("codebook")
    if codebook is not None and codebook not in CODEBOOKS:
        raise CheckpointError(f"quantization_config: codebook is {codebook!r}; supported: {', '.join(CODEBOOKS)}")
