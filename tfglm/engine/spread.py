"""A model over ranks: how they meet, agree on what fits, load together, and stay together while one of them serves.

Rank 0 is `Leader`; every other rank is `follow`. In this order, on all: join (tfglm/ranks/bootstrap.py compares what
they were started with), say how much memory there is, hear from rank 0 how large the caches are, load, meet again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tfglm.cache.identity import checkpoint_digest
from tfglm.checkpoint.store import Checkpoint
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.kind import drafter_kind
from tfglm.engine.device import memory_budget
from tfglm.engine.keep import disk_follower
from tfglm.engine.machine import computing_facts
from tfglm.errors import RanksError, TfglmError
from tfglm.memory.guard import Guard, LowWater
from tfglm.models.load import load_model
from tfglm.ranks.bootstrap import join, lead
from tfglm.ranks.control import Control, Timing, end_process_on_failure
from tfglm.ranks.facts import code_facts
from tfglm.ranks.follower import follow as follow_messages
from tfglm.ranks.group import RankGroup
from tfglm.ranks.wire import Wire
from tfglm.ranks.wires import open_wire
from tfglm.settings import Settings

log = logging.getLogger(__name__)

GIB = 2**30
_FAREWELL_S = 3.0
"""For the last words of replies after the ranks have ended; then the process ends however deep it waits."""
_STEPS = 20
"""Parts of a load that a follower reports."""


def facts_of(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """What must be alike on all ranks. settings.device and wire have been chosen, torch's threads set."""
    kind = drafter_kind(settings, checkpoint.config)
    drafter = checkpoint_digest(Path(settings.drafter_path)) if settings.drafter_path else ""
    return {
        **code_facts(),
        "checkpoint": checkpoint_digest(checkpoint.path),
        "settings": {name: getattr(settings, name) for name in ("device", "kv", "dense", "head", "wire", "cp")},
        "drafter": [kind, drafter],
        "disk cache": bool(settings.disk_cache) and settings.kept_gib > 0,
        "machine": computing_facts(settings),
        # The service's number of this start of all ranks: those of different attempts never mix.
        "start": os.environ.get("GLM_START", ""),
    }


