"""`tfglm doctor`: do the ranks of a cluster reach each other, and how fast? With --ranks, on this machine alone."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfglm.cli.playbooks import add_arguments, play
from tfglm.errors import ConfigError, RanksError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfglm.ranks.wire import Wire
    from tfglm.supervisor.cluster import Cluster, Node

EXPECTED_S = {
    # Gathers of 12 KiB and 8 MiB. NCCL over RoCE on Sparks took 32 to 80 us as published, 32 MB 1.9 to 3.5 ms; the
    # others are where something is clearly wrong.
    "nccl": {12 * 1024: 300e-6, 8 << 20: 10e-3},
    "gloo": {12 * 1024: 10e-3, 8 << 20: 0.5},
    "shared": {12 * 1024: 10e-3, 8 << 20: 0.5},
}
RAIL_SHARE = 0.1
"""Of a port's own speed that one TCP stream must reach."""
_MEET_S = 120.0
_LOCAL_S = 180.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="try the ranks' network: values, latency, bandwidth of every cable",
        description="Without arguments: preflight and a trial of all ranks of the cluster in the inventory, through "
        "Ansible. With --ranks: that many ranks on this machine. With --rank: this node's part of a trial.",
    )
    parser.add_argument("--ranks", type=int, metavar="G", help="try G ranks on this machine; needs no cluster")
    parser.add_argument("--rank", type=int, metavar="N", help="be rank N in the trial of all nodes; each runs its own")
    parser.add_argument("--config", type=Path, default=Path("/etc/tfglm"), metavar="DIR", help="default /etc/tfglm")
    parser.add_argument("--wire", default="", choices=("gloo", "shared", "nccl"), help="default: what the cluster uses")
    parser.add_argument("--leader", default="", help=argparse.SUPPRESS)  # where the local ranks meet
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.rank is not None:
        report = _local_part(args) if args.leader else _cluster_part(args)
        if report is None:
            return _in_container(args)
        if args.rank == 0:
            print(json.dumps(report), flush=True) if args.json or args.leader else _print(report)
        return 1 if report["problems"] else 0
    if args.ranks is not None:
        if not 2 <= args.ranks <= 8:
            raise ConfigError(f"--ranks is {args.ranks}; a trial has 2 to 8 ranks")
        reports = [_local(args.ranks, wire) for wire in ([args.wire] if args.wire else ["gloo", "shared"])]
        for report in reports:
            print(json.dumps(report)) if args.json else _print(report)
        return 1 if any(report["problems"] for report in reports) else 0
    return play("doctor.yml", args)


def _local(ranks: int, wire: str) -> dict[str, Any]:
    """Ranks as processes of this machine. Raises RanksError with the first one's words when the trial fails."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        leader = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [
        sys.executable,
        "-m",
        "tfglm.cli.main",
        "doctor",
        "--ranks",
        str(ranks),
        "--leader",
        leader,
        "--wire",
        wire,
    ]
    processes = [
        subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=_LOCAL_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise RanksError(f"the ranks did not finish their trial over {wire} within {_LOCAL_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, err)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode not in (0, 1) or not outputs[0][0]:
            last = err.strip().rpartition("\n")[2] or f"code {process.returncode}"
            raise RanksError(f"rank {rank} failed over {wire}: {last}")
    report: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return report


def _local_part(args: argparse.Namespace) -> dict[str, Any]:
    host, _, port = args.leader.rpartition(":")
    return _trial(args.rank, args.ranks, (host, int(port)), args.wire, host, None)


def _in_container(args: argparse.Namespace) -> int:
    """With runtime docker, torch is in the image and not on the node."""
    from tfglm.supervisor.cluster import read_cluster, read_node
    from tfglm.supervisor.fabric import engine_environment, resolve
    from tfglm.supervisor.runtime import Runtime

    cluster = read_cluster(args.config)
    node = read_node(cluster, args.config)
    network = engine_environment(node, resolve(node), len(cluster.ranks))
    words = [*(["--json"] if args.json else []), *(["--wire", args.wire] if args.wire else [])]
    argv = [*Runtime(cluster, node).trial(args.config.resolve(), network), *words]
    return subprocess.run(argv, timeout=2 * _LOCAL_S, check=False).returncode


def _cluster_part(args: argparse.Namespace) -> dict[str, Any] | None:
    """None when it must run in a container, and this is none."""
    from tfglm.supervisor.child import MARK
    from tfglm.supervisor.cluster import read_cluster, read_node
    from tfglm.supervisor.fabric import engine_environment, missing, resolve

    cluster = read_cluster(args.config)
    node = read_node(cluster, args.config)
    if node.rank != args.rank:
        raise ConfigError(f"--rank is {args.rank}; {args.config / 'rank.json'} says that this node is rank {node.rank}")
    if cluster.runtime == "docker" and MARK not in os.environ:
        return None
    control = cluster.ranks[node.rank].control
    lacks = missing(node, control)
    if lacks:
        raise RanksError(f"rank {node.rank} lacks {lacks}")
    os.environ.update(engine_environment(node, resolve(node), len(cluster.ranks)))
    from tfglm.ranks.wires import chosen_wire

    wire = args.wire or chosen_wire(cluster.tfglm_settings(), one_machine=False)
    leader = (cluster.ranks[0].control, cluster.ports.doctor)
    return _trial(node.rank, len(cluster.ranks), leader, wire, control, (cluster, node))


def _trial(
    rank: int, ranks: int, leader: tuple[str, int], wire_name: str, host: str, service: tuple[Cluster, Node] | None
) -> dict[str, Any]:
    """One rank's part. Every rank gets the figures of all."""
    import torch

    from tfglm.ranks.bootstrap import join, lead, listen
    from tfglm.ranks.trial import try_wire
    from tfglm.ranks.wires import open_wire

    torch.set_num_threads(1)
    device = "cuda" if wire_name == "nccl" else "cpu"
    facts = {"trial": wire_name}
    if rank == 0:
        control = lead(listen(leader), ranks, facts, limit_s=_MEET_S)
    else:
        control = join(leader, rank, ranks, facts, limit_s=_MEET_S, source=host)
    try:
        wire = open_wire(wire_name, control, host=host, limit_s=60.0)
        gathered = try_wire(wire, device)
        report: dict[str, Any] = {"wire": wire_name, "ranks": ranks, "device": device}
        report["gathers"] = [
            {"bytes": g.bytes, "us": round(g.seconds * 1e6, 1), "gbit_s": round(g.gbit_s(ranks), 3)} for g in gathered
        ]
        report["rails"] = _rails(wire, device, service) if service else []
        report["problems"], report["warnings"] = judge(report)
        wire.close()
        return report
    finally:
        control.close()


