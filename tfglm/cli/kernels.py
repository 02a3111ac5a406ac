"""`tfglm kernels`: compile the CUDA kernels ahead of the first start, or check what the compiler makes of them."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from tfglm.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "kernels", help="compile the CUDA kernels", description="Compile the CUDA kernels; no GPU is needed."
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    build = kinds.add_parser(
        "build",
        help="fill the cache of compiled kernels",
        description="Compile every kernel that the cache does not hold, so that a start of the server compiles none.",
    )
    build.add_argument(
        "--arch",
        action="append",
        metavar="SM",
        help="architecture, such as sm_121 (DGX Spark); may be given several times (default: this machine's GPU)",
    )
    build.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where to (default: $XDG_CACHE_HOME/tfglm/kernels, where servers look)",
    )
    build.set_defaults(run=run_build)
    check = kinds.add_parser(
        "check",
        help="print registers and spills, and fail where a kernel's header allows less",
        description="Compile kernels afresh for every supported architecture and print what they take of it. Exits "
        "with 1 where a kernel takes more than its header allows.",
    )
    check.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="one file of tfglm/kernels, or all, in every variant (default: first variants)",
    )
    check.set_defaults(run=run_check)


def run_build(args: argparse.Namespace) -> int:
    """Compile for each architecture; returns the exit status. Raises TfglmError."""
    from tfglm.ops import nvrtc

    for arch in args.arch or [_own()]:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise ConfigError(f"--arch {arch}: an architecture such as {', '.join(nvrtc.ARCHES)} is needed")
        start = time.monotonic()
        built = nvrtc.build(arch, args.cache)
        fresh = sum(not one.from_cache for one in built)
        print(
            f"{arch}: {len(built)} kernels in {args.cache or nvrtc.default_cache()}, {fresh} of them compiled now, "
            f"{time.monotonic() - start:.1f} s",
            flush=True,
        )
    return 0


def run_check(args: argparse.Namespace) -> int:
    """1 if a limit is broken, else 0. Raises TfglmError."""
    from tfglm.ops import nvrtc

    name = args.name and Path(args.name).name.removesuffix(".cu")
    if name not in (None, "all", *nvrtc.names()):
        raise ConfigError(f"there is no kernel file {args.name!r}; there are {', '.join(nvrtc.names())}, all")
    only = None if name == "all" else name
    return 1 if nvrtc.check(only=only, every=args.name is not None) else 0


def _own() -> str:
    """The architecture of this machine's GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no NVIDIA GPU here; name an architecture, such as --arch sm_121 (DGX Spark)")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
