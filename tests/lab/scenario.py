"""What the lab does, step by step. A step raises LabError unless it ends as it must."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wiring
from cluster import Lab
from containers import docker
from faults import FAULTS
from host import LabError, run
from image import image
from operating import operate, says
from playbook import CHECKPOINT, MODELS
from sparklike import like_a_spark

Figures = dict[str, Any]


def boot(lab: Lab) -> Figures:
    """Three guests to ssh."""
    lab.image.unlink(missing_ok=True)
    lab.image.symlink_to(image())
    wiring.up()
    began = time.monotonic()
    for guest in lab.guests:
        (guest.folder / "disk").unlink(missing_ok=True)
        guest.start()
    for guest in lab.guests:
        guest.wait()
    return {"to_ssh_s": round(time.monotonic() - began, 1)}


def site(lab: Lab) -> Figures:
    """From bare machines to a served model, the checkpoint lying on the head."""
    tiny = lab.folder / "tiny"
    if not tiny.exists():
        run([Path(sys.executable).with_name("tfglm"), "synth", tiny, "--preset", "tiny"], 300)
    archive = shutil.make_archive(str(lab.folder / "tiny"), "tar", lab.folder, "tiny")
    head = lab.guests[0]
    head.upload(Path(archive), "/tmp/tiny.tar")
    unpack = f"tar -C {MODELS} --no-same-owner -xf /tmp/tiny.tar && chown -R spark {CHECKPOINT}"
    head.sh(f"install -d -o spark {MODELS} && {unpack} && rm /tmp/tiny.tar")
    play = lab.playbooks.run("site", limit=2400)
    text, first, whole = lab.reply()
    lab.remember(text)
    return {"changed": dict(play.changed), "playbook_s": play.seconds, "first_token_s": first, "reply_s": whole}


def site_again(lab: Lab) -> Figures:
    """The second run changes nothing, and the ranks go on serving through it."""
    starts = [lab.state(guest)["pid"] for guest in lab.guests]
    play = lab.playbooks.run("site", limit=2400)
    if any(play.changed.values()):
        changed = re.findall(r"^TASK \[(.*?)\].*\n(?:(?!TASK).*\n)*?changed: \[(\w+)\]", play.said, re.MULTILINE)
        raise LabError(f"the second run changed {dict(play.changed)}: {changed}")
    if [lab.state(guest)["pid"] for guest in lab.guests] != starts:
        raise LabError("the second run restarted engines")
    lab.same_reply()
    return {"changed": dict(play.changed), "playbook_s": play.seconds}


def stop(lab: Lab) -> Figures:
    """In order: nothing of a rank is left, and its memory is back."""
    with_ranks = [guest.sh("awk '/MemAvailable/ {print $2}' /proc/meminfo") for guest in lab.guests]
    began = time.monotonic()
    lab.playbooks.tfglm("down")
    seconds = round(time.monotonic() - began, 1)
    for guest in lab.guests:
        left = guest.sh("pgrep -af 'tfglm (engine|serve|rank)'", check=False).strip()
        if left:
            raise LabError(f"{guest.name} still runs {left}")
    if lab.health():
        raise LabError("the API still answers")
    says("tfglm status", lab.guests[1].sh("tfglm status 2>&1", check=False), "no rank runs here")
    without = [guest.sh("awk '/MemAvailable/ {print $2}' /proc/meminfo") for guest in lab.guests]
    back = [round((int(after) - int(before)) / 1024) for before, after in zip(with_ranks, without, strict=True)]
    return {"down_s": seconds, "memory_back_mib": back}


def start(lab: Lab) -> Figures:
    began = time.monotonic()
    says("tfglm up", lab.playbooks.tfglm("up", "--start-only"), r"start\.yml is done after \d+ s")
    seconds = round(time.monotonic() - began, 1)
    lab.same_reply()
    guest = lab.guests[1]
    main = f"systemctl show --property=MainPID --value tfglm@{guest.index}"
    resident = guest.sh(f"awk '/VmRSS/ {{print $2}}' /proc/$({main})/status")
    return {"up_s": seconds, "supervisor_rss_mib": round(int(resident) / 1024, 1)}


STEPS: dict[str, Callable[[Lab], Figures]] = {
    step.__name__: step for step in (boot, site, site_again, stop, start, *FAULTS, operate, like_a_spark, docker)
}
FOUNDATIONS = ("boot", "site", "start")
"""Steps that the later ones stand on."""