def _rails(wire: Wire, device: str, service: tuple[Cluster, Node]) -> list[dict[str, Any]]:
    """Both directions of every rail, gathered from all ranks."""
    import torch

    from tfglm.supervisor.fabric import traffic
    from tfglm.supervisor.rails import measure

    cluster, node = service
    words = 1024

    def exchange(numbers: Sequence[int]) -> list[list[int]]:
        rows: list[list[int]] = wire.gather(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()
        return rows

    own = []
    for rail, carried in zip(node.rails, measure(cluster, node, exchange), strict=True):
        facts = {"sender": carried.sender, "receiver": carried.receiver, "interface": carried.interface}
        facts |= {"gbit_s": round(carried.gbit_s, 2), "speed_gbit_s": traffic(rail).mbit / 1000}
        own.append(facts | {"problem": carried.problem[:120]})
    text = json.dumps(own).encode()[: words * 8].ljust(words * 8)
    numbers = torch.frombuffer(bytearray(text), dtype=torch.int64).to(device)
    return [
        rail for row in wire.gather(numbers).cpu() for rail in json.loads(bytes(row.numpy().tobytes()).decode().strip())
    ]


def _gather_limit(report: dict[str, Any], gather: dict[str, Any]) -> float | None:
    """Microseconds that a gather may take; None where nothing is expected of its size."""
    limit = EXPECTED_S[report["wire"]].get(gather["bytes"])
    return None if limit is None else limit * 1e6


def _rail_limits(report: dict[str, Any], rail: dict[str, Any]) -> tuple[float, float]:
    """Gbit/s that a rail should carry by its own speed, and beside the fastest one."""
    return RAIL_SHARE * rail["speed_gbit_s"], max(one["gbit_s"] for one in report["rails"]) / 2


def judge(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is broken, and what is slower than it should be."""
    problems = [
        f"rank {rail['sender']} to rank {rail['receiver']} over {rail['interface']}: {rail['problem']}"
        for rail in report["rails"]
        if rail["problem"]
    ]
    warnings = []
    for gather in report["gathers"]:
        limit = _gather_limit(report, gather)
        if limit is not None and gather["us"] > limit:
            warnings.append(f"a gather of {gather['bytes']} bytes takes {gather['us']:.0f} us, expected {limit:.0f}")
    for rail in report["rails"]:
        by_speed, beside_fastest = _rail_limits(report, rail)
        what = f"rank {rail['sender']} to rank {rail['receiver']} over {rail['interface']}: {rail['gbit_s']} Gbit/s"
        if not rail["problem"] and rail["gbit_s"] < by_speed:
            warnings.append(
                f"{what} of {rail['speed_gbit_s']:g} by TCP; power off both ends and unplug them for a minute"
            )
        elif not rail["problem"] and rail["gbit_s"] < beside_fastest:
            warnings.append(f"{what}, less than half of the fastest rail's {2 * beside_fastest:g}")
    return problems, warnings


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{report['ranks']} ranks over {report['wire']}, every value right"
    table = Table("gather of", "median", "expected", "received", title=title)
    for gather in report["gathers"]:
        limit = _gather_limit(report, gather)
        expected = "" if limit is None else f"below {limit:.0f} us"
        received = f"{gather['gbit_s']:.2f} Gbit/s"
        table.add_row(f"{gather['bytes'] // 1024} KiB", f"{gather['us']:.0f} us", expected, received)
    console.print(table)
    if report["rails"]:
        rails = Table("rail", "one TCP stream", "expected", "port")
        for rail in report["rails"]:
            name = f"rank {rail['sender']} to {rail['receiver']}, {rail['interface']}"
            speed = f"{rail['speed_gbit_s']:g} Gbit/s" if rail["speed_gbit_s"] else "unknown"
            least = max(_rail_limits(report, rail))
            rails.add_row(name, rail["problem"] or f"{rail['gbit_s']:.2f} Gbit/s", f"above {least:.2f}", speed)
        console.print(rails)
    for line in report["problems"]:
        console.print(f"E_FABRIC: {line}", style="red", highlight=False, soft_wrap=True)
    for line in report["warnings"]:
        console.print(f"W_FABRIC: {line}", style="yellow", highlight=False, soft_wrap=True)
