"""Where a model runs, and whether that place can hold what was asked of it: found out before anything is loaded."""

from __future__ import annotations

import torch

from tfglm.errors import ConfigError
from tfglm.formats.latent import KvFormat
from tfglm.memory.info import read_memory

LEAST_CAPABILITY = (8, 9)
"""Ada: the first with e4m3 conversions in hardware, which the cache and weight formats use."""


def choose_device(device: str, kv: str, dense: str, head: str) -> str:
    """ "cpu" or "cuda" for a device of "auto", "cpu" or "cuda": auto takes a GPU where one can be used.

    Raises ConfigError for a GPU that is not there or too old, and for a format that the device does not have.
    """
    problem = "" if device == "cpu" else _gpu_problem()
    if device == "cuda" and problem:
        raise ConfigError(f"--device is 'cuda', but {problem}; supported here: cpu")
    chosen = "cpu" if device == "cpu" or problem else "cuda"
    formats = [kind.value for kind in KvFormat]
    if chosen == "cuda" and kv not in formats:
        raise ConfigError(f"--kv is {kv!r}; --device cuda has {', '.join(formats)}; --device cpu has it")
    for name, value in (("dense", dense), ("head", head)):
        if chosen == "cpu" and value != "bf16":
            raise ConfigError(f"--{name} is {value!r}; a CPU computes with what the checkpoint holds: leave it at bf16")
    return chosen


def memory_budget(device: str) -> int:
    """Bytes a plan may count on: of the GPU where it has memory of its own, else of the machine."""
    if device == "cuda" and not getattr(torch.cuda.get_device_properties(), "is_integrated", False):
        return int(torch.cuda.mem_get_info()[0])
    return read_memory().budget


def _gpu_problem() -> str:
    """Why no GPU can be used; empty if one can."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        found = "{}.{}".format(*torch.cuda.get_device_capability())
        needed = "{}.{}".format(*LEAST_CAPABILITY)
        return f"{torch.cuda.get_device_name()} has compute capability {found} and {needed} is needed"
    return ""
