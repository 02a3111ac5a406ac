"""Routed experts in EXL3 on the GPU: the tables of each layer and the scratch that layers of one shape share."""

from __future__ import annotations

import torch

from tfglm.ops import exl3_experts_cuda
from tfglm.ops.base import Routing
from tfglm.ops.exl3_experts_cuda import DecodeWorkspace, ExpertTables, PromptWorkspace
from tfglm.ops.exl3_weights import DOWN, GATE, UP, Exl3Experts

_ON_HOST = ("codebook", "offsets", "half_bits", "_decoded")


class Exl3Layers:
    """The EXL3 layers of a model. Scratch is allocated when a shape is first met, before it is captured in a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, ExpertTables] = {}  # by the address of a layer's buffer
        self._decode: dict[tuple[int, ...], DecodeWorkspace] = {}
        self._prompt: dict[tuple[int, ...], PromptWorkspace] = {}

    def hold(self, experts: Exl3Experts) -> Exl3Experts:
        """A layer's experts on the device."""
        parts = {name: part if name in _ON_HOST else part.to(self._device) for name, part in vars(experts).items()}
        held = Exl3Experts(**parts)
        gate, up, down = (
            [held.trellis(p, expert) for expert in range(held.offsets.shape[1])] for p in (GATE, UP, DOWN)
        )
        self._tables[held.buffer.data_ptr()] = exl3_experts_cuda.expert_tables(
            gate, up, down, suh=held.suh, svh=held.svh, down_suh=held.down_suh, down_svh=held.down_svh,
            codebook=held.codebook,
        )  # fmt: skip
        return held

    def run(
        self, x: torch.Tensor, routing: Routing, experts: Exl3Experts, shared: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """out float32 [R, hidden] = the weighted sum of the experts of x [R, hidden] bfloat16, and last shared."""
        tables = self._tables[experts.buffer.data_ptr()]
        rows, picks = routing.experts.shape
        run = exl3_experts_cuda.decode if rows <= exl3_experts_cuda.DECODE_ROWS else exl3_experts_cuda.prompt
        space = self._space(tables, rows, picks)
        run(tables, x, routing.experts, routing.weights, space, out, shared)  # type: ignore[arg-type]
        return out

    def _space(self, tables: ExpertTables, rows: int, picks: int) -> DecodeWorkspace | PromptWorkspace:
        sizes, device = (picks, tables.experts, tables.hidden, tables.width), self._device
        if rows <= exl3_experts_cuda.DECODE_ROWS:
            most = exl3_experts_cuda.DECODE_ROWS
            key: tuple[int, ...] = (*sizes, tables.shared_scale)
            if key not in self._decode:
                self._decode[key] = DecodeWorkspace.allocate(most, *sizes, tables.shared_scale, device)
            return self._decode[key]
        fused, room = tables.shared_scale and tables.paired, 1 << (rows - 1).bit_length()
        key = (room, *sizes, fused)
        if key not in self._prompt:
            self._prompt.clear()  # windows mostly have one size
            self._prompt[key] = PromptWorkspace.allocate(room, *sizes, fused, device)
        return self._prompt[key]
