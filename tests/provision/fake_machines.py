"""Three machines that Ansible can work on, out of one. Each has a network of its own, cables to the two others, and its
own /etc, /opt, /srv, /run and more; systemd, netplan, NFS and docker are stand-ins. Needs root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark import SMI, write

ROOT = Path(__file__).resolve().parents[2]
COUNT = 3
OWN = ("etc", "opt", "var/lib", "var/cache", "usr/local/bin", "srv", "run")
"""What each machine has of its own, over this machine's."""

SHELL = """#!/bin/bash
exec ip netns exec {netns} unshare --mount --propagation private /bin/bash -c '
root=$1; shift
for folder in {own}; do
    layers="lowerdir=/$folder,upperdir=$root/$folder,workdir=$root/work/$folder"
    mount -t overlay overlay -o "$layers" "/$folder" || exit 99
done
mount -t tmpfs cgroup /sys/fs/cgroup && touch /sys/fs/cgroup/cgroup.controllers || exit 99
mkdir -p /etc/netplan
# What runs has a control group, and what is mounted on demand is mounted; of the head it has the images alone.
for unit in /var/lib/stub-systemd/tfglm@*.service.on; do
    [ -e "$unit" ] && name=${{unit##*/}} && mkdir -p "/sys/fs/cgroup/system.slice/${{name%.on}}"
done
if [ -e /var/lib/stub-systemd/srv-models.automount.on ]; then
    mount --bind /srv/models /srv/models
    images={head}/srv/models/.tfglm
    [ -d $images ] && mkdir -p /srv/models/.tfglm && mount --bind $images /srv/models/.tfglm
fi
export PATH={stubs}:$PATH
exec /bin/sh "$@"' shell {root} "$@"
"""

