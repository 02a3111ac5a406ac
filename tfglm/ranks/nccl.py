"""A wire between GPUs, by torch.distributed's NCCL. Works on the current stream, and inside a captured CUDA graph.

Unlike the wires through host memory, `gather` returns before the data has come. After an abort NCCL's kernels end
and what they leave is void: whoever reads a result on the host asks the control (`check`) after waiting for it.

NCCL gives a communicator back only when no captured graph holds it any more, and waits for that without a limit.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from tfglm.errors import ConfigError, RanksError
from tfglm.ranks.arrivals import Arrivals
from tfglm.ranks.board import tcp_store
from tfglm.ranks.control import Control
from tfglm.ranks.staging import as_bytes

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class NcclWire:
    """One rank's end, on the current CUDA device. All ranks make theirs at the same time, each on a GPU of its own.

    Raises ConfigError without a GPU or NCCL, RanksError when the ranks cannot be connected.
    """

    capturable = True

    def __init__(self, control: Control, limit_s: float = 300.0) -> None:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ConfigError("the wire nccl needs an NVIDIA GPU and a CUDA build of torch; gloo and shared do not")
        self.rank = control.rank
        self.ranks = control.ranks
        self.arrivals = Arrivals(_Mark)
        self._aborted: str | None = None
        self._ending = threading.Lock()
        # Of its flight recorder, which asks rank 0's store once a second, also when that has gone with its rank.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit_s)
        try:
            self._store = tcp_store(control, "nccl")
            self._group = dist.ProcessGroupNCCL(self._store, self.rank, self.ranks, options)
            control.on_failure(lambda error: self.abort(error.message))  # also while it connects
            # NCCL connects at the first use; nothing that is slow or can fail is left for the first prompt.
            self.gather(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
        except (RuntimeError, RanksError) as error:
            control.check()
            raise RanksError(f"rank {self.rank} cannot connect to the others through NCCL: {error}") from error

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._aborted is not None:
            raise RanksError(self._aborted)
        data = as_bytes(tensor)
        gathered = torch.empty(self.ranks * data.numel(), dtype=torch.uint8, device=tensor.device)
        if data.numel() > 0:
            try:
                self._group._allgather_base(gathered, data).wait()  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise RanksError(self._aborted or f"rank {self.rank} lost the others: {error}") from error
        return gathered.view(tensor.dtype).reshape(self.ranks, *tensor.shape)

    def abort(self, reason: str) -> None:
        """NCCL's kernels end soon; the communicator is gone, in a thread of its own, once no captured graph that it is
        part of is left."""
        with self._ending:
            if self._aborted is None:
                self._aborted = reason
                self._abort = threading.Thread(target=self._group.abort, name="nccl-abort", daemon=True)
                self._abort.start()

    def close(self) -> None:
        """Returns when the communicator is gone. Where graphs keep it, it ends with the process."""
        self.abort("the wire is closed")
        self._abort.join(_CLOSE_S)
        if self._abort.is_alive():
            log.warning("NCCL is still in use after %g s: a captured graph was not given back", _CLOSE_S)


class _Mark:
    """An event on the current stream of the current device; asked for by a thread that has no device of its own, which
    would open one on the first GPU."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())
