"""Tensors as bytes in host memory, for wires that know nothing else."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [n], in C order; shares its memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Staging:
    """Takes tensors to host memory and what was gathered back to where they came from.

    A CPU tensor's own memory is used. A CUDA tensor goes through pinned buffers, which are kept and grow.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._out = torch.empty(0, dtype=torch.uint8)
        self._in = torch.empty(0, dtype=torch.uint8)

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes in host memory: uint8 [n]."""
        data = as_bytes(tensor)
        if not data.is_cuda:
            return data
        if self._out.numel() < data.numel():
            self._out = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        out = self._out[: data.numel()]
        out.copy_(data, non_blocking=True)
        # Also waits for the copy of the gather before out of `incoming`'s buffer, which is about to be written again.
        torch.cuda.current_stream(data.device).synchronize()
        return out

    def incoming(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for every rank's bytes: uint8 [ranks * n]."""
        size = self._ranks * tensor.numel() * tensor.element_size()
        if not tensor.is_cuda:
            return torch.empty(size, dtype=torch.uint8)
        if self._in.numel() < size:
            self._in = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._in[:size]

    def deliver(self, gathered: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """What `incoming` now holds, as [ranks, *shape] of the tensor's dtype, on its device."""
        if tensor.is_cuda:
            gathered = torch.empty_like(gathered, device=tensor.device).copy_(gathered, non_blocking=True)
        return gathered.view(tensor.dtype).reshape(self._ranks, *tensor.shape)
