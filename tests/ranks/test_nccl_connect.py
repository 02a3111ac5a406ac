"""NCCL's first gather, which connects: it ends with a rank that is lost meanwhile. NCCL itself is played here."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tfglm.errors import RanksError
from tfglm.ranks import nccl
from tfglm.ranks.control import controls_in_process


class Connecting:
    """A process group whose gather waits for a rank that is not there, until it is aborted."""

    def __init__(self, *_: object) -> None:
        self.reached, self._ended = threading.Event(), threading.Event()

    def _allgather_base(self, gathered: torch.Tensor, data: torch.Tensor) -> Connecting:
        self.reached.set()
        return self

    def wait(self) -> None:
        assert self._ended.wait(30), "nobody has aborted the gather"
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self._ended.set()


def test_a_rank_that_is_lost_while_nccl_connects_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Connecting()
    made = type("Made", (), {"Options": SimpleNamespace, "__new__": lambda cls, *_: group})
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(nccl, "tcp_store", lambda *_: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    controls = controls_in_process(2)
    raised: list[RanksError] = []

    def connect() -> None:
        try:
            nccl.NcclWire(controls[0])
        except RanksError as error:
            raised.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    try:
        assert group.reached.wait(10)
        controls[1].fail(RanksError("rank 1 has gone"))
        thread.join(10)
        assert [error.message for error in raised] == ["rank 1 has gone"]
    finally:
        for control in controls:
            control.close()
