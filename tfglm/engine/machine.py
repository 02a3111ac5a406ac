"""What of a process decides the bits of the rows it computes, besides code and checkpoint: formats and machine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from tfglm.ops.nvrtc import compiler_version
from tfglm.settings import Settings


def computing_facts(settings: Settings) -> dict[str, Any]:
    """On a CPU the machine and the number of threads, on a GPU its kind, the compiler of its kernels and the
    formats of the weights. The number of torch threads must be set."""
    common = {"torch": torch.__version__, "kv": settings.kv}
    if settings.device == "cuda":
        gpu = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} CUDA {torch.version.cuda}"
        formats = {"dense": settings.dense, "head": settings.head}
        return common | formats | {"gpu": gpu, "nvrtc": compiler_version()}
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return common | {"machine": machine, "threads": torch.get_num_threads()}


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
