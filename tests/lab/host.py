"""What the lab needs of the machine it runs on, and how it runs commands there: nothing without a limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfglm-lab"
"""Outlives the working tree: an image is minutes of work, and has a throwaway key in it that no repository may see."""

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


class LabError(Exception):
    """A step that did not end as it must; the text is for the reader of the report."""


class Skip(Exception):
    """The lab cannot be run here, though nothing has failed."""


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
