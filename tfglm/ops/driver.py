"""Loads compiled kernels and launches them on torch's current stream, through the CUDA driver's C interface.

Nothing here synchronises or allocates device memory, so launches can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence

import torch

from tfglm.errors import TfglmError
from tfglm.ops import nvrtc

_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED = 8
_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

Argument = torch.Tensor | int | float | None


class KernelLaunchError(TfglmError):
    """The driver refused to load or launch a kernel."""

    code = "E_KERNEL"


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelLaunchError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded: {error}") from error


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelLaunchError(f"{what} failed: {(text.value or b'unknown error').decode()} ({status})")


def _pack(argument: Argument) -> ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument)


class Kernel:
    """One kernel on one device. Integers are passed as int32, floats as float32, tensors and None as pointers."""

    def __init__(self, handle: ctypes.c_void_p, name: str) -> None:
        self.name = name
        self._handle = handle
        self._shared = 0  # what was allowed so far; 48 KiB need no permission, but a kernel's static part counts too

    def __call__(
        self,
        grid: Sequence[int],
        block: int,
        arguments: Sequence[Argument],
        *,
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        """Launch. shared: bytes of dynamic shared memory. overlap: programmatic dependent launch (the kernel may start
        before its predecessor in the stream ends, and waits for it itself with griddepcontrol.wait)."""
        if shared > self._shared:
            _check(
                _driver().cuFuncSetAttribute(self._handle, _FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED, shared),
                f"raising {self.name}'s shared memory to {shared} bytes",
            )
            self._shared = shared
        packed = [_pack(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(p) for p in packed))
        gx, gy, gz = (*grid, 1, 1)[:3]
        attribute = _Attribute(_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value = b"\x01"
        # Without a device torch asks the driver first whether there is any: 70 us, more than most kernels take.
        stream = torch.cuda.current_stream(torch.cuda.current_device())
        config = _Config(gx, gy, gz, block, 1, 1, shared, stream.cuda_stream)
        config.attributes, config.count = ctypes.pointer(attribute), int(overlap)
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None),
            f"launching {self.name} with grid {gx}x{gy}x{gz}, block {block}, {shared} bytes of shared memory",
        )


class Module:
    """A loaded kernel file; `module.kernel("name")` is cheap after the first call."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._handle = ctypes.c_void_p()
        self._kernels: dict[str, Kernel] = {}
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), cubin), f"loading {name}")

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            function = ctypes.c_void_p()
            _check(
                _driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()),
                f"finding kernel {name}",
            )
            self._kernels[name] = Kernel(function, name)
        return self._kernels[name]


@functools.cache
def _load(name: str, macros: tuple[tuple[str, str], ...], device: int) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    built = nvrtc.compile(name, f"sm_{major}{minor}", dict(macros))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context the current one
        return Module(built.cubin, f"{name} ({built.arch})")


def load(name: str, macros: Mapping[str, str] | None = None) -> Module:
    """The module of tfglm/kernels/<name>.cu for torch's current device, compiled or taken from the cache once."""
    return _load(name, tuple(sorted((macros or {}).items())), torch.cuda.current_device())
