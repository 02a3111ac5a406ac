"""`tfglm status`: how every rank of the cluster is, as this node's supervisor sees it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfglm.cli.playbooks import add_arguments, play
from tfglm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

STALE_S = 10.0
"""A supervisor writes every two seconds; older than this, it hangs or is dead."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status",
        help="every rank: phase, memory, links, tokens a second",
        description="On a node of the cluster: what its supervisor knows of all ranks; exit code 1 unless all serve. "
        "From elsewhere, with --inventory or beside an inventory.ini: the same through Ansible.",
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="where supervisors write (default /run/tfglm)")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="the state as JSON")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.supervisor.state import STATE_DIR, read_states

    if args.inventory is not None:
        return play("status.yml", args)
    folder = args.state or STATE_DIR
    states = read_states(folder)
    if not states and args.state is None and Path("inventory.ini").exists():
        return play("status.yml", args)
    if not states:
        raise ConfigError(
            f"no rank runs here: {folder} holds no state. On a node of a cluster see systemctl status 'tfglm@*'; from "
            "elsewhere name the cluster with --inventory; tfglm serve PATH needs no cluster"
        )
    if args.json:
        print(json.dumps(merged(states), indent=1))
    elif args.watch:
        _watch(folder)
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(shown(merged(states)))
    return 0 if all(rank["phase"] == "serving" for rank in merged(read_states(folder) or states)["ranks"]) else 1


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest state of this node, in which each rank that runs here speaks for itself. `stale_s` is added to those
    that have not been written for long."""
    newest = max(states, key=lambda state: state.get("updated", 0.0))
    own = {}
    for state in states:
        facts = next((rank for rank in state["ranks"] if rank["rank"] == state["rank"]), None)
        if facts is not None:
            age = time.time() - state.get("updated", 0.0)
            stale = age > STALE_S and facts["phase"] != "gone"
            own[state["rank"]] = facts | ({"phase": "dead", "stale_s": round(age)} if stale else {})
    return newest | {"ranks": [own.get(rank["rank"], rank) for rank in newest["ranks"]]}


def shown(state: dict[str, Any]) -> RenderableType:
    """The table, and under it why a rank does not serve."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "rank", "node", "phase", "for", "start", "GiB free", "lowest", "tok/s", "links", title=state["cluster"]
    )
    reasons = []
    for rank in state["ranks"]:
        phase = rank["phase"]
        colour = {"serving": "green", "dead": "red", "gone": "red", "unknown": "red"}.get(phase, "yellow")
        table.add_row(
            str(rank["rank"]),
            escape(rank["name"]),
            f"[{colour}]{phase}[/{colour}]",
            _duration(time.time() - rank["since"]) if "since" in rank else "",
            str(rank.get("generation", "")),
            _figure(rank, "available_gib"),
            _figure(rank, "low_gib"),
            _figure(rank, "tok_s") if rank["rank"] == 0 else "",
            escape("\n".join(_link(*link) for link in rank.get("rails", ()))),
        )
        reasons += _reasons(rank)
    api = state["api"]
    lines = [escape(line) for line in reasons] or [f"the model is served at http://{api['host']}:{api['port']}/v1"]
    return Group(table, *lines)


def _reasons(rank: dict[str, Any]) -> list[str]:
    name = f"rank {rank['rank']} ({rank['name']})"
    if "stale_s" in rank:
        unit = f"tfglm@{rank['rank']}"
        return [f"{name}: its supervisor has written nothing for {rank['stale_s']} s; see systemctl status {unit}"]
    if rank["phase"] == "serving":
        return []
    code = f"{rank['code']}: " if rank.get("code") else ""
    return [f"{name}: {code}{rank['reason']}"] if rank.get("reason") else []


def _figure(rank: dict[str, Any], name: str) -> str:
    return f"{rank[name]:.1f}" if name in rank else ""


def _link(interface: str, received: float, sent: float, gbit: float) -> str:
    speed = f" of {gbit:g} Gbit/s" if gbit else ""
    return f"{interface} in {received * 8 / 1000:.2f} out {sent * 8 / 1000:.2f}{speed}"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {whole:02} s" if minutes else f"{whole} s"


def _watch(folder: Path) -> None:
    from rich.live import Live

    from tfglm.supervisor.state import read_states

    with Live(refresh_per_second=1) as live:
        while states := read_states(folder):
            live.update(shown(merged(states)))
            time.sleep(1.0)