SYSTEMCTL = """#!/usr/bin/python3
import pathlib, sys, time
state = pathlib.Path("/var/lib/stub-systemd")
state.mkdir(parents=True, exist_ok=True)
with (state / "log").open("a") as log:
    log.write(f"{time.monotonic_ns()} " + " ".join(sys.argv[1:]) + "\\n")
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

JOURNALCTL = """#!/bin/sh
echo "asked with $*"
case "$*" in *--unit=*) cat /var/lib/stub-systemd/log;; esac
"""

DOCKER = """#!/usr/bin/python3
# Images are JSON files. What a container would do, tfglm does outside of one; kernels alone are not compiled.
import hashlib, json, os, pathlib, re, sys
state = pathlib.Path("/var/lib/stub-docker")
state.mkdir(parents=True, exist_ok=True)
verb, *words = sys.argv[1:]
with (state / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
flags = dict((w.split("=", 1) + [""])[:2] for w in words if w.startswith("--"))
plain = [w for w in words if not w.startswith("--")]

def local(ref):
    return state / (ref.replace("/", "_") + ".json")

def shared(ref):
    return pathlib.Path("{registry}") / local(ref).name

def have(ref):
    if not local(ref).exists():
        sys.exit(f"Error response from daemon: No such image: {{ref}}")
    return json.loads(local(ref).read_text())

def image(layers, labels, digests=()):
    config = dict(Env=[], Entrypoint=["tfglm"], Cmd=None, WorkingDir="/", Labels=labels)
    return json.dumps(dict(Config=config, RootFS=dict(Layers=layers), RepoDigests=list(digests)))

if verb == "info":
    print(json.dumps(dict(ServerVersion="29.2.1", CgroupVersion="2", Runtimes=dict(runc=dict()))))
elif verb == "image":
    found = have(plain[-1])
    label = re.search('Labels "(.*?)"', " ".join(words))
    print(found["Config"]["Labels"].get(label[1], "") if label else json.dumps([found]))
elif verb == "pull":
    ref = plain[0]
    registry = shared(ref)
    if ref.startswith("nvcr.io/"):
        local(ref).write_text(image([ref], dict(), [ref]))
    elif registry.exists():
        local(ref).write_text(registry.read_text())
    else:
        sys.exit(f"Error response from daemon: {{ref}} not found")
elif verb == "build":
    folder = pathlib.Path(plain[-1])
    dockerfile = (folder / "Dockerfile").read_text()
    base = have(re.search("^FROM (.*)$", dockerfile, re.MULTILINE)[1])
    parts = [(folder / name).read_bytes() for name in ("Dockerfile", "tfglm.tar.gz", "apply-series.sh")]
    labels = dict(w.split("=", 2)[1:] for w in words if w.startswith("--label="))
    layers = [*base["RootFS"]["Layers"], *(hashlib.sha256(part).hexdigest() for part in parts)]
    local(flags["--tag"]).write_text(image(layers, labels))
elif verb == "push":
    shared(plain[0]).write_text(json.dumps(have(plain[0])))
elif verb == "save":
    pathlib.Path(plain[0]).write_text(json.dumps(dict(ref=plain[1], image=have(plain[1]))))
elif verb == "load":
    saved = json.loads(pathlib.Path(plain[0]).read_text())
    local(saved["ref"]).write_text(json.dumps(saved["image"]))
elif verb == "run":
    at = next(i for i, w in enumerate(words) if local(w).exists())
    command = words[at + 1 :]
    given = [w for i, w in enumerate(words[:at]) if i and words[i - 1] == "--env"]
    given += [w.partition("=")[2] for w in words[:at] if w.startswith("--env=")]
    os.environ.update(dict(w.split("=", 1) for w in given if "=" in w))
    mounts = dict(w.split("=", 1)[1].split(":")[:2][::-1] for w in words[:at] if w.startswith("--volume="))
    if command[0] == "kernels":
        pathlib.Path(mounts["/cache"], "tfglm/kernels").mkdir(parents=True, exist_ok=True)
    else:
        os.environ["PYTHONPATH"] = "{project}"
        os.execv("{venv}/bin/python", ["python", "-c", "from tfglm.cli.main import entry; entry()", *command])
"""

API = """
import http.server, json, pathlib, sys
class Model(http.server.BaseHTTPRequestHandler):
    def say(self, facts):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(facts).encode())
    def do_GET(self):
        self.say({"status": "ok"} if self.path == "/health" else {"data": [{"id": "tiny"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "tiny" and asked["messages"][0]["content"], asked
        self.say({"choices": [{"message": {"content": sys.argv[1]}}]})
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", 18999), Model).serve_forever()
"""
"""Stands in for rank 0's API; its first argument is the answer to every question."""

NETPLAN = """#!{python}
import pathlib, subprocess, sys, yaml
for file in sorted(pathlib.Path("/etc/netplan").glob("*.yaml")) if sys.argv[1] == "apply" else ():
    for port, entry in yaml.safe_load(file.read_text())["network"]["ethernets"].items():
        subprocess.run(["ip", "link", "set", port, "mtu", str(entry["mtu"]), "up"], check=True)
        for address in entry["addresses"]:
            subprocess.run(["ip", "address", "replace", address, "dev", port], check=True)
"""


HUB = """
import http.server, json
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        gated = "/org/gated" in self.path
        known = {"secret": 401, "away": 500}
        code = next((code for name, code in known.items() if f"/org/{name}" in self.path), 200)
        code = 403 if gated and "/resolve/" in self.path else code
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"siblings": [{"rfilename": "x", "size": 2**60, "blobId": "0"}]}).encode())
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", 8099), Hub).serve_forever()
"""
"""Stands in for the Hub: repositories by what it answers for them."""


needs_ansible = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        "TFGLM_TEST_VENV" not in os.environ or importlib.util.find_spec("ansible") is None,
        reason="plays take minutes and need Ansible: make provision-check runs them",
    ),
]


def recap(output: str) -> dict[str, tuple[int, int]]:
    """(changed, failed) by machine."""
    found = re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+)", output, re.MULTILINE)
    return {name: (int(changed), int(failed)) for name, changed, failed in found}


def task(output: str, name: str) -> str:
    """What one task said."""
    return output.partition(f"{name}] *")[2].partition("\nTASK")[0]


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
        write(stubs, "journalctl", JOURNALCTL, 0o755)
        places = {"registry": self.folder / "registry", "project": self.project, "venv": self.venv}
        places["registry"].mkdir()
        write(stubs, "docker", DOCKER.format(**places), 0o755)
        said = {"apps": "", "driver": "580.95.05", "capability": "12.1", "clocks": "2418, 3003, [N/A], 41, 0"}
        write(stubs, "nvidia-smi", SMI.format(**said), 0o755)
        for name in ("exportfs", "sysctl"):
            write(stubs, name, "#!/bin/sh\nexit 0\n", 0o755)
        for i, name in enumerate(self.names):
            root = self.root(name)
            for part in OWN:
                (root / part).mkdir(parents=True)
                (root / "work" / part).mkdir(parents=True)
            facts = {"netns": self.netns[i], "stubs": stubs, "root": root, "head": self.root(self.names[0])}
            write(self.folder, f"{name}.sh", SHELL.format(own=" ".join(OWN), **facts), 0o755)
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

    @contextlib.contextmanager
    def serving(self, answer: str) -> Iterator[None]:
        """While it lasts, spark0 has an API whose model gives this answer."""
        command = ["ip", "netns", "exec", self.netns[0], sys.executable, "-c", API, answer]
        with subprocess.Popen(command) as api:
            try:
                yield
            finally:
                api.kill()

    def forget(self) -> None:
        """What systemd was asked from now on is in `asked` alone."""
        for name in self.names:
            (self.root(name) / "var/lib/stub-systemd/log").unlink(missing_ok=True)

    def asked(self, verb: str) -> list[tuple[str, str]]:
        """(machine, rank's unit) of every `systemctl VERB` since `forget`, in the order of time."""
        found = []
        for name in self.names:
            log = self.root(name) / "var/lib/stub-systemd/log"
            for line in log.read_text().splitlines() if log.exists() else ():
                when, *words = line.split()
                units = [word for word in words if word.startswith("tfglm@")]
                if verb in words and units:
                    found.append((int(when), name, units[0]))
        return [(name, unit) for _, name, unit in sorted(found)]

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
