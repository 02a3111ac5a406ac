"""`tfglm up`: prepare every machine of the inventory and start the cluster, or start it alone."""

from __future__ import annotations

import argparse

from tfglm.cli.playbooks import add_arguments, play


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "up",
        help="prepare the machines of the inventory and start the cluster",
        description="Runs site.yml: checks and prepares every machine, starts all ranks and waits until the model "
        "answers. A second run changes nothing.",
    )
    parser.add_argument("--start-only", action="store_true", help="start.yml alone: the machines are prepared already")
    add_arguments(parser)
    parser.set_defaults(run=lambda args: play("start.yml" if args.start_only else "site.yml", args))
