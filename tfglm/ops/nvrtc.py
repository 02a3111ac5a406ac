"""CUDA sources of tfglm/kernels -> machine code, through NVRTC, with a cache on disk.

NVRTC is called through its C interface: every CUDA build of torch brings the library along, the PyPI wheel
`nvidia-cuda-nvrtc` holds it alone, and neither a GPU nor a driver is needed to compile. So an image can be prebuilt
and CI can compile every kernel (`tfglm kernels`).

A kernel file states its own build facts in `//!` lines:

    //! variant: CODEBOOK=1          one set of macros that is compiled for real use (a line each; none = no macros)
    //! no-spills                    the check fails when ptxas reports spilled registers
    //! spills 40                    likewise above 40 bytes a thread
    //! limit sm_121: registers 128  the check fails above this (arch may be `all`)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tfglm.errors import TfglmError

ARCHES = ("sm_89", "sm_90", "sm_120", "sm_121")
OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")

_CACHE_MAGIC = b"tfglm-cubin-1\n"
_log = logging.getLogger(__name__)


class KernelBuildError(TfglmError):
    """A kernel that does not compile, or no compiler to compile it with; the message carries the compiler's log."""

    code = "E_KERNEL"


@dataclass(frozen=True)
class Resources:
    """What ptxas says about one kernel: registers a thread, bytes of stack and of spilled registers."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Built:
    """Machine code of one source for one architecture."""

    name: str
    arch: str
    cubin: bytes
    log: str
    from_cache: bool


def source(name: str) -> str:
    """Text of tfglm/kernels/<name> (with its suffix)."""
    return (resources.files("tfglm.kernels") / name).read_text(encoding="utf-8")


def names() -> list[str]:
    """Kernel families, without suffix, in alphabetical order."""
    return sorted(f.name[:-3] for f in resources.files("tfglm.kernels").iterdir() if f.name.endswith(".cu"))


def expand(name: str, seen: set[str] | None = None) -> str:
    """Source of a file with its `#include "x.cuh"` lines replaced by the files' text, each once.

    One flat text is both what is compiled and what the cache key covers, so no include can be forgotten in the key.
    """
    seen = set() if seen is None else seen
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(source(name).splitlines(), 1):
        include = re.match(r'\s*#include\s+"([^"]+)"', line)
        if include is None:
            lines.append(line)
        elif include[1] not in seen:
            seen.add(include[1])
            lines += [expand(include[1], seen), f'#line {number + 1} "{name}"']
        else:
            lines.append("")
    return "\n".join(lines)


def variants(name: str) -> list[dict[str, str]]:
    """Macro sets that the header of `<name>.cu` declares."""
    found = re.findall(r"^//! variant:(.*)$", source(f"{name}.cu"), re.MULTILINE)
    return [dict(item.split("=", 1) for item in line.split()) for line in found] or [{}]


def defaults(name: str) -> dict[str, int]:
    """Integer macros that `<name>.cu` sets when nobody else does: its launch shape, kept in one place."""
    return {key: int(value) for key, value in re.findall(r"^#define (\w+) (\d+)\b", source(f"{name}.cu"), re.MULTILINE)}


# ----------------------------------------------------------------------------------------------------------------------
# The compiler


@functools.cache
def _library() -> ctypes.CDLL:
    """libnvrtc, from an installed wheel (torch's or its own) or else from the system."""
    folders = [Path(p) / "nvidia" for p in sys.path if (Path(p) / "nvidia").is_dir()]
    patterns = ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")
    candidates = [f for folder in folders for pattern in patterns for f in sorted(folder.glob(pattern), reverse=True)]
    for found in candidates:
        # The wheel's libnvrtc looks its built-in headers up by bare name: have them loaded already.
        for builtins in found.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(found))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KernelBuildError(
        "no libnvrtc found (looked in nvidia/*/lib of every folder of sys.path and in the loader's path); "
        "install a CUDA build of torch, or `pip install nvidia-cuda-nvrtc`"
    )


def compiler_version() -> str:
    """NVRTC's version, "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _check(status: int, what: str) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelBuildError(f"{what} failed: {_library().nvrtcGetErrorString(status).decode()}")


def _nvrtc(text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Compile one flat source. Returns (cubin, log)."""
    library = _library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = library.nvrtcCompileProgram(program, len(options), flags)
        _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        log = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text_log = log.value.decode(errors="replace")
        if status:
            raise KernelBuildError(f"{name} does not compile with {' '.join(options)}:\n{text_log}")
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw, text_log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


# ----------------------------------------------------------------------------------------------------------------------
# The cache


