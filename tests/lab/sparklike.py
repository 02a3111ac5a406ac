"""What plan.yml says of machines that have what a Spark has, and a guest otherwise lacks."""

from __future__ import annotations

from typing import Any

from cluster import Lab
from operating import says

Figures = dict[str, Any]
TWINS = {
    "spark0": ("10.122.1.1", "10.122.3.1"),
    "spark1": ("10.122.5.2", "10.122.1.2"),
    "spark2": ("10.122.3.3", "10.122.5.3"),
}
"""Addresses that the second PCIe functions of port 0 and port 1 get: beside each cable's first subnet, its second."""


def like_a_spark(lab: Lab) -> Figures:
    """A GB10 that reports no memory and the PCIe twins of every port: plan.yml takes both, pairs the twins, and refuses
    a GPU that somebody else has and clocks that are stuck."""
    gb10 = ["--extra-vars", '{"tfglm_gpu": "gb10", "tfglm_venv_packages": []}']
    for guest in lab.guests:
        guest.sh("lab-twins")
    try:
        play = lab.playbooks.run("plan", *gb10)
        for index, (name, addresses) in enumerate(TWINS.items()):
            for port, address in enumerate(addresses):
                netdev = f"enP2p1s0f{port}np{port}"
                says(f"plan.yml of {name}", play.said, rf"\+ +{netdev}:.{{,80}}\+ +- {address}/24")
            says(f"plan.yml of {name}", play.said, rf"rank {index} on {name}: weights [\d.]+")
        lab.guests[1].sh("mkdir -p /run/lab-gpu; echo '4711, python3, [N/A]' >/run/lab-gpu/apps")
        lab.guests[2].sh("mkdir -p /run/lab-gpu; echo 507 >/run/lab-gpu/clock; echo 97 >/run/lab-gpu/busy")
        refused = lab.playbooks.run("plan", *gb10, fails=True)
        says("plan.yml", refused.said, r"E_MEMORY: spark1: process 4711 \(python3\) is on its GPU with memory unknown")
        says("plan.yml", refused.said, r"E_WORKER: spark2: its GPU is 97 % busy at 507 MHz .{,20}Clocks are stuck low")
    finally:
        for guest in lab.guests:
            guest.sh("rm -rf /run/lab-gpu; lab-twins down", check=False)
    lab.same_reply()
    return {"plan_s": play.seconds, "refused_s": refused.seconds}
