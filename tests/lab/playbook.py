"""Ansible, from outside the guests, with an inventory as somebody would write it for three Sparks."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from guest import KEY, Guest
from host import MASTERS, ROOT, LabError, run

MODELS = "/srv/models"
CHECKPOINT = f"{MODELS}/tiny"
PORTS = ("enp1s0f0np0", "enp1s0f1np1")
VARIABLES: dict[str, object] = {
    "ansible_user": "spark",
    "ansible_become": True,
    "ansible_python_interpreter": "/usr/bin/python3",
    "ansible_ssh_private_key_file": str(KEY),
    "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
    # What a fake Spark lacks: the processor, the GPU, docker's images, much memory.
    "tfglm_arch": "x86_64",
    "tfglm_gpu": "none",
    "tfglm_runtime": "venv",
    "tfglm_fabric_mode": "manage",
    "tfglm_links": [
        {"a": f"spark{a}", "a_port": PORTS[0], "b": f"spark{b}", "b_port": PORTS[1]}
        for a, b in ((0, 1), (1, 2), (2, 0))
    ],
    "tfglm_packages": False,
    "tfglm_pip_args": "--no-index",
    "tfglm_checkpoint": CHECKPOINT,
    "tfglm_smoke_expect": "",
    "tfglm_smoke_tokens": 12,
    # Drafts are timed when an engine starts, and their time is minutes over sockets of these kernels.
    "tfglm_drafter": "none",
    "tfglm_copy": 0,
    "tfglm_context": 512,
    "tfglm_kept_gib": 0,
    "tfglm_overhead_gib": 0.5,
    "tfglm_floor_gib": 0.3,
    "tfglm_guard_gib": 0.15,
    "tfglm_host": "0.0.0.0",
    "tfglm_wait_s": 900,
    # Faults come quicker than in a cluster's life: a start that served for a moment does not count as failed.
    "tfglm_limits": {"stable": 3.0, "backoff": 2.0},
}
PLAIN = {
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_TIMEOUT": "90",
    "ANSIBLE_SSH_CONTROL_PATH_DIR": str(MASTERS),
    "COLUMNS": "200",
}
_RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Play:
    """What a playbook did: seconds, tasks that changed something by guest, everything it printed."""

    seconds: float
    changed: Mapping[str, int]
    said: str


class Playbooks:
    def __init__(self, guests: list[Guest], folder: Path) -> None:
        self._inventory, self._logs, self._count = folder / "inventory.ini", folder, 0
        hosts = "\n".join(f"{guest.name} ansible_host={guest.address}" for guest in guests)
        variables = "\n".join(f"{name}={value!r}" for name, value in VARIABLES.items())
        self._inventory.write_text(f"[sparks]\n{hosts}\n\n[sparks:vars]\n{variables}\n")

    def run(self, name: str, *arguments: str, limit: float = 1500, fails: bool = False) -> Play:
        """Run a playbook. fails: it has to refuse, and LabError is for one that does not."""
        began = time.monotonic()
        command: list[str | Path] = [
            "ansible-playbook",
            "-i",
            self._inventory,
            ROOT / "playbooks" / f"{name}.yml",
            *arguments,
        ]
        settings = PLAIN | {"ANSIBLE_CONFIG": str(ROOT / "playbooks/ansible.cfg")}
        log = self._log(name)
        said = run(command, limit, env=settings, check=False, log=log)
        recap = _RECAP.findall(said)
        failed = not recap or any(int(host[3]) + int(host[4]) for host in recap)
        if failed != fails:
            wanted = "refused nothing" if fails else "failed"
            raise LabError(f"{name}.yml {wanted}; {log} has all of it:\n{said[-3000:]}")
        return Play(round(time.monotonic() - began, 1), {host[0]: int(host[2]) for host in recap}, said)

    def tfglm(self, *words: str, limit: float = 900) -> str:
        """What a command of tfglm says that runs a playbook by ansible-runner. Raises LabError unless it ends well."""
        python = Path(shutil.which("ansible-playbook") or "").with_name("python")
        command = [python, "-m", "tfglm.cli.main", *words, "--inventory", self._inventory]
        return run(command, limit, env=PLAIN | {"PYTHONPATH": str(ROOT)}, log=self._log(f"tfglm-{words[0]}"))

    def _log(self, name: str) -> Path:
        self._count += 1
        return self._logs / f"play{self._count:02}-{name}.log"
