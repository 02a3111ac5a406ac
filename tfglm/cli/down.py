"""`tfglm down`: stop the cluster in order."""

from __future__ import annotations

import argparse

from tfglm.cli.playbooks import add_arguments, play


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "down",
        help="stop the cluster: replies get their time, then all ranks end and their memory is free",
        description="Runs stop.yml: rank 0 drains first, then every other rank ends.",
    )
    add_arguments(parser)
    parser.set_defaults(run=lambda args: play("stop.yml", args))
