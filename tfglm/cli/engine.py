"""`tfglm engine PATH --rank N --ranks G --leader HOST:PORT`: one rank of a model over several machines."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from tfglm.errors import ConfigError
from tfglm.settings import Settings, flag_name, flags, help_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="one rank of a model over several machines",
        description="Rank 0 waits for the others at --leader and then serves as tfglm serve does; every other rank "
        "joins it there, holds its part of the weights, and ends with it. Settings must be alike on all ranks.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # tfglm serve --ranks: the process to end with
    for f in flags("engine"):
        parser.add_argument(flag_name(f.name), metavar="VALUE", help=help_text(f))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.cli.local_ranks import end_with
    from tfglm.cli.serving import chosen, serve_model, start_logging

    if args.parent is not None:
        end_with(args.parent)
    settings = Settings.from_sources({f.name: getattr(args, f.name) for f in flags("engine")})
    if settings.rank >= settings.ranks:
        raise ConfigError(f"--rank is {settings.rank} and --ranks {settings.ranks}; ranks count from 0")
    start_logging(settings)
    if settings.ranks == 1:
        return serve_model(args.path, settings, None)
    leader = _address(settings.leader)
    if settings.rank == 0:
        return serve_model(args.path, settings, Elsewhere(leader))
    from tfglm.engine.spread import follow

    settings = chosen(settings, one_machine=args.parent is not None)
    follow(args.path, settings, leader)
    return 0


class Elsewhere:
    """Implements OtherRanks: each is started on its own machine, by hand or by its service."""

    one_machine = False

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def start(self, settings: Settings) -> socket.socket:
        from tfglm.ranks.bootstrap import listen

        return listen(self._address)

    def check(self) -> None:
        """Nothing is known of them until they join."""

    def close(self, *, failed: bool) -> None:
        """They end by themselves."""


def _address(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 host in brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--leader is {text!r}; it takes HOST:PORT, the address at which rank 0 waits for the others")
    return host, int(port)
