"""Three machines that Ansible can work on, out of one. Each has a network of its own, cables to the two others, and its
own /etc, /opt, /var/lib, /var/cache, /usr/local/bin and /srv; systemd, netplan and NFS are stand-ins. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from spark import write

ROOT = Path(__file__).resolve().parents[2]
COUNT = 3

SHELL = """#!/bin/bash
exec ip netns exec {netns} unshare --mount --propagation private /bin/bash -c '
root=$1; shift
for folder in etc opt var/lib var/cache usr/local/bin srv; do
    layers="lowerdir=/$folder,upperdir=$root/$folder,workdir=$root/work/$folder"
    mount -t overlay overlay -o "$layers" "/$folder" || exit 99
done
mount -t tmpfs cgroup /sys/fs/cgroup && touch /sys/fs/cgroup/cgroup.controllers || exit 99
mkdir -p /etc/netplan
export PATH={stubs}:$PATH
exec /bin/sh "$@"' shell {root} "$@"
"""

SYSTEMCTL = """#!/usr/bin/python3
import pathlib, sys
state = pathlib.Path("/var/lib/stub-systemd")
state.mkdir(parents=True, exist_ok=True)
with (state / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
verb, *units = [word for word in sys.argv[1:] if not word.startswith("-")]
for unit in units or [""]:
    on, enabled = state / f"{unit}.on", state / f"{unit}.enabled"
    if verb == "show":
        active = "active" if on.exists() else "inactive"
        print(f"Id={unit}\\nLoadState=loaded\\nActiveState={active}")
    elif verb == "is-enabled":
        print("enabled" if enabled.exists() else "disabled")
        sys.exit(not enabled.exists())
    elif verb in ("start", "restart"):
        on.touch()
    elif verb == "stop":
        on.unlink(missing_ok=True)
    elif verb == "enable":
        enabled.touch()
"""

NETPLAN = """#!{python}
import pathlib, subprocess, sys, yaml
for file in sorted(pathlib.Path("/etc/netplan").glob("*.yaml")) if sys.argv[1] == "apply" else ():
    for port, entry in yaml.safe_load(file.read_text())["network"]["ethernets"].items():
        subprocess.run(["ip", "link", "set", port, "mtu", str(entry["mtu"]), "up"], check=True)
        for address in entry["addresses"]:
            subprocess.run(["ip", "address", "replace", address, "dev", port], check=True)
"""


class NoNamespacesError(Exception):
    """This machine does not let its root make and join network namespaces."""


class FakeMachines:
    """Context manager. `play` runs a playbook of a copy of this project, so that nothing changes while it runs."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder, self.venv = folder, venv
        self.names = [f"spark{i}" for i in range(COUNT)]
        self.netns = [f"tfglm-play-{os.getpid()}-{i}" for i in range(COUNT)]
        self.switch = f"tfglm-play-{os.getpid()}-lan"
        self.project = folder / "project"

    def __enter__(self) -> FakeMachines:
        for name in ("playbooks", "roles", "tfglm", "patches"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.project / name, symlinks=True, ignore=ignore)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.project / name)
        stubs = self.folder / "stubs"
        write(stubs, "systemctl", SYSTEMCTL, 0o755)
        write(stubs, "netplan", NETPLAN.format(python=sys.executable), 0o755)
        for name in ("exportfs", "sysctl"):
            write(stubs, name, "#!/bin/sh\nexit 0\n", 0o755)
        for i, name in enumerate(self.names):
            root = self.root(name)
            for part in ("etc", "opt", "var/lib", "var/cache", "usr/local/bin", "srv"):
                (root / part).mkdir(parents=True)
                (root / "work" / part).mkdir(parents=True)
            write(self.folder, f"{name}.sh", SHELL.format(netns=self.netns[i], stubs=stubs, root=root), 0o755)
        try:
            self._wire()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NoNamespacesError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.netns, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def root(self, name: str) -> Path:
        """Where what a machine has written lies."""
        return self.folder / "machines" / name

    def run(self, name: str, command: str) -> subprocess.CompletedProcess[str]:
        shell = self.folder / f"{name}.sh"
        return subprocess.run([shell, "-c", command], capture_output=True, text=True, timeout=120)

    def written(self) -> list[str]:
        """Files that machines have and did not begin with."""
        roots = [self.root(name) for name in self.names]
        parts = ("etc", "opt", "var/cache", "usr", "srv")
        files = [path for root in roots for part in parts for path in (root / part).rglob("*") if path.is_file()]
        return sorted(
            str(path.relative_to(self.folder / "machines")) for path in files if "/srv/models/" not in str(path)
        )

    def _wire(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "name", "lan0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "lan0", "up")
        for i, name in enumerate(self.netns):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "lan", "type", "veth", "peer", "name", f"m{i}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"m{i}", "master", "lan0", "up")
            ip("-n", name, "address", "add", f"10.77.9.1{i}/24", "dev", "lan")
            ip("-n", name, "link", "set", "lan", "up")
            ip("-n", name, "route", "add", "default", "via", "10.77.9.1")
        for a, b in zip(self.netns, self.netns[1:] + self.netns[:1], strict=True):
            ip("-n", a, "link", "add", "p0", "type", "veth", "peer", "name", "p1", "netns", b)

    def play(self, playbook: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
        lines = ["[sparks]"]
        for i, name in enumerate(self.names):
            lines.append(f"{name} ansible_host=10.77.9.1{i} ansible_shell_executable={self.folder}/{name}.sh")
        chosen = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_async_dir": str(self.folder / "async"),
            "ansible_python_interpreter": "/usr/bin/python3",
            "tfglm_user": "root",
            "tfglm_arch": "any",
            "tfglm_gpu": "none",
            "tfglm_runtime": "venv",
            "tfglm_venv": str(self.venv),
            "tfglm_venv_packages": [],
            "tfglm_checkpoint": "/srv/models/tiny",
            "tfglm_packages": False,
            "tfglm_fabric_mode": "manage",
            "tfglm_netdevs": ["p0", "p1"],
            "tfglm_probe_s": 3,
            "tfglm_context": 256,
            "tfglm_port": 18999,
            "tfglm_start": False,
        } | variables
        lines += ["[sparks:vars]", *(f"{name}={value}" for name, value in chosen.items())]
        inventory = self.folder / "inventory.ini"
        inventory.write_text("\n".join(lines) + "\n")
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), f"{playbook}.yml"]
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
        return subprocess.run(
            [*command, *arguments],
            cwd=self.project / "playbooks",
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
        )

    def document(self, name: str, file: str) -> dict[str, object]:
        return dict(json.loads((self.root(name) / "etc/tfglm" / file).read_text()))