class Leader:
    """Rank 0 among the ranks. settings.device and wire have been chosen, torch's threads set.

    listener: the socket at which the others join. watch: called now and then while they are waited for; what it raises
    ends the wait. ended: called once, from a thread of its own, when the ranks end before `close`.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        watch: Callable[[], None],
        ended: Callable[[RanksError], None],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._watch = watch
        self._ended = ended
        self._control: Control | None = None
        self._stopped: RanksError | None = None
        self._gathered = threading.Event()
        self._gathered.set()
        self._group: RankGroup | None = None
        self._facts = ""

    def meet(self, checkpoint: Checkpoint) -> list[int]:
        """Wait for all ranks; the memory that each has for its part, in bytes."""
        settings = self._settings
        facts = facts_of(checkpoint, settings)
        self._facts = json.dumps(facts, sort_keys=True)

        self._gathered.clear()
        try:
            self._control = control = lead(
                self._listener,
                settings.ranks,
                facts,
                limit_s=settings.rank_join_s,
                watch=self._still_wanted,
                timing=_timing(settings),
            )
        finally:
            self._gathered.set()
        control.on_failure(lambda error: threading.Thread(target=self._ended, args=(error,), daemon=True).start())
        end_process_on_failure(control, _FAREWELL_S)
        _post(control, "memory", _memory(settings))
        said = [json.loads(control.read(f"memory/{rank}", settings.rank_join_s)) for rank in range(settings.ranks)]
        places = Counter(each["place"] for each in said)
        return [each["bytes"] // places[each["place"]] for each in said]

    def open(self, tokens: int, kept_pages: int) -> RankGroup:
        """Have all load, with caches of so many tokens of which so many pages may be kept; the group to load with."""
        assert self._control is not None
        _post(self._control, "plan", {"tokens": tokens, "kept_pages": kept_pages})
        self._group = RankGroup(_wire(self._control, self._settings), self._control, self._facts)
        return self._group

    def loaded(self) -> None:
        """Wait until every rank has loaded."""
        assert self._group is not None
        self._group.meet("loading", self._settings.rank_load_s)

    def states(self) -> list[str]:
        """In a word or two, how far each rank but 0 is."""
        return [self._state(rank) for rank in range(1, self._settings.ranks)]

    def _state(self, rank: int) -> str:
        control, key = self._control, f"state/{rank}"
        if control is None:
            return "not joined"
        return control.read(key, 0).decode() if control.has([key]) else "joined"

    def _still_wanted(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        self._watch()

    def check(self) -> None:
        """Raise what ended the ranks, if anything did."""
        if self._control is not None:
            self._control.check()

    def close(self, error: BaseException | None = None, *, idle: bool) -> None:
        """Let the other ranks end: in order, or telling them why not. idle: no work is under way, in which they would
        wait for this one."""
        if error is not None:
            reason = str(error) if isinstance(error, TfglmError) else f"{type(error).__name__}: {error}"
            self._stopped = RanksError(f"rank 0 has ended: {reason}")
        elif not idle:
            self._stopped = RanksError("rank 0 was stopped before it was idle")
        self._gathered.wait(_FAREWELL_S)  # those that have joined are told by the thread that waits for the others
        self._listener.close()
        if self._control is not None:
            if self._stopped is not None:
                self._control.fail(self._stopped)
            if self._group is not None:
                self._group.close()
            self._control.close()


def follow(path: Path, settings: Settings, leader: tuple[str, int]) -> None:
    """A rank other than 0, from joining to the end that rank 0 sets. settings.device and wire have been chosen, torch's
    threads set. Called from the main thread: from joining on, SIGTERM and SIGINT end all ranks. Raises RanksError when
    the ranks end, CheckpointError and ConfigError."""
    with Checkpoint.open(path) as checkpoint:
        facts = facts_of(checkpoint, settings)
        signals = _Signals(settings.rank)
        control = join(
            leader,
            settings.rank,
            settings.ranks,
            facts,
            limit_s=settings.rank_join_s,
            watch=signals.check,
            timing=_timing(settings),
        )
        end_process_on_failure(control)
        signals.end(control)
        guard = Guard(round(settings.guard_gib * GIB), round(settings.floor_gib * GIB), _short_of_memory(control))
        try:
            guard.start()
            _post(control, "memory", _memory(settings))
            plan = json.loads(control.read("plan", settings.rank_join_s))
            group = RankGroup(_wire(control, settings), control, json.dumps(facts, sort_keys=True))
            model = load_model(
                checkpoint,
                tokens=plan["tokens"],
                device=settings.device,
                kv=settings.kv,
                dense=settings.dense,
                head=settings.head,
                progress=_reported(control),
                group=group,
                cp=settings.cp,
            )
            drafter = load_drafter(drafter_kind(settings, checkpoint.config), checkpoint, model, settings)
            disk = disk_follower(path, model, plan["kept_pages"], settings, drafter.planes if drafter else ())
        except RanksError:
            raise
        except BaseException as error:
            control.fail(RanksError(f"rank {settings.rank} could not load: {error}"))
            raise
    try:
        group.meet("loading", settings.rank_load_s)
        control.post(f"state/{settings.rank}", b"ready")
        log.info("rank %d is ready", settings.rank)
        handlers = {**model.handlers(), **(drafter.handlers(model) if drafter else {})}
        follow_messages(group, {**handlers, **(disk.handlers() if disk else {})})
    finally:
        guard.stop()
        if disk:
            disk.close()
        model.close()
        group.close()


class _Signals:
    """What a rank other than 0 makes of SIGTERM and SIGINT: the others cannot go on without it, and should not have to
    guess why it has gone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._control: Control | None = None
        self._stopped: RanksError | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def check(self) -> None:
        """Raises RanksError once a signal has come."""
        if self._stopped is not None:
            raise self._stopped

    def end(self, control: Control) -> None:
        """From now on a signal ends all ranks."""
        self._control = control
        if self._stopped is not None:
            control.fail(self._stopped)

    def _received(self, number: int, _: object) -> None:
        self._stopped = RanksError(f"rank {self._rank} was stopped by {signal.Signals(number).name}")
        if self._control is not None:
            self._control.fail(self._stopped)


def _short_of_memory(control: Control) -> Callable[[LowWater], None]:
    def act(low: LowWater) -> None:
        control.fail(RanksError(f"rank {control.rank} ran short of memory (E_MEMORY): {low} were available"))

    return act


def _reported(control: Control) -> Callable[[int, int], None]:
    """Progress of a load, in steps, where rank 0 can read it."""
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        step = done * _STEPS // max(total, 1)
        if step != told:
            told = step
            control.post(f"state/{control.rank}", f"loading, {100 * step // _STEPS} %".encode())

    return progress


def _memory(settings: Settings) -> dict[str, Any]:
    """What this rank may use, and the machine or GPU that it is of: ranks on one share it."""
    place = f"{platform.node()} {_boot()}"
    if settings.device == "cuda":
        place += f" {torch.cuda.get_device_properties().uuid}"
    return {"bytes": memory_budget(settings.device), "place": place}


def _boot() -> str:
    """Differs between machines of one name."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


def _post(control: Control, what: str, value: dict[str, Any]) -> None:
    key = what if what == "plan" else f"{what}/{control.rank}"
    control.post(key, json.dumps(value).encode())


def _timing(settings: Settings) -> Timing:
    return dataclasses.replace(Timing(), lost_s=settings.rank_lost_s, step_s=settings.rank_step_s)


def _wire(control: Control, settings: Settings) -> Wire:
    log.info("tensors travel through %s", settings.wire)
    return open_wire(settings.wire, control, limit_s=settings.rank_step_s)


def take_gpu(settings: Settings) -> None:
    """Of several GPUs in one machine, ranks take one each."""
    if settings.device == "cuda" and settings.ranks > 1:
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
