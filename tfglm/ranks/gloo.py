"""A wire over TCP for tensors in host memory, by torch.distributed's gloo.

A collective of gloo cannot be called back: its `abort` marks the group but leaves a blocked operation blocked, and
giving the group back waits for it (both tried with torch 2.13). So `gather` waits in short turns and looks up in
between, and after an abort the group is abandoned, not destroyed: its threads end with the process, or with gloo's own
limit. A process that must be gone by then ends itself (control.end_process_on_failure).
"""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from tfglm.errors import RanksError
from tfglm.ranks.board import Board
from tfglm.ranks.control import Control
from tfglm.ranks.staging import Staging

_TURN = timedelta(milliseconds=100)
_CONNECT_S = 30.0


class GlooWire:
    """One rank's end. All ranks make theirs at the same time, as it connects them.

    host: this rank's own address, the one that the other ranks reach it at; the one of its control connection if empty.
    limit_s: how long `gather` waits for the others. Raises RanksError when the ends cannot be connected.
    """

    capturable = False
    arrivals = None

    def __init__(self, control: Control, host: str = "", limit_s: float = 300.0) -> None:
        self.rank = control.rank
        self.ranks = control.ranks
        self._limit_s = limit_s
        self._aborted: str | None = None
        self._staging = Staging(self.ranks)
        self._gathers = 0
        host = host or control.host or "127.0.0.1"
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_CONNECT_S)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._board = Board(control, "gloo")
            self._group = dist.ProcessGroupGloo(self._board, self.rank, self.ranks, options)
        except RuntimeError as error:
            control.check()
            raise RanksError(f"rank {self.rank} cannot connect to the others from {host}: {error}") from error
        self._group._set_default_timeout(timedelta(seconds=limit_s))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._aborted is not None:
            raise RanksError(self._aborted)
        out, gathered = self._staging.outgoing(tensor), self._staging.incoming(tensor)
        if out.numel() > 0:
            self._wait(self._group._allgather_base(gathered, out))  # type: ignore[attr-defined]
        self._gathers += 1
        return self._staging.deliver(gathered, tensor)

    def _wait(self, work: dist.Work) -> None:
        until = time.monotonic() + self._limit_s
        while True:
            try:
                work.wait(_TURN)
                return
            except RuntimeError as error:
                if work.is_completed():
                    if work.is_success():
                        return  # just after its turn
                    raise RanksError(f"rank {self.rank} lost the others in gather {self._gathers}: {error}") from error
            if self._aborted is not None or time.monotonic() > until:
                late = f"gather {self._gathers} of rank {self.rank} is not complete after {self._limit_s:g} s"
                self._abandon(self._aborted or late)

    def _abandon(self, reason: str) -> NoReturn:
        """Leave the group with one reference too many: destroying it would wait for its blocked threads."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self.abort(reason)
        raise RanksError(reason)

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason

    def close(self) -> None:
        self.abort("the wire is closed")
