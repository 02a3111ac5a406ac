"""What up, down, logs, plan --cluster, status and doctor share: arguments, and a playbook's progress on a terminal."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tfglm.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.status import Status

    from tfglm.supervisor.playbooks import Step, Summary


_INSTEAD = {
    "stop.yml": "on that machine itself `sudo systemctl stop 'tfglm@*' tfglm.target` stops its rank",
    "status.yml": "on any machine of the cluster `tfglm status` says how every rank is",
    "logs.yml": "on that machine itself `journalctl -u 'tfglm@*'` has its rank's log",
}
"""What does the same as a playbook where ssh does not."""
_CODED = re.compile("(E_[A-Z]+): (.*)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i", "--inventory", type=Path, metavar="FILE", help="inventory of the cluster (default inventory.ini)"
    )
    parser.add_argument("--playbooks", type=Path, metavar="DIR", help="folder of the playbooks (default ./playbooks)")
    parser.add_argument(
        "--ansible", default="", metavar="ARGS", help="more arguments for ansible-playbook, as one word"
    )


def play(playbook: str, args: argparse.Namespace, arguments: str = "") -> int:
    """Run a playbook with live progress and a summary. Raises WorkerError with the first failure and its
    code, ConfigError where there is nothing to run on."""
    from rich.console import Console

    from tfglm.supervisor.playbooks import find_inventory, find_playbooks, run_playbook

    try:
        shlex.split(args.ansible)
    except ValueError as error:
        raise ConfigError(f"--ansible is {args.ansible!r}: {str(error).lower()}") from None
    folder = find_playbooks(args.playbooks)
    inventory = find_inventory(args.inventory, folder)
    console = Console(highlight=False)
    with console.status(playbook) as status:
        view = View(console, status)
        summary = run_playbook(playbook, folder, inventory, f"{arguments} {args.ansible}".strip(), view.show)
    if summary.counts or summary.code:
        summarise(console, summary)
    if summary.cancelled:
        return 130
    away = [step for step in summary.failures if step.kind == "unreachable"]
    if away:
        raise WorkerError(not_reached(playbook, away))
    if summary.failures:
        raise failure(playbook, summary.failures[0])
    if not summary.counts:
        # Ansible takes an inventory without the group, or with nothing it can read, for a job well done.
        raise ConfigError(
            f"{playbook} found no machine: {inventory} must list them in a group that [sparks:children] names, as "
            "inventory.example.ini does, or in the one that --ansible '-e tfglm_cluster=GROUP' chooses"
        )
    return summary.code


def failure(playbook: str, first: Step) -> WorkerError:
    """Where a playbook failed and why, under the code that the failed step gives."""
    coded = _CODED.fullmatch(first.says)
    where = f" on {first.host}" if first.host else ""
    error = WorkerError(f"{playbook} failed{where} at {first.text!r}: {coded[2] if coded else first.says}")
    if coded:
        error.code = coded[1]
    return error


def not_reached(playbook: str, away: Sequence[Step]) -> str:
    """Which machines Ansible could not talk to, in its connection's own words, and what to do about it."""
    who = "; ".join(f"{step.host}: {step.says.removesuffix('.')}" for step in sorted(away, key=lambda step: step.host))
    instead = f"; {_INSTEAD[playbook]}" if playbook in _INSTEAD else ""
    return (
        f"{playbook} did not reach {who}. `ssh USER@HOST true` must work from here without a question, with the "
        f"inventory's ansible_user and ansible_host{instead}"
    )


class View:
    """A line for every play, for everything that changed, failed or has something to say; the task that runs below them
    on a terminal. Into a file the same lines without the last."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._play = self._task = ""
        self._done: set[str] = set()

    def show(self, step: Step) -> None:
        from rich.markup import escape

        name = escape(step.text)
        if step.kind == "play":
            self._play = name
        elif step.kind == "task":
            # A play begins, too, when every machine is away: then nothing of it runs.
            if self._play:
                self._console.print(f"[bold]{self._play}[/bold]")
            self._play = ""
            self._task, self._done = name, set()
            self._status.update(name)
        elif step.kind in ("failed", "unreachable"):
            self._console.print(f"  [red]{escape(step.host)}: {step.kind}[/red]: {name}", soft_wrap=True)
            self._console.print(escape(step.says), soft_wrap=True)
        elif step.kind == "changed":
            self._console.print(f"  [yellow]{escape(step.host)}: changed[/yellow]: {name}")
        elif step.says:
            for line in step.says.splitlines():
                self._console.print(f"  {escape(step.host)}: {escape(line)}", soft_wrap=True)
        if step.host:
            self._done.add(step.host)
            self._status.update(f"{self._task} ({escape(', '.join(sorted(self._done)))} done)")


def summarise(console: Console, summary: Summary) -> None:
    """A line a host, and what the whole took."""
    for host, counts in sorted(summary.counts.items()):
        fine = not (counts.get("failed") or counts.get("unreachable"))
        figures = ", ".join(
            f"{kind} {counts[kind]}" for kind in ("ok", "changed", "failed", "unreachable") if counts.get(kind)
        )
        console.print(f"{host}: {figures or 'nothing to do'}", style="" if fine else "red")
    end = "was stopped" if summary.cancelled else "failed" if summary.code else "is done"
    console.print(f"{summary.playbook} {end} after {summary.seconds:.0f} s, changed: {summary.changed}")
