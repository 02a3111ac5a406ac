"""What carries tensors between ranks. Everything else (sums, columns side by side) is built from one operation."""

from __future__ import annotations

from typing import Protocol

import torch

from tfglm.ranks.arrivals import Arrivals


class Wire(Protocol):
    """One rank's end of what connects all ranks. `gather` is called from one thread, `abort` and `close` from any."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def capturable(self) -> bool:
        """Whether `gather` may be part of a captured CUDA graph."""
        ...

    @property
    def arrivals(self) -> Arrivals | None:
        """Of a wire whose `gather` returns before the data has come, so that the device waits for it and the host does
        not: where whoever uses it marks its gathers."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, alike in shape and dtype, in rank order: [ranks, *shape], on the tensor's device.

        All ranks call it, in the same order. Raises RanksError once aborted, and when another rank does not come
        within the wire's limit.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the wait of `gather` on this rank, now and for good; it raises RanksError with this reason."""
        ...

    def close(self) -> None:
        """Give back what the wire holds. May be called again. Never waits for another rank."""
        ...
