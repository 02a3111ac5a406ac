"""From an open checkpoint to a started engine: checks that cost nothing, ranks, the memory plan, weights, drafter."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tfglm.cache.identity import checkpoint_digest
from tfglm.checkpoint.config import GenerationDefaults
from tfglm.checkpoint.store import Checkpoint
from tfglm.cli.session import Session
from tfglm.drafts.base import Drafter
from tfglm.drafts.choose import load_drafter, prepare, sound_costs
from tfglm.drafts.copy import CopyCorpus
from tfglm.drafts.costs import TEXT, Costs
from tfglm.drafts.kind import drafter_kind
from tfglm.drafts.learned import Learned
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.drafts.trace import TracingDrafter
from tfglm.engine.device import memory_budget
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.keep import prompt_states
from tfglm.engine.spread import Leader
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import CheckpointError, ConfigError
from tfglm.memory.info import read_memory
from tfglm.memory.inventory import Inventory
from tfglm.memory.plan import CPU_CHANGES, GIB, GPU_CHANGES, LARGEST_DEFAULT_CONTEXT, Plan, make_plan, require
from tfglm.memory.window import settle_window, state_folder, window_key
from tfglm.models import load as models
from tfglm.models.glm53 import Glm53
from tfglm.models.taps import Taps
from tfglm.server.info import ModelInfo
from tfglm.server.smoke import greeting
from tfglm.server.state import Served
from tfglm.server.template import ChatTemplate
from tfglm.settings import Settings, flags

log = logging.getLogger("tfglm.serve")

_OF_THE_WINDOW = ("device", "copy", "copy_corpus", *(f.name for f in flags("plan")))
"""Settings that a window depends on: those that the memory plan reads."""


def load(checkpoint: Checkpoint, settings: Settings, session: Session) -> Served:
    """The loaded model behind a started engine; runs in a thread of its own while /health answers "loading"."""
    path = checkpoint.path
    torch.set_num_threads(settings.threads)
    tokenizer, template = Tokenizer.from_folder(path), ChatTemplate.from_folder(path)
    defaults = GenerationDefaults.from_file(path / "generation_config.json")
    eos = tuple(dict.fromkeys(checkpoint.config.eos_token_ids + defaults.eos_token_ids))
    _check_tokenizer(checkpoint, tokenizer, eos)
    name = settings.served_name or path.resolve().name
    if not name.isprintable():
        raise ConfigError(f"the model's name in the API would be {name!a}; give it a printable one with --served-name")
    budgets = session.leader.meet(checkpoint) if session.leader else [memory_budget(settings.device)]
    plan = _checked_plan(checkpoint, settings, budgets)
    session.watch_memory(round(settings.guard_gib * GIB), plan.floor)
    settings = dataclasses.replace(settings, context=plan.context)
    greeting(tokenizer, template, plan.context)  # a window too small for any chat is found before minutes of loading
    session.model = model = _model(checkpoint, plan, settings, session.leader)
    kind = drafter_kind(settings, checkpoint.config)
    drafter = load_drafter(kind, checkpoint, model, settings)
    states = prompt_states(path, model, plan.kept_pages, settings, drafter.planes if drafter else ())
    if session.leader:
        session.leader.loaded()
    drafting = _drafting(drafter, model, tokenizer, settings, _learned(kind, path, settings))
    if drafter and drafter.planes and not (drafting and drafting.planes):
        states.write_no_more()
    session.engine = engine = Engine(model, tokenizer, settings, eos, drafting, states)
    engine.start()
    return Served(engine, tokenizer, template, ModelInfo(name, plan.context, defaults))


def _check_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
    path, config = checkpoint.path, checkpoint.config
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path / 'tokenizer.json'} has {tokenizer.vocab_size} tokens; config.json's vocab_size has room for "
            f"{config.vocab_size}: they belong to different models"
        )
    if max(eos) >= tokenizer.vocab_size:
        raise CheckpointError(
            f"{path / 'tokenizer.json'} has {tokenizer.vocab_size} tokens; eos_token_id of config.json or "
            f"generation_config.json is {max(eos)}: no reply would end, they belong to different models"
        )


def _checked_plan(checkpoint: Checkpoint, settings: Settings, budgets: Sequence[int]) -> Plan:
    """What every rank will hold; refused if one of them has too little memory for it. budgets: bytes that each has."""
    bits = {name: linear.bits for name, linear in checkpoint.linears.items()}
    inventory = Inventory(checkpoint.path.resolve().name, checkpoint.config, bits)
    plan = make_plan(inventory, settings, budgets)
    if not settings.context and plan.largest:
        window = _kept_window(checkpoint, settings, plan.largest)
        plan = make_plan(inventory, dataclasses.replace(settings, context=window), budgets)
    if settings.context > plan.context:
        log.warning(
            "W_CONTEXT: --context is %d; the model was made for %d, which is the window now",
            settings.context,
            plan.context,
        )
    require(plan, inventory, settings, GPU_CHANGES if settings.device == "cuda" else CPU_CHANGES)
    return plan


def _kept_window(checkpoint: Checkpoint, settings: Settings, largest: int) -> int:
    """The window where none is asked for: that of earlier starts with the same settings, checkpoint and memory. On a
    GPU all that fits; on a CPU, which is seldom there for a model alone, no more than LARGEST_DEFAULT_CONTEXT."""
    own = {name: getattr(settings, name) for name in _OF_THE_WINDOW}
    facts = {**own, "checkpoint": checkpoint_digest(checkpoint.path), "memory": read_memory().total}
    longest = checkpoint.config.max_position_embeddings
    limit = longest if settings.device == "cuda" else min(LARGEST_DEFAULT_CONTEXT, longest)
    return settle_window(window_key(facts), largest, limit)


def _model(checkpoint: Checkpoint, plan: Plan, settings: Settings, leader: Leader | None) -> Glm53:
    """The model, or this rank's part of it; the others load theirs."""
    columns = (TextColumn("loading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=checkpoint.nbytes, name=checkpoint.path.name)
        return models.load_model(
            checkpoint,
            tokens=plan.tokens,
            device=settings.device,
            kv=settings.kv,
            dense=settings.dense,
            head=settings.head,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            group=leader.open(plan.tokens, plan.kept_pages) if leader else None,
            cp=settings.cp,
        )


def _learned(kind: str, checkpoint: Path, settings: Settings) -> Learned:
    """What drafting learns of this model and drafter, where the next start finds it."""
    drafter = checkpoint_digest(Path(settings.drafter_path)) if settings.drafter_path else ""
    return Learned(state_folder(), f"{kind} {drafter} {checkpoint_digest(checkpoint)}")


def _drafting(
    drafter: Drafter | None,
    model: Glm53,
    tokenizer: Tokenizer,
    settings: Settings,
    learned: Learned,
) -> Drafting | None:
    """Windows timed and the policy made of it; None when nothing is to be drafted."""
    if settings.draft_trace:
        tracing = TracingDrafter(drafter, Path(settings.draft_trace))
        model.prepare(settings.parallel, settings.context, tracing.taps)
        nothing = Policy(Costs((1.0,)))
        speculator = Speculator(tracing, nothing, copy=False, vocab_size=tokenizer.vocab_size)
        return Drafting(speculator, settings.draft_noise)
    if drafter is None and not settings.copy:
        model.prepare(settings.parallel, settings.context, Taps())
        return None
    prepare(model, drafter, settings.context)
    drafter, costs = sound_costs(model, drafter, tokenizer.encode(TEXT), settings.context)
    log.info(
        "drafts: %s%s; a window of 1 row takes %.1f ms, of %d rows %.1f ms; a draft %.1f ms and %.1f ms a token more",
        drafter.name if drafter else "none",
        " and copies" if settings.copy else "",
        costs.verify_ms[0],
        len(costs.verify_ms),
        costs.verify_ms[-1],
        costs.first_ms,
        costs.next_ms,
    )
    corpus = CopyCorpus(settings.copy_corpus) if settings.copy_corpus else None
    policy = Policy(costs, learned)
    speculator = Speculator(drafter, policy, copy=settings.copy, vocab_size=tokenizer.vocab_size, corpus=corpus)
    return Drafting(speculator, settings.draft_noise)
