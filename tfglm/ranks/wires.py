"""The wires by name, and which one it is where none is asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tfglm.errors import ConfigError
from tfglm.ranks.control import Control
from tfglm.ranks.wire import Wire
from tfglm.settings import Settings

WIRES = ("gloo", "shared", "nccl")


def chosen_wire(settings: Settings, *, one_machine: bool) -> str:
    """settings.wire, with something particular in place of auto: NCCL where every rank has a GPU of its own, between
    machines one each."""
    if settings.wire != "auto":
        return settings.wire
    gpus = torch.cuda.device_count() if settings.device != "cpu" and dist.is_nccl_available() else 0
    if gpus >= (settings.ranks if one_machine else 1):
        return "nccl"
    return "shared" if one_machine else "gloo"


def open_wire(name: str, control: Control, *, host: str = "", limit_s: float = 300.0) -> Wire:
    """This rank's end of the wire called `name`. All ranks open theirs at the same time.

    host: this rank's own address for gloo; the address of its control connection if empty. limit_s: how long a
    gather waits for the other ranks. Raises ConfigError for an unknown name, RanksError when it cannot be connected.
    """
    if name == "gloo":
        from tfglm.ranks.gloo import GlooWire

        return GlooWire(control, host, limit_s)
    if name == "shared":
        from tfglm.ranks.shared import SharedWire

        return SharedWire(control, limit_s)
    if name == "nccl":
        from tfglm.ranks.nccl import NcclWire

        return NcclWire(control, limit_s)
    raise ConfigError(f"there is no wire {name!r}; there are {', '.join(WIRES)}")
