"""`tfglm logs`: collect the logs of every rank."""

from __future__ import annotations

import argparse

from tfglm.cli.playbooks import add_arguments, play


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "logs",
        help="collect the logs of every rank into one archive",
        description="Runs logs.yml. On a Spark itself, journalctl -u 'tfglm@*' follows its own rank.",
    )
    add_arguments(parser)
    parser.set_defaults(run=lambda args: play("logs.yml", args))