def default_cache() -> Path:
    """Folder of compiled kernels: $XDG_CACHE_HOME/tfglm/kernels, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfglm" / "kernels"


def _read_entry(path: Path) -> bytes | None:
    """A cache entry's cubin, or None when there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[len(_CACHE_MAGIC) :][:32], data[len(_CACHE_MAGIC) + 32 :]
    if data.startswith(_CACHE_MAGIC) and hashlib.sha256(cubin).digest() == digest:
        return cubin
    _log.warning("the compiled kernel %s is damaged and is built again", path)
    return None


def _write_entry(path: Path, cubin: bytes) -> None:
    """Whole or not at all; a cache that cannot be written costs a compilation at the next start, not this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(_CACHE_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        Path(file.name).replace(path)
    except OSError as error:
        _log.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)


def compile(name: str, arch: str, macros: Mapping[str, str] | None = None, cache: Path | None = None) -> Built:
    """Machine code of tfglm/kernels/<name>.cu for `arch` ("sm_121"); needs no GPU.

    macros: preprocessor definitions. cache: folder of compiled kernels (default_cache() when None).
    The key covers the source with its includes, the options, the architecture and the compiler's version. The driver
    is not part of it: a cubin is final machine code that it loads as it is, and an image is built without a driver.
    Raises KernelBuildError with the compiler's log.
    """
    text = expand(f"{name}.cu")
    defines = [f"-D{key}={value}" for key, value in sorted((macros or {}).items())]
    options = (f"--gpu-architecture={arch}", *OPTIONS, *defines)
    key = hashlib.sha256("\0".join((compiler_version(), *options, text)).encode()).hexdigest()
    path = (default_cache() if cache is None else cache) / f"{name}-{arch}-{key[:32]}.cubin"
    cubin = _read_entry(path)
    if cubin is not None:
        return Built(name, arch, cubin, "", from_cache=True)
    cubin, log = _nvrtc(text, f"{name}.cu", options)
    _write_entry(path, cubin)
    return Built(name, arch, cubin, log, from_cache=False)


def build(arch: str, cache: Path | None = None) -> list[Built]:
    """Every kernel in every variant for one architecture, from the cache where it has them. Compilations run side by
    side: NVRTC works outside Python's lock. Raises KernelBuildError."""
    jobs = [(name, macros) for name in names() for macros in variants(name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile(job[0], arch, job[1], cache), jobs))


# ----------------------------------------------------------------------------------------------------------------------
# The check that CI runs


def resource_usage(log: str) -> dict[str, Resources]:
    """Kernel name -> what ptxas reported in a compiler log."""
    usage = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return {
        m["name"]: Resources(int(m["registers"]), int(m["stack"]), int(m["stores"]), int(m["loads"]))
        for m in usage.finditer(log)
    }


def _broken_limits(text: str, arch: str, usage: Mapping[str, Resources]) -> Iterator[str]:
    stated = re.search(r"^//! (no-spills|spills (\d+))\s*$", text, re.MULTILINE)
    spills = sys.maxsize if stated is None else int(stated[2] or 0)
    limits = re.findall(r"^//! limit (all|sm_\d+): registers (\d+)\s*$", text, re.MULTILINE)
    most = min((int(n) for which, n in limits if which in ("all", arch)), default=255)
    for kernel, used in usage.items():
        if used.spill_stores > spills:
            yield f"{kernel} spills {used.spill_stores} bytes out, {used.spill_loads} in (its header allows {spills})"
        if used.registers > most:
            yield f"{kernel} uses {used.registers} registers (its header allows {most})"


def check(arches: tuple[str, ...] = ARCHES, only: str | None = None, every: bool = False) -> int:
    """Compile kernels afresh for `arches`, print their resources, return the number of broken limits.

    The first variant of each file stands for the others, which differ in a table or add rare widths; `every` compiles
    them too.
    """
    jobs = [
        (name, macros, arch)
        for name in names()
        if only in (None, name)
        for macros in (variants(name) if every else variants(name)[:1])
        for arch in arches
    ]
    with tempfile.TemporaryDirectory() as empty, ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = pool.map(lambda job: compile(job[0], job[2], job[1], Path(empty)).log, jobs)
        return sum(_report(*job, resource_usage(log)) for job, log in zip(jobs, logs, strict=True))


def _report(name: str, macros: Mapping[str, str], arch: str, usage: Mapping[str, Resources]) -> int:
    """Print one compilation's resources and broken limits; return the number of the latter."""
    label = f"{name} {arch} {' '.join(f'{k}={v}' for k, v in macros.items())}".rstrip()
    for kernel, used in usage.items():
        spills = f", {used.spill_stores}+{used.spill_loads} B spilled" if used.spill_stores else ""
        print(f"{label}: {kernel} {used.registers} registers, {used.stack} B stack{spills}", flush=True)
    broken = list(_broken_limits(source(f"{name}.cu"), arch, usage))
    for message in broken:
        print(f"FAIL {label}: {message}", flush=True)
    return len(broken)
