"""The life of one rank: prepare, wait for the others, run the engine with all of them, and again, until told to stop.

    preparing -> waiting -> starting -> serving -> stopping -> preparing ...
                                 \\ a signal: draining (rank 0), leaving (others) -> gone

One event loop in the main thread does everything; what may block runs aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tfglm.memory.guard import GIB, Guard, LowWater
from tfglm.supervisor import fabric
from tfglm.supervisor.alone import claim
from tfglm.supervisor.aside import aside
from tfglm.supervisor.attempts import Attempts
from tfglm.supervisor.child import Child, reap
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.codes import Exit, Fatal
from tfglm.supervisor.decide import End, declared, leaving, next_generation, over, waits_for
from tfglm.supervisor.health import Health, ask
from tfglm.supervisor.notify import Notifier
from tfglm.supervisor.prepare import Preparation
from tfglm.supervisor.presence import START_LIMIT_S, TICK_S, Presence
from tfglm.supervisor.runtime import Runtime, api_key

log = logging.getLogger(__name__)

T = TypeVar("T")

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_HEALTH_S = 1.0
_QUICK_S = 2.0
"""What an engine gets to end in a failed generation: its peers are gone, so there is nothing to finish."""


class _Stopped(Exception):
    """A signal asked for the end while no engine runs."""


class Supervisor:
    """One rank of one cluster. `run` returns the exit code once it has stopped, been told to, or given up."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        *,
        notifier: Notifier | None = None,
        state_dir: Path | None = None,
        sysroot: Path = Path("/"),
    ) -> None:
        self.cluster, self.node, self.sysroot = cluster, node, sysroot
        self.limits, self.settings = cluster.limits, cluster.tfglm_settings()
        self.notifier = notifier or Notifier()
        self.presence = Presence(cluster, node, self.notifier, state_dir, sysroot)
        self.runtime = Runtime(cluster, node)
        self.prepare = Preparation(cluster, node, self.runtime, self.presence.because, sysroot)
        self.attempts = Attempts(cluster.limits)
        self.child: Child | None = None
        self.health = Health(0)
        self._ticker: asyncio.Task[None] | None = None
        self._stop, self._now = asyncio.Event(), asyncio.Event()

    @property
    def leads(self) -> bool:
        return self.node.rank == 0

    async def run(self) -> Exit:
        """Until a signal, or until going on is hopeless. SIGTERM or SIGINT stops in order, a second one at once.

        Raises Fatal when another supervisor has the rank.
        """
        with claim(self.runtime.mark):
            return await self._run()

    async def _run(self) -> Exit:
        self._on_signals()
        stay_in_memory()
        self._ticker = asyncio.create_task(self.presence.tick())
        exit_code = Exit.STOPPED
        try:
            await self._live()
        except _Stopped:
            self.presence.reason, self.presence.code = "stopped in order", ""
        except Fatal as fatal:
            exit_code, self.presence.reason, self.presence.code = fatal.exit, fatal.message, fatal.code
            log.error("%s", fatal)
        finally:
            self.notifier.stopping()
            await self._clear()
            self.presence.ended = self.presence.generation
            self.presence.enter("gone", self.presence.reason, self.presence.code)
            for _ in range(3):  # the last beats: a lost datagram would make the others wait for silence
                self.presence.beat()
                await asyncio.sleep(0.02)
            self._ticker.cancel()
            self.presence.beats.close()
        return exit_code

    async def _live(self) -> None:
        while True:
            await self._unless_stopped(self._prepare())
            generation = await self._unless_stopped(self._all_here())
            end, served_s = await self._generation(generation)
            if self._stop.is_set():
                raise _Stopped
            if self.leads:
                self._count(end, served_s)

    def _count(self, end: End, served_s: float) -> None:
        """Start limit of all ranks. Raises Fatal when it is reached."""
        self.attempts.record(served_s, end.in_order)
        self.presence.failed_starts = self.attempts.failed
        if self.attempts.exhausted:
            exit_code = Exit.GUARD if end.code == "E_MEMORY" else Exit.ENGINE
            text = f"{self.attempts.failed} starts in a row have failed, the last because {end.reason}"
            raise Fatal(exit_code, end.code or "E_RANKS", text)

    async def _prepare(self) -> None:
        """Everything that must be true of this node. Raises Fatal."""
        last = self.presence.reason
        self.presence.enter("preparing", last, self.presence.code)
        await self._clear()
        if self.attempts.wait_s:
            log.info("next start in %.0f s", self.attempts.wait_s)
            self.presence.because(f"next start in {self.attempts.wait_s:.0f} s; {last}")
            await asyncio.sleep(self.attempts.wait_s)
        await self.prepare.network()
        await self.prepare.checkpoint()
        await self.prepare.image()
        await self.prepare.memory()
        self.presence.enter("waiting")

    async def _clear(self) -> None:
        """No engine of this rank, and nothing that one has started, is left on this node."""
        if self.child is not None:
            await self.child.stop(_QUICK_S)
            self.child = None
        await reap(self.runtime.mark)
        with contextlib.suppress(Exception):  # docker that does not answer is found out about by `image`
            await aside(self.runtime.remove, "containers")
        self.presence.figures.pid = 0

    async def _all_here(self) -> int:
        """The generation to take part in, once all ranks are prepared. Raises Fatal when a rank does not come."""
        began, said = time.monotonic(), ""
        while True:
            own, seen = self.presence.own_beat(), self.presence.seen()
            missing = waits_for(seen, own, self.limits.dead, self.presence.difference())
            if self.leads and not missing:
                generation = next_generation(seen, own)
                self.presence.boots = (self.presence.boot, *(peer.beat.boot for peer in seen if peer.beat is not None))
                return generation
            if not self.leads and (generation := declared(seen[0], own, self.limits.dead)):
                assert seen[0].beat is not None
                self.presence.boots = seen[0].beat.boots
                return generation
            missing = missing or "rank 0 to start all ranks"
            if missing.partition(",")[0] != said:
                said = missing.partition(",")[0]
                log.info("waiting for %s", missing)
            self.presence.because(f"waiting for {missing}")
            if time.monotonic() - began > self.limits.peers:
                raise Fatal(Exit.PEERS, "E_RANKS", f"waited {self.limits.peers:.0f} s for {missing}")
            await asyncio.sleep(TICK_S)

    async def _generation(self, generation: int) -> tuple[End, float]:
        """Run the engine until this generation is over. Returns why, and for how many seconds it served."""
        self.presence.generation = generation
        self.presence.enter("starting", "loading")
        began = time.monotonic()
        rails = fabric.resolve(self.node, self.sysroot)
        network = fabric.engine_environment(self.node, rails, len(self.cluster.ranks))
        argv = self.runtime.engine(generation, network)
        environ = self.runtime.environment(self.runtime.engine_variables(generation, network))
        log.info("start %d: %s", generation, " ".join(argv))
        short: asyncio.Future[LowWater] = asyncio.get_running_loop().create_future()
        guard = self._guard(short)
        watch: asyncio.Task[None] | None = None
        try:
            self.child = Child.start(argv, environ, self.runtime.mark)
        except OSError as error:
            raise Fatal(Exit.RUNTIME, "E_WORKER", f"{argv[0]} cannot be run: {error.strerror}") from None
        self.presence.figures.engine_began(self.child.pid)
        self.presence.tail = self.child.tail
        self.health = Health(0)
        try:
            guard.start()
            watch = asyncio.create_task(self._watch()) if self.leads else None
            end, served_s = await self._until_over(self.child, began, short)
        finally:
            guard.stop()
            if watch is not None:
                watch.cancel()
        log.log(logging.INFO if end.in_order else logging.ERROR, "start %d is over: %s", generation, _words(end))
        self.presence.ended = generation
        self.presence.enter("stopping", end.reason, end.code)
        self.presence.beat()  # the others learn it before this engine has ended
        await self._clear()
        return end, served_s

    async def _until_over(self, child: Child, began: float, short: asyncio.Future[LowWater]) -> tuple[End, float]:
        served_since: float | None = None
        last_ok = began
        while True:
            now = time.monotonic()
            if self._ticker is not None and self._ticker.done():
                self._ticker.result()
            if served_since is None and self._serves():
                served_since = now
                self.presence.serving()
                log.info("start %d serves", self.presence.generation)
            if self.health.status == 200 or not self.leads:
                last_ok = now
            end = self._over(child, now - began, short)
            if end is None and self.leads:
                end = self._engine_trouble(now - began, now - last_ok, served_since is not None)
            goes = leaving(self.presence.seen()) if self.leads else None
            if end is None and (self._stop.is_set() or goes):
                end = await self._in_order(child, "stopped in order" if self._stop.is_set() else f"{goes} stops", short)
            if end is not None:
                return end, 0.0 if served_since is None else time.monotonic() - served_since
            await asyncio.sleep(TICK_S)

    def _over(self, child: Child, age_s: float, short: asyncio.Future[LowWater]) -> End | None:
        """What ends a generation from any side but the engine's own health."""
        if short.done():
            return End("E_MEMORY", f"memory ran short, {short.result()} were available")
        seen = self.presence.seen()
        if not child.running:
            draining = not self.leads and seen[0].beat is not None and seen[0].beat.phase == "draining"
            if child.code == 0 and draining:
                return None  # rank 0 has told its followers to end, and says so itself in a moment
            return End(child.error[0] if child.error else "E_WORKER", child.ending)
        return over(seen, self.presence.own_beat(), self.presence.boots, age_s, self.limits.dead, self.limits.join)

    def _engine_trouble(self, age_s: float, silent_s: float, serving: bool) -> End | None:
        """What /health of rank 0 says about an engine that is still there."""
        if self.health.phase == "failed":
            return End("E_WORKER", "the engine has failed; /health says so")
        if not serving:
            too_long = age_s > self.limits.start
            return End("E_WORKER", f"/health did not say ok within {self.limits.start:g} s") if too_long else None
        if silent_s > self.limits.health:
            return End("E_WORKER", f"/health has not said ok for {self.limits.health:g} s")
        step_s = float(self.health.facts.get("step_age_s", 0.0))
        if step_s > self.limits.step:
            return End(
                "E_WORKER", f"one forward of the engine has lasted {step_s:.0f} s, longer than {self.limits.step:g}"
            )
        return None

    async def _in_order(self, child: Child, why: str, short: asyncio.Future[LowWater]) -> End:
        """Rank 0 lets its replies finish; another rank asks it to, and waits."""
        limit = self.settings.drain_s + self.limits.stop
        self.notifier.more_time(limit + START_LIMIT_S)
        if self.leads:
            self.presence.enter("draining", f"replies get {self.settings.drain_s:g} s to finish; {why}")
            child.terminate()
        else:
            self.presence.enter("leaving", "rank 0 lets replies finish")
            limit += 2 * self.limits.dead
        self.presence.beat()
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not self._now.is_set():
            if self.leads and not child.running:
                break
            if self._over(child, 0.0, short):
                break
            await asyncio.sleep(TICK_S)
        return End("", why, in_order=True)

    def _serves(self) -> bool:
        """Rank 0 asks its engine; a follower has joined for certain once rank 0 serves."""
        if self.leads:
            return self.health.status == 200
        leader = self.presence.beats.peers[0].beat
        return leader is not None and leader.phase == "serving" and leader.generation == self.presence.generation

    async def _watch(self) -> None:
        """Ask the engine how it is, for as long as the generation lasts."""
        key = api_key()
        while True:
            self.health = await ask(self.settings.host, self.settings.port, key, 2 * _HEALTH_S)
            if "generation_tokens" in self.health.facts:
                self.presence.figures.tokens.add(float(self.health.facts["generation_tokens"]))
                self.presence.figures.running = int(self.health.facts.get("running", 0))
            await asyncio.sleep(_HEALTH_S)

    def _guard(self, short: asyncio.Future[LowWater]) -> Guard:
        loop = asyncio.get_running_loop()

        def act(low: LowWater) -> None:
            loop.call_soon_threadsafe(lambda: None if short.done() else short.set_result(low))

        limit, floor = round(self.settings.guard_gib * GIB), round(self.settings.floor_gib * GIB)
        return Guard(limit, floor, act, sysroot=self.sysroot)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises _Stopped when a signal comes first, and whatever ended the ticker."""
        assert self._ticker is not None
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stop, self._ticker), return_when=asyncio.FIRST_COMPLETED)
            if self._ticker.done():
                self._ticker.result()
            if self._stop.is_set():
                raise _Stopped
            return task.result()
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.wait((task,))

    def _on_signals(self) -> None:
        def asked() -> None:
            (self._now if self._stop.is_set() else self._stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, asked)


def stay_in_memory() -> None:
    """Pages of this process, once touched, are not swapped out: it must act when memory is short. Needs no memory limit
    (LimitMEMLOCK=infinity), since a process that hits one while locked cannot allocate."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        ctypes.CDLL(None).mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)


def _words(end: End) -> str:
    return f"{end.code}: {end.reason}" if end.code else end.reason
