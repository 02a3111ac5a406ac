"""Playbooks run through ansible-runner: where they are, what happens while they run, and how they ended."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError

INSTALL = "`.venv/bin/pip install -e '.[provision]'` in tfglm's checkout brings it"
"""tfglm is on no package index, so that its name alone would bring nothing, or something else."""
_ENDS = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_on_skipped": "skipped",
}
_LONGEST_MESSAGE = 2000
_OF_LOOPS = ("All items completed", "One or more items failed", "no message")
"""What a loop says whose items say the rest."""

_BEFORE_SSH = re.compile(r"^.*?\b(?:via|over) ssh:\s*", re.DOTALL)
"""What Ansible puts before the words of ssh itself."""


@dataclass(frozen=True)
class Step:
    """One thing that happened. kind: play or task (something begins), or ok, changed, skipped, failed, unreachable.

    text: the name of the play or task; for a failure, and for what a playbook has to say, the message.
    """

    kind: str
    text: str
    host: str = ""
    says: str = ""


@dataclass
class Summary:
    """How a run ended. counts: by host, how many tasks were ok, changed, failed or unreachable."""

    playbook: str
    seconds: float = 0.0
    code: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[Step] = field(default_factory=list)
    cancelled: bool = False

    @property
    def changed(self) -> int:
        return sum(counts.get("changed", 0) for counts in self.counts.values())


def find_playbooks(given: Path | None) -> Path:
    """The folder of the playbooks: the one given, ./playbooks, or that of the checkout this program runs from.

    Raises ConfigError saying where it looked.
    """
    places = [given] if given else [Path("playbooks"), Path(__file__).resolve().parents[2] / "playbooks"]
    for place in places:
        if (place / "site.yml").is_file():
            return place.resolve()
    looked = " and ".join(str(place) for place in places)
    raise ConfigError(f"there is no site.yml in {looked}; name the folder of tfglm's playbooks with --playbooks")


def find_inventory(given: Path | None, playbooks: Path) -> Path:
    """The inventory: the one given, or inventory.ini in this folder or beside the playbooks. Raises ConfigError."""
    places = [given] if given else [Path("inventory.ini"), playbooks.parent / "inventory.ini"]
    for place in places:
        if place.exists():
            return place.resolve()
    raise ConfigError(
        f"{places[0]} does not exist; copy inventory.example.ini to inventory.ini and fill it in, or name one with "
        "--inventory"
    )


def run_playbook(
    playbook: str, playbooks: Path, inventory: Path, arguments: str, show: Callable[[Step], None]
) -> Summary:
    """Run one playbook and tell `show` every step, from this thread. Ctrl-C ends it in order, a second one at once.

    arguments: more of ansible-playbook's. Raises ConfigError when ansible-runner is not installed.
    """
    try:
        import ansible_runner
    except ImportError:
        raise ConfigError(f"this command runs Ansible, which is not installed here; {INSTALL}") from None
    steps = _Steps()
    cancel = threading.Event()
    summary = Summary(playbook)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tfglm-") as folder:
        thread, runner = ansible_runner.run_async(
            private_data_dir=folder,
            project_dir=str(playbooks),
            playbook=playbook,
            inventory=str(inventory),
            cmdline=arguments or None,
            # ansible-playbook lies beside this Python, in a virtual environment that nobody may have activated.
            envvars={
                "ANSIBLE_CONFIG": str(playbooks / "ansible.cfg"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            },
            quiet=True,
            event_handler=steps.put,
            cancel_callback=cancel.is_set,
        )
        while thread.is_alive() or steps.waiting:
            try:
                for step in steps.take():
                    _count(summary, step)
                    show(step)
                thread.join(0.1)
            except KeyboardInterrupt:
                if cancel.is_set():
                    raise
                cancel.set()
        summary.cancelled = cancel.is_set()
        summary.code = 130 if summary.cancelled else int(runner.rc or 0)
        if summary.code and not summary.failures and not summary.cancelled:
            summary.failures.append(Step("failed", "ansible-playbook", says=_last_words(runner)))
    summary.seconds = time.monotonic() - began
    return summary


class _Steps:
    """Events from ansible-runner's thread to ours."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[Step] = []

    @property
    def waiting(self) -> bool:
        with self._lock:
            return bool(self._steps)

    def put(self, event: Mapping[str, Any]) -> bool:
        step = step_of(event)
        if step is not None:
            with self._lock:
                self._steps.append(step)
        return False  # the event need not be stored

    def take(self) -> list[Step]:
        with self._lock:
            steps, self._steps = self._steps, []
        return steps


def step_of(event: Mapping[str, Any]) -> Step | None:
    """An event of ansible-runner as a step; None for those that say nothing to a user."""
    kind, data = event.get("event", ""), event.get("event_data") or {}
    if kind == "playbook_on_play_start":
        return Step("play", str(data.get("play", "")))
    if kind in ("playbook_on_task_start", "playbook_on_handler_task_start"):
        return Step("task", str(data.get("task", "")))
    if kind not in _ENDS:
        return None
    result = data.get("res") or {}
    end, says = _ENDS[kind], ""
    if end == "failed" and data.get("ignore_errors"):
        end = "ok"
    if end in ("failed", "unreachable"):
        says = _failure(result)
    if end == "unreachable":
        says = _BEFORE_SSH.sub("", says)
    elif end == "ok" and result.get("changed"):
        end = "changed"
    elif end == "ok" and str(data.get("task_action", "")).rpartition(".")[2] == "debug":
        says = _text(result.get("msg", ""))
    return Step(end, str(data.get("task", "")), str(data.get("host", "")), says)


def _failure(result: Mapping[str, Any]) -> str:
    """Why a task failed: its message, and what its command wrote last."""
    if refused := result.get("argument_errors"):
        return f"E_CONFIG: {'; '.join(map(str, refused))}"
    message = _text(result.get("msg", "")) or "no message"
    items = [item for item in result.get("results", ()) if isinstance(item, dict)]
    loop = [item for item in items if item.get("failed") or item.get("unreachable")]
    if loop and message in _OF_LOOPS:
        return _failure(loop[0])
    errors = str(result.get("stderr") or result.get("module_stderr") or "").strip()
    if errors and errors not in message:
        message = f"{message}: {errors[-_LONGEST_MESSAGE:]}"
    return message[:_LONGEST_MESSAGE]


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value).strip()


def _last_words(runner: Any) -> str:
    """What ansible-playbook printed before it ended without running anything."""
    try:
        text = runner.stdout.read()
    except (OSError, ValueError, AttributeError):
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-5:]) or "it ended without a word"


def _count(summary: Summary, step: Step) -> None:
    if step.host:
        counts = summary.counts.setdefault(step.host, {})
        counts[step.kind] = counts.get(step.kind, 0) + 1
    if step.kind in ("failed", "unreachable"):
        summary.failures.append(step)
