"""One fake Spark: a Debian with systemd on a User-mode Linux kernel, reached by ssh over the management network."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import wiring
from host import CACHE, MASTERS, LabError, run

KEY = CACHE / "key"
SSH = [
    *("-q", "-i", str(KEY), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=no"),
    *("-o", "UserKnownHostsFile=/dev/null", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),
    *("-o", "ControlMaster=auto", "-o", "ControlPersist=30", "-o", f"ControlPath={MASTERS}/%h"),
]


class Guest:
    """Guest number `index`. Its disk is what it wrote over the shared image, and lasts over power cycles."""

    def __init__(self, index: int, image: Path, folder: Path, memory: str) -> None:
        self.index, self.image, self.folder, self.memory = index, image, folder, memory
        self.name = f"spark{index}"
        self.address = wiring.address(index)
        self._pid = folder / "pid"
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        mac = f"52:54:00:77:0{self.index}"
        # gro: takes the large frames that the others' kernels send. They would be cut, and bulk copies would crawl.
        cables = [wiring.tap(cable, self.index) for cable in wiring.PORTS[self.index]]
        command = [
            *("linux.uml", f"umid={self.name}", f"uml_dir={self.folder}", f"mem={self.memory}"),
            *(f"ubd0={self.folder / 'disk'},{self.image}", "root=/dev/ubda", "rw", "quiet"),
            *("con=null", "con0=null,fd:1", "ssl=null", f"systemd.hostname={self.name}"),
            f"vec0:transport=tap,ifname=m{self.index},depth=64,gro=1,mac={mac}:00",
            *(
                f"vec{number}:transport=tap,ifname={cable},depth=64,gro=1,mtu=9000,mac={mac}:0{number}"
                for number, cable in enumerate(cables, start=1)
            ),
        ]
        with (self.folder / "console").open("ab") as console:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self._pid.write_text(str(process.pid))

    def wait(self, limit: float = 300) -> float:
        """Seconds until ssh answers."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            try:
                self.sh("true", limit=15)
                return time.monotonic() - began
            except LabError:
                time.sleep(1)
        console = (self.folder / "console").read_text(errors="replace")[-1500:]
        raise LabError(f"{self.name} did not answer within {limit:.0f} s of its start: {console}")

    def sh(self, command: str, limit: float = 60, check: bool = True, stdin: str = "") -> str:
        """What a shell command says there, as root."""
        return run(["ssh", *SSH, f"root@{self.address}", command], limit, check=check, stdin=stdin)

    def write(self, path: str, text: str) -> None:
        self.sh(f"cat > {path}", stdin=text)

    def pull_the_plug(self) -> None:
        """Power off without warning: what the guest has not synced by itself is gone."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(int(self._pid.read_text()), signal.SIGKILL)
        self._pid.unlink(missing_ok=True)
        run(["ssh", *SSH, "-O", "exit", f"root@{self.address}"], 20, check=False)

    def upload(self, file: Path, path: str, limit: float = 300) -> None:
        run(["scp", *SSH, file, f"root@{self.address}:{path}"], limit)
