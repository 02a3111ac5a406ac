"""What the lab needs of the machine it runs on, and how it runs commands there: nothing without a limit."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfglm-lab"
"""Outlives the working tree: an image is minutes of work, and has a throwaway key in it that no repository may see."""
MASTERS = CACHE / f"ssh-{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}"
"""Folder of the sockets that ssh shares connections by. They cross network namespaces, in which all labs have the same
addresses: a lab of another working tree must not find them."""

PACKAGES = {
    "linux.uml": "user-mode-linux",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "ip": "iproute2",
    "ethtool": "ethtool",
    "ssh": "openssh-client",
    "unshare": "util-linux",
}
"""Debian package by the command that shows whether it is there."""
GIB = 2**30
MEMORY, DISK = 5 * GIB, 6 * GIB
"""Bytes that three guests take, of memory, and of the disk that their image is made and kept on."""
NAMESPACE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
AGAIN_S = 15.0


class LabError(Exception):
    """A step that did not end as it must; the text is for the reader of the report."""


class Skip(Exception):
    """The lab cannot be run here, though nothing has failed."""


class Over(BaseException):
    """The time for everything is over. No Exception, so that nobody who waits for an answer takes it for a bad one."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Over in the main thread once `seconds` are over, and again every AGAIN_S: putting things in order after it
    ends as well."""

    def over(*_: object) -> None:
        raise Over

    signal.signal(signal.SIGALRM, over)
    if math.isfinite(seconds):
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def missing() -> str:
    """Why the lab cannot run here, or nothing."""
    if os.geteuid() != 0:
        return "needs root: guests are wired by taps and bridges in a network namespace"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    if os.uname().machine != "x86_64":
        return f"guests are User-mode Linux, which Debian has for x86_64, not {os.uname().machine}"
    if not shutil.which("apt-get"):
        return "needs Debian: guests are built from its packages"
    if not shutil.which("ansible-playbook"):
        return "needs ansible-playbook on the path, as `make lab` puts it there"
    if absent():
        return f"needs Debian packages: apt-get install --no-install-recommends {' '.join(absent())}"
    return _too_small()


def _too_small() -> str:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        return "may not make namespaces here: unshare is refused"
    CACHE.mkdir(parents=True, exist_ok=True)
    words = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    memory = int(words.split()[1]) << 10
    shared, disk = (shutil.disk_usage(place).free for place in ("/dev/shm", CACHE))
    for what, there, needed in (("memory", memory, MEMORY), ("/dev/shm", shared, MEMORY), (str(CACHE), disk, DISK)):
        if there < needed:
            return f"needs {needed / GIB:.0f} GiB free in {what}, and {there / GIB:.1f} are"
    return ""


def absent() -> list[str]:
    """Debian packages that the lab lacks."""
    return sorted({package for command, package in PACKAGES.items() if not shutil.which(command)})


def run(
    command: Sequence[str | Path],
    limit: float,
    *,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    stdin: str = "",
    log: Path | None = None,
) -> str:
    """Standard output and error of a command that gets `limit` seconds; log: where to watch them come. Raises LabError,
    with the last of what it said."""
    words = [str(word) for word in command]
    with log.open("w+") if log else tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            code = subprocess.run(
                words,
                input=stdin,
                stdout=output,
                stderr=output,
                text=True,
                timeout=limit,
                env={**os.environ, **(env or {})},
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        said = output.read()
    if code is None:
        raise LabError(f"{' '.join(words)[:200]} took longer than {limit:.0f} s: {said[-2000:]}")
    if check and code:
        raise LabError(f"{' '.join(words)[:200]} ended with {code}: {said[-3000:]}")
    return said
