"""Routed experts in EXL3 on the GPU: the tables of each layer and the scratch that layers of one shape share."""

from __future__ import annotations

import torch

from tfglm.ops import exl3_experts_cuda
from tfglm.ops.base import Routing
from tfglm.ops.exl3_experts_cuda import DecodeWorkspace, ExpertTables, PromptWorkspace
from tfglm.ops.exl3_weights import DOWN, GATE, UP, Exl3Experts

_ON_HOST = ("codebook", "offsets", "half_bits", "inner", "_decoded")


class Exl3Layers:
    """The EXL3 layers of a model. Scratch is allocated when a shape is first met, before it is captured in a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, ExpertTables] = {}  # by the address of a layer's buffer
        self._decode: dict[tuple[int, ...], DecodeWorkspace] = {}
        self._prompt: dict[tuple[int, ...], PromptWorkspace] = {}
        self._prompt_rows = 0  # that scratch has room for; it only grows

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
        self, x: torch.Tensor, routing: Routing, experts: Exl3Experts, shared: torch.Tensor | None, out: torch.Tensor,
        *, prompt: bool,
    ) -> torch.Tensor:  # fmt: skip
        """out float32 [R, hidden] = the weighted sum of the experts of x [R, hidden] bfloat16, and last shared. prompt:
        sum as prompts do, which more rows than decode kernels take do anyway."""
        tables, chosen = self._tables[experts.buffer.data_ptr()], (routing.experts, routing.weights)
        rows, picks = routing.experts.shape
        if prompt or rows > exl3_experts_cuda.DECODE_ROWS:
            exl3_experts_cuda.prompt(tables, x, *chosen, self._prompt_space(tables, rows, picks), out, shared)
        else:
            exl3_experts_cuda.decode(tables, x, *chosen, self._decode_space(tables, picks), out, shared)
        return out

    def _decode_space(self, tables: ExpertTables, picks: int) -> DecodeWorkspace:
        key = (picks, tables.experts, tables.hidden, tables.width, tables.shared_scale)
        if key not in self._decode:
            self._decode[key] = DecodeWorkspace.allocate(exl3_experts_cuda.DECODE_ROWS, *key, self._device)
        return self._decode[key]

    def _prompt_space(self, tables: ExpertTables, rows: int, picks: int) -> PromptWorkspace:
        if rows > self._prompt_rows:
            self._prompt_rows = 1 << (rows - 1).bit_length()
            self._prompt.clear()
        fused = tables.shared_scale and tables.paired
        key = (self._prompt_rows, picks, tables.experts, tables.hidden, tables.width, fused)
        if key not in self._prompt:
            self._prompt[key] = PromptWorkspace.allocate(*key, self._device)
        return self._prompt[key]
