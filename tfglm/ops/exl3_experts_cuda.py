"""Routed experts of one layer on the GPU from EXL3 weights (kernels exl3_experts for decode, exl3_prompt for prompts).

Nothing is allocated and the host waits for nothing once tables and workspace exist, so both paths can be captured in
CUDA graphs. A row's bits depend on its own values only; the decode path and the prompt path sum in different orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tfglm.errors import CheckpointError
from tfglm.ops import driver, nvrtc
from tfglm.ops.cuda_launch import chained
from tfglm.ops.exl3_cuda import codebook_macros

BLOCK = 128
DECODE_ROWS = 16
PROMPT_ROWS = 4096
_MAX_PICKS = 256
_LISTED_INTS = 4 + DECODE_ROWS

_PROMPT_SLAB = 3072  # columns of the down result that exist at once, in bfloat16: 96 MiB at 2,048 rows
_SUMS_BYTES = 4 * 16 * (BLOCK // 2 + 4) * 4  # four warps' sums of 16 members, 64 columns at a time
_PROMPT_OUT_BYTES = 64 * BLOCK * 4  # a strip of 64 rows

# Macros that a benchmark sets to try another launch shape than the kernel file's own.
trial_shape: dict[str, int] = {}


@functools.cache
def _own_shape(name: str) -> dict[str, int]:
    return nvrtc.defaults(name)


def _shape(name: str) -> dict[str, int]:
    own = _own_shape(name)
    return {**own, **{key: value for key, value in trial_shape.items() if key in own}} if trial_shape else own


@dataclass(frozen=True)
class ExpertTables:
    """Where one rank's experts of one layer lie on the GPU. Vectors are float16.

    trellis: int64 [3, experts], addresses of gate, up and down tiles; k2: int32 [3, experts], twice the bits; columns:
    int32 [experts], inner columns of each.
    suh: [hidden] when gate and up of all experts share it, else [2, experts, hidden].
    svh: [2, experts, width] of gate and up; down_suh: [experts, width]; down_svh: [experts, hidden].
    weights: the tensors behind the addresses, kept alive.
    """

    codebook: str
    trellis: torch.Tensor
    k2: torch.Tensor
    columns: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    down_suh: torch.Tensor
    down_svh: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    widest: int
    paired: bool  # gate and up of every expert have the same width
    all_widths: bool  # needs the kernels built for every width

    @property
    def experts(self) -> int:
        return self.trellis.shape[1]

    @property
    def width(self) -> int:
        """The most columns of gate and up that an expert has on this rank."""
        return self.svh.shape[2]

    @property
    def hidden(self) -> int:
        return self.down_svh.shape[1]

    @property
    def shared_scale(self) -> bool:
        return self.suh.dim() == 1

    def module(self, name: str) -> driver.Module:
        """The kernel file built for these tables."""
        tried = {key: str(value) for key, value in _shape(name).items() if key in trial_shape}
        return driver.load(name, {**codebook_macros(self.codebook), "WIDTHS": str(int(self.all_widths)), **tried})


def expert_tables(
    gate: Sequence[torch.Tensor],
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    *,
    suh: torch.Tensor,
    svh: torch.Tensor,
    down_suh: torch.Tensor,
    down_svh: torch.Tensor,
    codebook: str,
) -> ExpertTables:
    """Tables from an expert's trellises each, int16 [k/16, n/16, 16 * bits] on the GPU (views of one buffer are fine).

    Experts may differ in their inner columns, and have none; svh and down_suh have room for the most and nothing past
    an expert's own is read. Raises CheckpointError for sizes that the kernels cannot take.
    """
    matrices = (*gate, *up, *down)
    hidden, width, columns = down_svh.shape[1], svh.shape[2], [16 * matrix.shape[1] for matrix in gate]
    for name, size in (("hidden size", hidden), ("expert width", width), *(("expert width", own) for own in columns)):
        if size % BLOCK:
            raise CheckpointError(f"the {name} is {size} on this rank; EXL3 experts need a multiple of {BLOCK}")
    if max(columns) > width:
        raise CheckpointError(f"an expert has {max(columns)} columns on this rank and scales for {width}")
    for index, matrix in enumerate(matrices):
        tiles = columns[index % len(gate)] // 16
        shape = (tiles, hidden // 16) if index >= 2 * len(gate) else (hidden // 16, tiles)
        if matrix.shape[:2] != shape or not matrix.is_contiguous() or matrix.data_ptr() % 16:
            raise CheckpointError(
                f"trellis {index} has shape {tuple(matrix.shape)}, address {matrix.data_ptr():#x}; "
                f"expected {shape} tiles, contiguous, on a multiple of 16 bytes"
            )
    k2 = [matrix.shape[2] // 8 for matrix in matrices]
    device, experts = matrices[0].device, len(gate)
    return ExpertTables(
        codebook=codebook,
        trellis=torch.tensor([m.data_ptr() for m in matrices], dtype=torch.int64, device=device).view(3, experts),
        k2=torch.tensor(k2, dtype=torch.int32, device=device).view(3, experts),
        columns=torch.tensor(columns, dtype=torch.int32, device=device),
        suh=suh,
        svh=svh,
        down_suh=down_suh,
        down_svh=down_svh,
        weights=matrices,
        widest=max(k2),
        paired=k2[:experts] == k2[experts : 2 * experts],
        all_widths=not set(k2) <= {4, 6, 8},
    )


def _check_window(
    tables: ExpertTables,
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor | None,
) -> None:
    """The kernels see addresses only: refuse tensors that they would misread."""
    (rows, slots), hidden = picks.shape, tables.hidden
    expected = {
        "x": (x, torch.bfloat16, (rows, hidden)),
        "picks": (picks, torch.int32, (rows, slots)),
        "weights": (weights, torch.float32, (rows, slots)),
        "out": (out, torch.float32, (rows, hidden)),
        **({} if shared is None else {"shared": (shared, torch.float32, (rows, hidden))}),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"the expert kernels read contiguous {dtype} {shape}"
            )


def parts_of(hidden: int) -> int:
    """Runs that the inputs of gate and up are cut into, whose sums are added in order; by the shape alone."""
    return next(parts for parts in (8, 6, 5, 4, 3, 2, 1) if hidden // BLOCK % parts == 0)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of `decode`, for windows of up to 16 rows; layers that run one after another can share it."""

    rotated: torch.Tensor
    listed: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    activated: torch.Tensor
    results: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(
        cls, rows: int, slots: int, experts: int, hidden: int, width: int, shared_scale: bool, device: torch.device
    ) -> DecodeWorkspace:
        """width: the largest of the layers that share this."""
        picks = rows * slots
        lines = rows if shared_scale else 2 * picks
        distinct = min(experts, picks)
        return cls(
            rotated=torch.empty(lines, hidden, dtype=torch.float16, device=device),
            listed=torch.empty(distinct, _LISTED_INTS, dtype=torch.int32, device=device),
            counts=torch.empty(1 + rows, dtype=torch.int32, device=device),
            sums=torch.empty(picks * 2 * parts_of(hidden) * width, dtype=torch.float32, device=device),
            activated=torch.empty(picks * width, dtype=torch.float16, device=device),
            results=torch.empty(picks, hidden, dtype=torch.float32, device=device),
            counters=torch.zeros(
                distinct * (width // BLOCK) + rows * (hidden // BLOCK), dtype=torch.int32, device=device
            ),
        )


def decode(
    tables: ExpertTables,
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> None:
    """out float32 [rows, hidden] = experts of a window of 1 to 16 rows, weighted and summed in slot order.

    x: bfloat16 [rows, hidden]; picks: int32 [rows, slots], a value >= experts means none, no expert twice in a row;
    weights: float32 [rows, slots]. shared: float32 [rows, hidden], added last with weight 1.
    """
    rows, slots = picks.shape
    _check_window(tables, x, picks, weights, out, shared)
    if rows > DECODE_ROWS or rows * slots > _MAX_PICKS:
        raise ValueError(
            f"{rows} rows of {slots} picks; the decode kernels take {DECODE_ROWS} rows, {_MAX_PICKS} picks"
        )
    hidden, width, experts, parts = tables.hidden, tables.width, tables.experts, parts_of(tables.hidden)
    w, name = workspace, "8" if rows <= 8 else "16"
    distinct, valid = w.counts[:1], w.counts[1:]
    listed_most = min(experts, rows * slots)
    overlap = torch.cuda.get_device_capability(x.device)[0] >= 9
    module, shape = tables.module("exl3_experts"), _shape("exl3_experts")
    lines = rows if tables.shared_scale else 2 * rows * slots
    suh = (tables.suh, None) if tables.shared_scale else (None, tables.suh)
    module.kernel("experts_start")(
        (1 + -(-lines * (hidden // BLOCK) // 8),),
        256,
        (x, picks, *suh, shared, w.rotated, out, w.listed, distinct, valid, rows, slots, experts, hidden),
        overlap=overlap,
    )
    ring = shape["STAGES"] * BLOCK * tables.widest  # bytes a warp
    module.kernel(f"experts_gate_up_{name}")(
        (2 * parts * (width // BLOCK), listed_most),
        shape["GATE_UP_WARPS"] * 32,
        (
            *(tables.trellis, tables.k2, tables.columns, w.rotated, int(tables.shared_scale)),
            *(tables.svh, tables.down_suh, w.listed, distinct, w.sums, w.activated, w.counters),
            *(slots, experts, hidden, width, parts),
        ),
        shared=max(shape["GATE_UP_WARPS"] * ring, _SUMS_BYTES),
        overlap=overlap,
    )
    row_counters = w.counters[len(w.counters) - rows * (hidden // BLOCK) :]
    module.kernel(f"experts_down_{name}")(
        (hidden // BLOCK, listed_most),
        shape["DOWN_WARPS"] * 32,
        (
            *(tables.trellis, tables.k2, tables.columns, w.activated, tables.down_svh, w.listed, distinct, picks),
            *(weights, shared, valid, w.results, out, row_counters, slots, experts, hidden, width),
        ),
        shared=max(shape["DOWN_WARPS"] * ring, _SUMS_BYTES),
        overlap=overlap,
    )


@dataclass(frozen=True)
class PromptWorkspace:
    """Scratch of `prompt`; layers that run one after another can share it."""

    rotated: torch.Tensor
    members: torch.Tensor
    counts: torch.Tensor
    items: torch.Tensor
    arrivals: torch.Tensor
    activated: torch.Tensor
    results: torch.Tensor
    slab: int

    @classmethod
    def allocate(
        cls, rows: int, slots: int, experts: int, hidden: int, width: int, fused: bool, device: torch.device
    ) -> PromptWorkspace:
        """width: the largest of the layers that share this. fused: every layer has one input scale and gate and up of
        equal widths (`prompt` then needs no row a pick)."""
        picks, slab = rows * slots, min(hidden, _PROMPT_SLAB)
        return cls(
            rotated=torch.empty(rows if fused else picks, hidden, dtype=torch.float16, device=device),
            members=torch.empty(experts, rows, dtype=torch.int32, device=device),
            counts=torch.empty(1 + experts, dtype=torch.int32, device=device),
            items=torch.empty(experts + picks // _shape("exl3_prompt")["ROWS"], 4, dtype=torch.int32, device=device),
            arrivals=torch.zeros(1, dtype=torch.int32, device=device),
            activated=torch.empty(picks * width, dtype=torch.float16, device=device),
            results=torch.empty(picks * max(slab // 2, 0 if fused else 2 * width), dtype=torch.float32, device=device),
            slab=slab,
        )


def prompt(
    tables: ExpertTables,
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    workspace: PromptWorkspace,
    out: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> None:
    """As `decode`, for a prompt chunk of up to 4096 rows."""
    rows, slots = picks.shape
    _check_window(tables, x, picks, weights, out, shared)
    if rows > PROMPT_ROWS:
        raise ValueError(f"{rows} rows; the prompt kernels take {PROMPT_ROWS}")
    hidden, experts, w = tables.hidden, tables.experts, workspace
    rotations = rows * (hidden // BLOCK) if _fused(tables) else 0
    _rows_kernel("prompt_start")(
        (experts + -(-rotations // 8),),
        256,
        (
            *(x, picks, tables.suh if _fused(tables) else None, w.rotated, w.members, w.counts, w.items),
            *(w.counts[experts:], w.arrivals, rows, slots, experts, _shape("exl3_prompt")["ROWS"], hidden),
        ),
    )
    if _fused(tables):
        _gate_up_fused(tables, picks, w)
    else:
        _gate_up_apart(tables, x, picks, w)
    for start in range(0, hidden, w.slab):
        span = min(w.slab, hidden - start)
        _prompt_linear(tables, picks, w, 2, w.activated, tables.down_svh, w.results, start, span)
        _rows_kernel("prompt_combine")(
            (-(-span // 1024), rows),
            256,
            (w.results, picks, weights, shared, out, slots, experts, hidden, start, span),
        )


def _rows_kernel(name: str) -> Callable[..., None]:
    return chained(driver.load("exl3_prompt_rows").kernel(name))


def _fused(tables: ExpertTables) -> bool:
    """Whether one launch makes gate, up and what is between them and down."""
    return tables.shared_scale and tables.paired


def _gate_up_fused(tables: ExpertTables, picks: torch.Tensor, w: PromptWorkspace) -> None:
    """w.activated out of w.rotated, the rows that `prompt_start` has rotated."""
    rows, slots = picks.shape
    chained(tables.module("exl3_prompt").kernel("prompt_gate_up"))(
        (tables.width // BLOCK, _most_items(tables, picks)),
        256,
        (
            *(tables.trellis, tables.k2, tables.columns, w.rotated, tables.svh, tables.down_suh, w.members, w.items),
            *(w.counts[tables.experts :], w.activated, rows, slots, tables.experts, tables.hidden, tables.width),
        ),
        shared=_prompt_shared_bytes(tables, 2),
    )


def _gate_up_apart(tables: ExpertTables, x: torch.Tensor, picks: torch.Tensor, w: PromptWorkspace) -> None:
    """w.activated out of x, matrix by matrix."""
    slots, total, hidden, width = picks.shape[1], picks.numel(), tables.hidden, tables.width
    for matrix in (0, 1):
        suh = tables.suh if tables.shared_scale else tables.suh[matrix]
        pitch = 0 if tables.shared_scale else hidden
        _rows_kernel("prompt_rotate")(
            (-(-total * (hidden // BLOCK) // 8),),
            256,
            (x, picks, suh, w.rotated, pitch, total, slots, tables.experts, hidden),
        )
        to = w.results[matrix * total * width :]
        _prompt_linear(tables, picks, w, matrix, w.rotated, tables.svh[matrix], to, 0, width)
    _rows_kernel("prompt_swiglu")(
        (-(-total * (width // BLOCK) // 8),),
        256,
        (w.results, picks, tables.columns, tables.down_suh, w.activated, total, tables.experts, width),
    )


def _prompt_linear(
    tables: ExpertTables, picks: torch.Tensor, w: PromptWorkspace, matrix: int, given: torch.Tensor, svh: torch.Tensor,
    to: torch.Tensor, start: int, span: int,
) -> None:  # fmt: skip
    """Columns start to start + span of gate (0), up (1) or down (2) of every expert's rows, into `to`."""
    inputs, columns = (tables.width, tables.hidden) if matrix == 2 else (tables.hidden, tables.width)
    chained(tables.module("exl3_prompt").kernel("prompt_linear"))(
        (span // BLOCK, _most_items(tables, picks)),
        256,
        (
            *(tables.trellis, tables.k2, tables.columns, given, svh, w.members, w.items, w.counts[tables.experts :]),
            *(to, matrix, picks.shape[0], tables.experts, inputs, columns, start, span),
        ),
        shared=_prompt_shared_bytes(tables, 1),
    )


def _most_items(tables: ExpertTables, picks: torch.Tensor) -> int:
    """Pieces of at most ROWS rows of one expert that a chunk can come to."""
    return min(tables.experts, picks.numel()) + picks.numel() // _shape("exl3_prompt")["ROWS"]


def _prompt_shared_bytes(tables: ExpertTables, strips: int) -> int:
    shape = _shape("exl3_prompt")
    stage = shape["ROWS"] * BLOCK + strips * 4 * BLOCK * tables.widest
    return max(shape["PROMPT_STAGES"] * stage, strips * _PROMPT_OUT_BYTES)
