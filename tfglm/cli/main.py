"""`tfglm`: parse the command line, run one command, turn known errors into one clear line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tfglm import __version__
from tfglm.errors import TfglmError

# Each command is a module with `add_parser(subparsers)` that sets `run`; heavy imports happen inside `run`.
COMMANDS = (
    "serve",
    "plan",
    "chat",
    "synth",
    "inspect",
    "quantize",
    "bench",
    "check",
    "kernels",
    "up",
    "down",
    "status",
    "logs",
    "doctor",
    "engine",
    "rank",
)


class Parser(argparse.ArgumentParser):
    """One that names the flag that a misspelt one may have meant; a command's own parser knows which it has."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            self.exit(2, f"{self.prog}: error: it takes no {flag}; {meant}{self.prog} --help lists all\n")
        return known, unknown


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfglm", description="Serve GLM-5.3 on small clusters of DGX Sparks behind an OpenAI-compatible API."
    )
    parser.add_argument("--version", action="version", version=f"tfglm {__version__}")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"tfglm.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    # OpenMP threads that wait spin for milliseconds and take the processor from what they wait for: on two cores that
    # other work keeps busy a token took 60 to 200 ms. Sleeping at once (OMP_WAIT_POLICY=PASSIVE) costs 20 ms a token on
    # quiet cores; microseconds of spinning cost 7 ms there, 24 ms on busy ones. Read when torch is first imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TfglmError as error:
        if args.verbose:
            raise
        print(f"tfglm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


def entry() -> None:
    """The `tfglm` command: `main`, then the end of the process."""
    code = main()
    if any(thread.daemon for thread in threading.enumerate()):
        # A server that is stopped while it loads: the interpreter's own end would abort a thread in the middle of a
        # product ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
