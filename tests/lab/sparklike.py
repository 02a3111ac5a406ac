"""Guests with what a Spark has and they otherwise lack, and what plan.yml says of them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster import Lab
from guest import Guest
from host import LabError
from operating import says

Figures = dict[str, Any]
TWINS = {
    "spark0": ("10.122.1.1", "10.122.3.1"),
    "spark1": ("10.122.5.2", "10.122.1.2"),
    "spark2": ("10.122.3.3", "10.122.5.3"),
}
"""Addresses that the second PCIe functions of port 0 and port 1 get: beside each cable's first subnet, its second."""
DAEMON = {"bridge": "none", "iptables": False, "ip6tables": False}
"""Ranks use the machine's own network, the plan of their memory none: the guests' kernel need not have bridges."""
VENV = "/opt/tfglm/venv"
DOCKER = {
    "tfglm_runtime": "docker",
    "tfglm_image_free_gib": 0,
    "tfglm_docker_volumes": [f"{VENV}:{VENV}:ro"],
}
CDI = "/etc/cdi/nvidia.yaml"
_REFUSED = (
    r"E_MEMORY: spark1: process 4711 \(python3\) is on its GPU with memory unknown",
    r"E_WORKER: spark2: its GPU is 97 % busy at 507 MHz .{,20}Clocks are stuck low",
)


def like_a_spark(lab: Lab) -> Figures:
    """plan.yml as it would be on Sparks, with a GB10 that reports no memory, docker, and both PCIe functions of every
    port: it pairs the twins and shows every rank's container. It refuses a GPU that somebody else has and clocks that
    are stuck."""
    gb10 = ["--extra-vars", json.dumps(DOCKER | {"tfglm_gpu": "gb10"})]
    dress(lab)
    for guest in lab.guests:
        guest.sh(f"mkdir -p /etc/cdi /run/lab-gpu; echo 'kind: nvidia.com/gpu' >{CDI}")
    try:
        play = lab.playbooks.run("plan", *gb10)
        for index, (name, addresses) in enumerate(TWINS.items()):
            for port, address in enumerate(addresses):
                netdev = f"enP2p1s0f{port}np{port}"
                says(f"plan.yml of {name}", play.said, rf"\+ +{netdev}:.{{,80}}\+ +- {address}/24")
            container = rf"docker run .{{,400}}--name tfglm-sparks-{index} .{{,900}}--device nvidia.com/gpu=all"
            says(f"plan.yml of {name}", play.said, container)
        lab.container_image = image_in(play.said)
        lab.guests[1].sh("echo '4711, python3, [N/A]' >/run/lab-gpu/apps")
        lab.guests[2].sh("echo 507 >/run/lab-gpu/clock; echo 97 >/run/lab-gpu/busy")
        refused = lab.playbooks.run("plan", *gb10, fails=True)
        says("plan.yml", refused.said, *_REFUSED)
    finally:
        for guest in lab.guests:
            guest.sh(f"rm -rf /run/lab-gpu {CDI}; lab-twins down", check=False)
    lab.same_reply()
    return {"plan_s": play.seconds, "refused_s": refused.seconds}


def dress(lab: Lab) -> None:
    """docker, the device files that a container gets where a rail has an RDMA device, and the twins, on every guest."""

    def one(guest: Guest) -> None:
        guest.sh("test -e /sys/class/net/enP2p1s0f0np0 || lab-twins")
        guest.sh("mkdir -p /dev/infiniband; mknod -m 666 /dev/infiniband/uverbs0 c 231 192", check=False)
        guest.write("/etc/docker/daemon.json", json.dumps(DAEMON))
        guest.sh("systemctl start docker", limit=180)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, lab.guests))


def image_in(said: str) -> str:
    """The image that plan.yml says the ranks will run."""
    named = re.search(r"docker run .{,2000} (tfglm:[0-9a-f]+) engine ", " ".join(said.split()))
    if named is None:
        raise LabError(f"plan.yml shows no container's command: {said[-1500:]}")
    return named[1]
