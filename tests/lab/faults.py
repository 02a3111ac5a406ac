"""One fault after the other, on a cluster that serves. Each step ends with the cluster serving what it served before;
what must happen in between is what docs/operations.md says."""

from __future__ import annotations

import time
from typing import Any

import wiring
from cluster import DEAD_S, SLOW_S, Lab
from host import LabError
from playbook import MODELS, PORTS

Figures = dict[str, Any]
CONFIG = "/etc/tfglm/cluster.json"


def kill_engine(lab: Lab) -> Figures:
    """SIGKILL to the engine of rank 1: all ranks end, and start again together."""
    guest = lab.guests[1]
    pid = lab.state(guest)["pid"]
    since = time.time()
    guest.sh(f"kill -9 {pid}")
    return lab.over(since, lab.guests) | lab.recover(since)


def kill_supervisor(lab: Lab) -> Figures:
    """SIGKILL to rank 2's service: its engine dies with it, the others notice the silence, systemd brings it back."""
    guest = lab.guests[2]
    since = time.time()
    guest.sh(f"systemctl kill --kill-whom=main --signal=SIGKILL tfglm@{guest.index}")
    return lab.over(since, lab.guests[:2]) | lab.recover(since)


def cut_cable(lab: Lab) -> Figures:
    """Nothing passes between ranks 0 and 1: all end, say which rail is missing, and go on once it is back."""
    since = time.time()
    wiring.cut("01")
    try:
        figures = lab.over(since, lab.guests)
        figures["says"] = lab.until_says(lab.guests[0], r"rank 1|spark1", 120)
    finally:
        wiring.join("01")
    again = time.time()
    return figures | lab.recover(again)


def wrong_cable(lab: Lab) -> Figures:
    """The two cables of spark2 in each other's ports: no rank starts over them, and plan.yml names the ports."""
    since = time.time()
    ends = [(wiring.tap(cable, 2), cable) for cable in wiring.PORTS[2]]
    wiring.plug(ends[0][0], ends[1][1])
    wiring.plug(ends[1][0], ends[0][1])
    try:
        figures = lab.over(since, lab.guests)
        play = lab.playbooks.run("plan", fails=True)
        named = [line.strip() for line in play.said.splitlines() if "should reach" in line and PORTS[0] in line]
        if not named:
            raise LabError(f"plan.yml does not name the port: {play.said[-1500:]}")
        figures["says"] = named[0][:300]
    finally:
        for port, cable in ends:
            wiring.plug(port, cable)
    return figures | lab.recover(time.time())


def no_nfs(lab: Lab) -> Figures:
    """The head stops serving files. A cluster that has loaded goes on; one that must load again waits for the mount."""
    head, worker = lab.guests[0], lab.guests[1]
    head.sh("systemctl stop nfs-server")
    try:
        lab.same_reply()
        since = time.time()
        worker.sh(f"kill -9 {lab.state(worker)['pid']}")
        figures = lab.over(since, lab.guests)
        figures["says"] = lab.until_says(worker, MODELS, 120)
    finally:
        head.sh("systemctl start nfs-server", limit=120)
    return figures | lab.recover(time.time(), limit=600)


def fill_memory(lab: Lab) -> Figures:
    """Somebody on spark1 takes nearly all memory: the guard ends the ranks before the kernel must choose, they wait
    until the plan fits again, and the one who took it is not killed."""
    guest = lab.guests[1]
    hog = (
        "import time\n"
        "def free(): return next(int(l.split()[1]) for l in open('/proc/meminfo') if l.startswith('MemAvailable'))\n"
        "taken = []\n"
        "while free() > 100 << 10: taken.append(bytearray(b'x') * (8 << 20))\n"
        "time.sleep(600)\n"
    )
    guest.write("/tmp/hog.py", hog)
    since = time.time()
    guest.sh("systemd-run --quiet --unit=hog --property=OOMScoreAdjust=-999 python3 /tmp/hog.py")
    try:
        figures = lab.over(since, lab.guests, limit=180)  # taking it is what lasts
        if "memory" not in figures["why"]:
            raise LabError(f"the ranks ended for another reason: {figures['why']}")
        figures["says"] = lab.until_says(guest, "memory", 120)
        if guest.sh("systemctl is-active hog", check=False).strip() != "active":
            raise LabError("the kernel killed the process that filled memory: the guard came too late")
    finally:
        guest.sh("systemctl stop hog", check=False)
    return figures | lab.recover(time.time())


