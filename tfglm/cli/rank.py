"""`tfglm rank run|check|command|reap`: one rank of a provisioned cluster, as systemd runs it. Never loads torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tfglm.errors import ConfigError

if TYPE_CHECKING:
    from tfglm.supervisor.cluster import Cluster, Node

_ACTIONS = {
    "run": "run this node's rank until it is told to stop; exit codes are in docs/operations.md",
    "check": "wait for network, checkpoint, image and memory as run does, and start nothing",
    "command": "print the command line and the environment that run would give the engine",
    "reap": "kill what a killed supervisor of this rank has left behind",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "rank",
        help="one rank of a cluster, as systemd runs it",
        description="Runs one rank of the cluster that cluster.json describes on the node that rank.json describes.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, words in _ACTIONS.items():
        sub = actions.add_parser(action, help=words, description=f"{words[0].upper()}{words[1:]}.")
        sub.add_argument("--rank", type=int, required=True, metavar="N", help="rank.json must say the same")
        sub.add_argument("--config", type=Path, default=Path("/etc/tfglm"), metavar="DIR", help="default /etc/tfglm")
        if action == "run":
            sub.add_argument(
                "--state",
                type=Path,
                metavar="DIR",
                help="folder of the state file (default $RUNTIME_DIRECTORY or /run/tfglm)",
            )
        sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.supervisor.cluster import read_cluster, read_node
    from tfglm.supervisor.codes import Exit, Fatal

    try:
        cluster = read_cluster(args.config)
        node = read_node(cluster, args.config)
        if node.rank != args.rank:
            raise ConfigError(
                f"--rank is {args.rank}; {args.config / 'rank.json'} says that this node is rank {node.rank}"
            )
    except ConfigError as error:
        return _fail(Fatal(Exit.CONFIG, error.code, error.message))
    try:
        return {"run": _run, "check": _check, "command": _command, "reap": _reap}[args.action](args, cluster, node)
    except Fatal as fatal:
        return _fail(fatal)


def _fail(fatal: Exception) -> int:
    import sys

    print(f"tfglm: {fatal}", file=sys.stderr)
    return int(getattr(fatal, "exit", 1))


def _run(args: argparse.Namespace, cluster: Cluster, node: Node) -> int:
    import asyncio
    import logging

    from tfglm.supervisor.rank import Supervisor

    # The journal has its own times, and the unit's name for the rank, tfglm-rank0.
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")

    async def live() -> int:
        return await Supervisor(cluster, node, state_dir=args.state).run()

    return asyncio.run(live())


def _check(args: argparse.Namespace, cluster: Cluster, node: Node) -> int:
    import asyncio
    import logging

    from tfglm.supervisor.prepare import Preparation
    from tfglm.supervisor.runtime import Runtime

    logging.basicConfig(level="INFO", format="%(message)s")

    async def check() -> None:
        preparation = Preparation(cluster, node, Runtime(cluster, node), lambda reason: None)
        await preparation.network()
        await preparation.checkpoint()
        await preparation.image()
        await preparation.memory()

    asyncio.run(check())
    print(f"rank {node.rank}: network, checkpoint, image and memory are as they must be")
    return 0


def _command(args: argparse.Namespace, cluster: Cluster, node: Node) -> int:
    from tfglm.supervisor.fabric import engine_environment, resolve
    from tfglm.supervisor.runtime import Runtime

    network = engine_environment(node, resolve(node), len(cluster.ranks))
    print(Runtime(cluster, node).engine_shown(1, network))
    return 0


def _reap(args: argparse.Namespace, cluster: Cluster, node: Node) -> int:
    import subprocess

    from tfglm.supervisor.alone import claim
    from tfglm.supervisor.child import kill_marked
    from tfglm.supervisor.codes import Exit, Fatal
    from tfglm.supervisor.runtime import Runtime

    runtime = Runtime(cluster, node)
    with claim(runtime.mark):
        killed = kill_marked(runtime.mark)
        try:
            removed = runtime.remove()
        except (OSError, subprocess.SubprocessError) as error:
            raise Fatal(Exit.RUNTIME, "E_WORKER", f"containers of this rank may be left: {error}") from None
    print(f"rank {node.rank}: processes killed: {len(killed)}, containers removed: {len(removed)}")
    return 0
