"""EXL3 linears and a layer's experts out of a checkpoint, whole or one rank's columns of them.

A rank holds whole 128-column blocks of an expert: columns of gate and up, rows of down. Down's part is one run of bytes
and nothing else is read; gate's and up's lies in strips, read as the checkpoint sees fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tfglm.errors import CheckpointError
from tfglm.formats.exl3 import signs
from tfglm.formats.exl3_code import BLOCK, MARKERS, TILE
from tfglm.formats.exl3_tensors import Exl3Linear, check_marker, find_linears
from tfglm.ops.exl3_weights import DOWN, PROJECTIONS, Exl3Experts, Exl3Weight, buffer_for

_DTYPES = {torch.int16: "I16", torch.float16: "F16", torch.int32: "I32"}


class Read(Protocol):
    """`Checkpoint.read`."""

    def __call__(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor: ...


def read_linear(
    read: Read,
    name: str,
    linear: Exl3Linear,
    outputs: int,
    inputs: int,
    part: tuple[slice, slice] | None = None,
) -> Exl3Weight:
    """One linear. outputs, inputs: its sizes before padding. part: the outputs and inputs to hold, each `whole_blocks`;
    None: all. Raises CheckpointError for a foreign marker."""
    _check_marker(read, name, linear)
    rows, columns = part or (slice(0, outputs), slice(0, inputs))
    n, k = (slice(kept.start, -(-kept.stop // BLOCK) * BLOCK) for kept in (rows, columns))
    return Exl3Weight(
        trellis=read(
            f"{name}.trellis",
            rows=slice(k.start // TILE, k.stop // TILE),
            columns=slice(n.start // TILE, n.stop // TILE),
        ),
        suh=_scales(read, name, linear, "u")[k],
        svh=_scales(read, name, linear, "v")[n],
        codebook=linear.codebook,
        inputs=columns.stop - columns.start,
        outputs=rows.stop - rows.start,
    )


def whole_blocks(part: slice, size: int) -> bool:
    """Whether part of a dimension of `size` values is a run of the blocks that a rotation mixes."""
    return part.start % BLOCK == 0 and (part.stop % BLOCK == 0 or part.stop == size)


Shares = Sequence[tuple[int, int]]
"""(start, stop) of the inner columns that a rank holds of each expert: multiples of 128, start == stop for none."""


def read_experts(
    read: Read, linears: Mapping[str, Exl3Linear], prefix: str, count: int, share: Shares | None = None
) -> Exl3Experts:
    """The experts prefix.0 .. prefix.(count - 1) of one layer, each trellis read into its place in one buffer.

    share: the inner columns to hold, by expert; None: all. Raises CheckpointError for experts that are not all EXL3 in
    one codebook, and for a foreign marker; ValueError for a share that is no run of whole blocks, or empty everywhere.
    """
    names = [[f"{prefix}.{expert}.{projection}" for projection in PROJECTIONS] for expert in range(count)]
    first = _first(linears, names)
    hidden, shares = first.k, _shares(share, count, first.n)
    inner = torch.tensor([stop - start for start, stop in shares], dtype=torch.int32)
    most = int(inner.max())
    widths = torch.tensor([[round(2 * linears[name].bits) for name in row] for row in names], dtype=torch.int32)
    buffer, offsets = buffer_for((hidden * inner.long()[:, None] * widths // 16).flatten().tolist())
    experts = Exl3Experts(
        codebook=first.codebook,
        buffer=buffer,
        offsets=torch.tensor(offsets).view(count, 3).T.contiguous(),
        half_bits=widths.T.contiguous(),
        inner=inner,
        suh=torch.empty(2, count, hidden, dtype=torch.float16),
        svh=torch.zeros(2, count, most, dtype=torch.float16),
        down_suh=torch.zeros(count, most, dtype=torch.float16),
        down_svh=torch.empty(count, hidden, dtype=torch.float16),
    )
    for expert, (row, (start, stop)) in enumerate(zip(names, shares, strict=True)):
        kept, tiles, own = slice(start, stop), slice(start // TILE, stop // TILE), stop - start
        for projection, name in enumerate(row):
            linear = linears[name]
            _check_marker(read, name, linear)
            down = projection == DOWN
            part = {"rows": tiles} if down else {"columns": tiles}
            if own:
                experts.trellis(projection, expert).copy_(read(f"{name}.trellis", **part))
            suh, svh = _scales(read, name, linear, "u"), _scales(read, name, linear, "v")
            if down:
                experts.down_suh[expert, :own], experts.down_svh[expert] = suh[kept], svh
            else:
                experts.suh[projection, expert], experts.svh[projection, expert, :own] = suh, svh[kept]
    return _with_shared_suh(experts)


@dataclass(frozen=True)
class _Header:
    dtype: str
    shape: tuple[int, ...]


def experts_in_memory(tensors: Mapping[str, torch.Tensor], prefix: str, count: int) -> Exl3Experts:
    """`read_experts` of tensors that are held already, by their checkpoint names."""
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}
    linears = find_linears({name: _Header(_DTYPES[t.dtype], tuple(t.shape)) for name, t in kept.items()})

    def read(name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        return kept[name][rows or slice(None)][:, columns or slice(None)] if kept[name].dim() > 1 else kept[name]

    return read_experts(read, linears, prefix, count)


def _shares(share: Shares | None, count: int, columns: int) -> list[tuple[int, int]]:
    """Each expert's share, checked."""
    if share is None:
        return [(0, columns)] * count
    shares = list(share)
    if len(shares) != count:
        raise ValueError(f"{len(shares)} shares of {count} experts")
    for expert, (start, stop) in enumerate(shares):
        if start % BLOCK or stop % BLOCK or not 0 <= start <= stop <= columns:
            raise ValueError(f"expert {expert}: columns {start} to {stop} of {columns} are no whole blocks of {BLOCK}")
    if all(start == stop for start, stop in shares):
        raise ValueError(f"no columns of any of {count} experts are asked for; a layer needs some")
    return shares


def _first(linears: Mapping[str, Exl3Linear], names: list[list[str]]) -> Exl3Linear:
    """The first expert's gate, after checking that all others have its sizes, format and codebook."""
    first = linears[names[0][0]]
    for row in names:
        for projection, name in enumerate(row):
            linear = linears.get(name)
            if linear is None:
                raise CheckpointError(f"{name} is not EXL3 while {names[0][0]} is; a layer's experts must be alike")
            if linear.codebook != first.codebook:
                raise CheckpointError(
                    f"{name} has codebook {linear.codebook} and {names[0][0]} {first.codebook}; "
                    "a layer's experts must share one"
                )
            assert (linear.k, linear.n) == ((first.n, first.k) if projection == DOWN else (first.k, first.n))
    return first


def _with_shared_suh(experts: Exl3Experts) -> Exl3Experts:
    """The same experts with one suh where gate and up of all have the same: a row is then rotated once for all."""
    first = experts.suh[0, 0]
    if not bool((experts.suh == first).all()):
        return experts
    return Exl3Experts(**{**vars(experts), "suh": first.clone()})


def _check_marker(read: Read, name: str, linear: Exl3Linear) -> None:
    if linear.codebook in MARKERS:
        marker = f"{name}.{linear.codebook}"
        check_marker(marker, int(read(marker)))


def _scales(read: Read, name: str, linear: Exl3Linear, side: str) -> torch.Tensor:
    """suh or svh, float16; from sign words in old packs."""
    return signs(read(f"{name}.s{side}")) if linear.signs_only else read(f"{name}.s{side}h")