def full_disk(lab: Lab) -> Figures:
    """No byte left on spark1's disk: what runs goes on and can even start again; site.yml refuses to go on."""
    guest = lab.guests[1]
    guest.sh("dd if=/dev/zero of=/var/filled bs=1M status=none; sync", check=False, limit=300)
    try:
        lab.same_reply()
        since = time.time()
        guest.sh(f"kill -9 {lab.state(guest)['pid']}")
        figures = lab.over(since, lab.guests) | lab.recover(since)
        guest.sh("truncate -s -40M /var/filled")  # with no byte at all Ansible itself cannot say anything
        play = lab.playbooks.run("plan", fails=True)
        if "E_DISK" not in play.said or guest.name not in play.said:
            raise LabError(f"plan.yml does not name the disk: {play.said[-1500:]}")
    finally:
        guest.sh("rm -f /var/filled")
    return figures


def wrong_settings(lab: Lab) -> Figures:
    """One rank with another context than the others: nothing starts, and the field is named with both values."""
    guest = lab.guests[2]
    service = f"tfglm@{guest.index}"
    guest.sh(f"""cp {CONFIG} /tmp/right.json; sed -i 's/"context": "512"/"context": "256"/' {CONFIG}""")
    try:
        since = time.time()
        guest.sh(f"systemctl restart --no-block {service}")
        figures = lab.over(since, lab.guests[:2], limit=60 + SLOW_S)
        figures["says"] = lab.until_says(lab.guests[0], "context.*(512.*256|256.*512)", 120)
    finally:
        guest.sh(f"cp /tmp/right.json {CONFIG}; systemctl restart --no-block {service}")
    return figures | lab.recover(time.time())


def wrong_gid(lab: Lab) -> Figures:
    """The GID of a cable's address vanishes from an RDMA device of spark1: all ranks end and wait for it, by name. It
    comes back at another index, and is found there."""
    guest = lab.guests[1]
    since = time.time()
    guest.sh("systemctl stop lab-rdma; rm /sys/class/infiniband/rocep1s0f0/ports/1/gids/[2-9]")
    try:
        figures = lab.over(since, lab.guests)
        figures["says"] = lab.until_says(guest, "GID for .* on rocep1s0f0", 120)
    finally:
        guest.sh("/usr/local/sbin/lab-rdma 5")
    return figures | lab.recover(time.time())


def power_cycle_worker(lab: Lab) -> Figures:
    """spark2 loses its power and comes back: no hand touches it."""
    guest = lab.guests[2]
    guest.sh("sync")
    since = time.time()
    guest.pull_the_plug()
    figures = lab.over(since, lab.guests[:2], limit=2 * DEAD_S + SLOW_S)
    guest.start()
    again = time.time()
    figures["booted_s"] = round(guest.wait(), 1)
    return figures | lab.recover(again, limit=600)


def power_cycle_all(lab: Lab) -> Figures:
    """All three lose their power, and come back with the head last: mounts, cables and services find each other."""
    for guest in lab.guests:
        guest.sh("sync")
        guest.pull_the_plug()
    time.sleep(2)
    since = time.time()
    for guest in reversed(lab.guests):
        guest.start()
        time.sleep(5)
    booted = {guest.name: round(guest.wait(), 1) for guest in lab.guests}
    figures: Figures = {"booted_s": booted} | lab.recover(since, limit=900)
    for guest in lab.guests:
        failed = guest.sh("systemctl --failed --no-legend --plain", check=False).strip()
        if failed:
            raise LabError(f"{guest.name} came back with failed units: {failed}")
    return figures


FAULTS = (
    kill_engine,
    kill_supervisor,
    cut_cable,
    no_nfs,
    fill_memory,
    power_cycle_worker,
    power_cycle_all,
    wrong_cable,
    wrong_gid,
    full_disk,
    wrong_settings,
)
