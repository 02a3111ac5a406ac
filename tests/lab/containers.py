"""The ranks in containers, on the guests' own docker. The image is made of a guest's root tree, since nothing can be
pulled here; PyTorch is a volume, so that gigabytes need not be packed, sent and unpacked by these kernels."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from cluster import DEAD_S, SLOW_S, Lab
from guest import Guest
from host import LabError
from playbook import CHECKPOINT, MODELS
from sparklike import DOCKER, VENV, dress, image_in

Figures = dict[str, Any]
TREE = (
    "bin lib lib64 etc/ld.so.cache etc/passwd etc/group usr/bin/python3* usr/lib/python3* usr/lib64 "
    "usr/lib/x86_64-linux-gnu"
)
COMMAND = """#!{venv}/bin/python
import sys
sys.path.insert(0, "{source}")
from tfglm.cli.main import entry
entry()
"""
OURS = "--filter label=tfglm.cluster=sparks"


def docker(lab: Lab) -> Figures:
    """site.yml with tfglm_runtime=docker, and both PCIe twins of every port: the same reply out of containers, over
    two rails a cable. They end with stop.yml and are reaped after a killed supervisor; those of others stay."""
    figures: Figures = {}
    variables = ["--extra-vars", json.dumps(DOCKER)]
    dress(lab)
    image = lab.container_image or image_in(lab.playbooks.run("plan", *variables).said)
    began = time.monotonic()
    _make(lab.guests[0], image)
    figures["image_s"] = round(time.monotonic() - began, 1)
    play = lab.playbooks.run("site", *variables, limit=2400)
    figures |= {"site_s": play.seconds, "changed": dict(play.changed)}
    lab.same_reply()
    rails = [len(lab.state(guest)["rails"]) for guest in lab.guests]
    if rails != [4, 4, 4]:
        raise LabError(f"the ranks have {rails} rails; two cables of two twins each make 4")
    ids = {guest.name: _container(guest) for guest in lab.guests}
    strangers = [_stranger(guest, image) for guest in lab.guests]
    figures |= _stopped_and_started(lab) | _killed(lab) | _orphaned(lab)
    for guest, stranger in zip(lab.guests, strangers, strict=True):
        if stranger not in guest.sh("docker ps --quiet --no-trunc"):
            raise LabError(f"{guest.name}: the container of somebody else is gone")
        if ids[guest.name] in guest.sh("docker ps --all --quiet --no-trunc"):
            raise LabError(f"{guest.name}: the first container is still there")
        guest.sh(f"docker rm --force {stranger}")
    return figures


def _make(head: Guest, image: str) -> None:
    """The image that plan.yml has named, of the head's own files and tfglm as it is installed there."""
    if image in head.sh("docker images --format '{{.Repository}}:{{.Tag}}'"):
        return
    source = re.findall(r'"(/opt/tfglm/src/\w+)"', head.sh("cat /opt/tfglm/bin/tfglm"))[0]
    folder = "/var/tmp/image"
    head.sh(f"rm -rf {folder}; mkdir -p {folder}/usr/local/bin {folder}/tmp {folder}/cache; chmod 1777 {folder}/tmp")
    head.write(f"{folder}/usr/local/bin/tfglm", COMMAND.format(venv=VENV, source=source))
    changes = [
        'ENTRYPOINT ["tfglm"]',
        "ENV PATH=/usr/local/bin:/usr/bin:/bin XDG_CACHE_HOME=/cache HF_HUB_OFFLINE=1 MALLOC_ARENA_MAX=4",
        f"LABEL tfglm.hash={image.partition(':')[2]} tfglm.base=lab",
    ]
    options = " ".join(f"--change '{change}'" for change in changes)
    tree = f"cd / && tar -c {TREE} usr/bin/sleep {source.lstrip('/')} -C {folder} usr/local tmp cache"
    head.sh(f"chmod 755 {folder}/usr/local/bin/tfglm; ({tree}) | docker import {options} - {image}", limit=400)
    head.sh(f"rm -r {folder}")


def _container(guest: Guest) -> str:
    """The one container of the guest's rank, with what the service must have given it."""
    found = guest.sh(f"docker ps --quiet --no-trunc {OURS} --filter label=tfglm.rank={guest.index}").split()
    if len(found) != 1:
        raise LabError(f"{guest.name} runs {len(found)} containers of its rank")
    facts = json.loads(guest.sh(f"docker inspect {found[0]}"))[0]
    fixed = [mount["Destination"] for mount in facts["Mounts"] if not mount["RW"]]
    wanted = {
        "name": facts["Name"] == f"/tfglm-sparks-{guest.index}",
        "network": facts["HostConfig"]["NetworkMode"] == "host",
        "read-only checkpoint": (MODELS if guest.index else CHECKPOINT) in fixed,  # rank 0 has it on its own disk
        "devices": any(device["PathOnHost"] == "/dev/infiniband" for device in facts["HostConfig"]["Devices"]),
        "user": facts["Config"]["User"] == guest.sh("echo $(id -u spark):$(id -g spark)").strip(),
    }
    wrong = [name for name, right in wanted.items() if not right]
    if wrong:
        raise LabError(f"{guest.name}: the container lacks its {', '.join(wrong)}: {facts['HostConfig']}")
    return found[0]


def _stranger(guest: Guest, image: str) -> str:
    """A container of somebody else, even with a label of another cluster's rank."""
    labels = f"--label tfglm.cluster=others --label tfglm.rank={guest.index}"
    return guest.sh(f"docker run --detach --network none {labels} --entrypoint sleep {image} 7200", limit=120).strip()


def _stopped_and_started(lab: Lab) -> Figures:
    figures = {"down_s": lab.playbooks.run("stop").seconds}
    for guest in lab.guests:
        left = guest.sh(f"docker ps --all --quiet {OURS}").strip()
        if left:
            raise LabError(f"{guest.name} still has container {left}")
    figures["up_s"] = lab.playbooks.run("start").seconds
    lab.same_reply()
    return figures


def _killed(lab: Lab) -> Figures:
    """SIGKILL to the container of rank 1, as the kernel does when memory is short."""
    since = time.time()
    lab.guests[1].sh(f"docker kill {_container(lab.guests[1])}")
    return {"container_killed": lab.over(since, lab.guests, 2 * DEAD_S + 2 * SLOW_S) | lab.recover(since)}


def _orphaned(lab: Lab) -> Figures:
    """SIGKILL to rank 2's supervisor, with nothing to clean up after it, while its container hangs: that lives on, and
    the next supervisor removes it before it starts another."""
    guest = lab.guests[2]
    old = _container(guest)
    unit = f"tfglm@{guest.index}"
    folder = f"/run/systemd/system/{unit}.service.d"
    guest.sh(f"mkdir -p {folder}; printf '[Service]\\nExecStopPost=\\nRestartSec=20\\n' >{folder}/lab.conf")
    guest.sh("systemctl daemon-reload")
    since = time.time()
    try:
        guest.sh(f"docker pause {old}; systemctl kill --kill-whom=main --signal=SIGKILL {unit}")
        orphan = guest.sh(f"sleep 5; docker ps --quiet --no-trunc {OURS}").strip()
        if orphan != old:
            raise LabError(
                f"container {old} did not outlive its supervisor, so that nothing was left to reap: {orphan!r}"
            )
        figures = lab.over(since, lab.guests[:2], 2 * DEAD_S + 2 * SLOW_S) | lab.recover(since)
    finally:
        guest.sh(f"rm -r {folder}; systemctl daemon-reload")
    if _container(guest) == old:
        raise LabError("the container of the killed supervisor serves on")
    return {"supervisor_killed": figures}
