"""What must be true of a node before its engine may start: network, checkpoint, image, memory. Looked up each time.

Each step waits as long as its limit allows and says what for; nothing here blocks the event loop, since a dead NFS
server blocks whoever touches the mount for as long as it is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tfglm.supervisor import fabric
from tfglm.supervisor.aside import aside
from tfglm.supervisor.child import DOCKER, MARK
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.codes import Exit, Fatal
from tfglm.supervisor.fabric import RailState
from tfglm.supervisor.runtime import Runtime

log = logging.getLogger(__name__)

GIB = 2**30
_EVERY_S = 0.5
_PLAN_EVERY_S = 2.0
_TOUCH_S = 5.0

Say = Callable[[str], None]


class Preparation:
    """The steps, for one node. `say` gets every reason to wait, in words."""

    def __init__(self, cluster: Cluster, node: Node, runtime: Runtime, say: Say, sysroot: Path = Path("/")) -> None:
        self._cluster, self._node, self._runtime, self._say, self._sysroot = cluster, node, runtime, say, sysroot
        self._touched: asyncio.Future[str] | None = None

    async def network(self) -> tuple[RailState, ...]:
        """Wait for addresses, carriers and GIDs; the rails with their GIDs. Raises Fatal."""
        control = self._cluster.ranks[self._node.rank].control

        async def lacks() -> str:
            return fabric.missing(self._node, control, self._sysroot)

        await self._wait(lacks, self._cluster.limits.fabric, Exit.FABRIC, "E_FABRIC")
        return fabric.resolve(self._node, self._sysroot)

    async def checkpoint(self) -> None:
        """Wait for the mount and the checkpoint's config.json. Raises Fatal."""
        await self._wait(self._no_checkpoint, self._cluster.limits.mount, Exit.WEIGHTS, "E_CHECKPOINT")

    async def image(self) -> None:
        """Raises Fatal when the container image is not the right one."""
        problem = await aside(self._runtime.image_problem, "image")
        if problem:
            raise Fatal(Exit.RUNTIME, "E_WORKER", problem)

    async def memory(self) -> None:
        """Wait until the memory plan fits this node as it is now. Raises Fatal."""
        await self._wait(self._too_little_memory, self._cluster.limits.memory, Exit.MEMORY, "E_MEMORY", _PLAN_EVERY_S)

    async def _wait(
        self, lacks: Callable[[], Awaitable[str]], limit: float, exit_code: Exit, code: str, every_s: float = _EVERY_S
    ) -> None:
        began = time.monotonic()
        said = ""
        while reason := await lacks():
            waited = time.monotonic() - began
            if waited >= limit:
                raise Fatal(exit_code, code, f"{reason}: not there after {waited:.0f} s")
            if reason != said:
                log.info("waiting for %s", reason)
                said = reason
            self._say(f"waiting for {reason}")
            await asyncio.sleep(min(every_s, max(0.0, limit - waited)))

    async def _no_checkpoint(self) -> str:
        """Touching the folder is also what makes systemd mount an automount."""
        config = Path(self._cluster.checkpoint) / "config.json"
        if self._touched is None:  # one that hangs is not helped by a second
            self._touched = aside(lambda: _readable(config), "checkpoint")
        try:
            problem = await asyncio.wait_for(asyncio.shield(self._touched), _TOUCH_S)
        except TimeoutError:
            return f"{self._node.mount or config}, which does not answer: its NFS server may be gone"
        self._touched = None
        mount = self._node.mount
        if mount and not is_mounted(mount, self._sysroot):
            return f"the mount of {mount}"
        return f"{config} ({problem})" if problem else ""

    async def _too_little_memory(self) -> str:
        plan = await self._plan()
        rank = plan["ranks"][self._node.rank]
        if rank["lowest_free"] >= plan["floor"]:
            return ""
        need, floor, available = (value / GIB for value in (rank["need"], plan["floor"], rank["available"]))
        largest = plan["largest_context"]
        return (
            f"memory: rank {self._node.rank} needs {need:.2f} GiB and {floor:.2f} must stay free, {available:.2f} are "
            f"available; {f'--context {largest} fits' if largest else 'no window fits'}"
        )

    async def _plan(self) -> dict[str, Any]:
        """`tfglm plan --json`, in a process of its own: headers are read from the mount, which may block for ever."""
        argv, limit = self._runtime.plan(), self._cluster.limits.plan
        self._say("checking the memory plan")
        environ = self._runtime.environment(self._runtime.settings()) | {MARK: self._runtime.mark}
        try:
            done = await asyncio.wait_for(aside(lambda: _output(argv, environ, limit), "plan"), limit + _TOUCH_S)
        except OSError as error:
            raise Fatal(Exit.RUNTIME, "E_WORKER", f"{argv[0]} cannot be run: {error.strerror}") from None
        except (TimeoutError, subprocess.TimeoutExpired):
            raise Fatal(Exit.WEIGHTS, "E_CHECKPOINT", f"the memory plan was not there after {limit:.0f} s") from None
        try:
            plan = json.loads(done.stdout)
            plan["ranks"][self._node.rank]["lowest_free"]
        except (ValueError, LookupError, TypeError):
            refused = DOCKER.search(done.stderr)
            if refused:
                raise Fatal(Exit.RUNTIME, "E_WORKER", f"no memory plan can be made: {refused[0]}") from None
            said = done.stderr.strip().rpartition("\n")[2] or f"code {done.returncode}"
            fault = Exit.CONFIG if "E_CONFIG" in said else Exit.WEIGHTS
            code = "E_CONFIG" if fault is Exit.CONFIG else "E_CHECKPOINT"
            raise Fatal(fault, code, f"there is no memory plan: {said}") from None
        return plan


def _output(argv: list[str], environ: Mapping[str, str], limit: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit
    )


def is_mounted(mount: str, sysroot: Path = Path("/")) -> bool:
    """Whether a file system is mounted there that is not merely an automount's trigger. Touches nothing there."""
    found = False
    for line in (sysroot / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == mount.rstrip("/") and after.split()[0] != "autofs":
            found = True
    return found


def _readable(path: Path) -> str:
    """Why a file cannot be read; empty if its first byte can. Not out of this node's own memory, which has it a while
    after an NFS server has gone: an engine would start, and wait for a dead mount while it loads."""
    try:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):  # a pipe has no pages
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return "" if file.read(1) else "it is empty"
    except OSError as error:
        return error.strerror or str(error)
