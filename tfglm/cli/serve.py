"""`tfglm serve PATH`: check everything that can be checked, take the port, load, try one request, serve."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tfglm.errors import MemoryShortError
from tfglm.settings import Settings, flag_name, flags, help_text

if TYPE_CHECKING:
    from tfglm.checkpoint.store import Checkpoint
    from tfglm.engine.drafting import Drafting
    from tfglm.engine.engine import Engine
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.memory.guard import Guard, LowWater
    from tfglm.memory.plan import Plan
    from tfglm.models.glm53 import Glm53
    from tfglm.server.state import Served

log = logging.getLogger("tfglm.serve")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve a checkpoint behind an OpenAI-compatible API. Each setting is an environment variable too.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    for f in flags("serve"):
        parser.add_argument(flag_name(f.name), metavar="VALUE", help=help_text(f))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = Settings.from_sources({f.name: getattr(args, f.name) for f in flags("serve")})
    # Other libraries' everyday news (torch has some at exit) would only hide our own.
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tfglm").setLevel(settings.log_level.upper())
    from tfglm.server.run import bind, serve

    listener = bind(settings)
    started: list[Engine] = []
    guard: Guard | None = None
    try:
        # Imported after the port is taken: torch needs seconds, and a busy port should be reported at once.
        from tfglm.checkpoint.store import Checkpoint
        from tfglm.drafts.kind import drafter_kind
        from tfglm.engine.device import choose_device, memory_budget
        from tfglm.memory.guard import Guard
        from tfglm.memory.inventory import Inventory
        from tfglm.memory.plan import CPU_CHANGES, GIB, GPU_CHANGES, make_plan, require

        device = choose_device(settings.device, settings.kv, settings.dense, settings.head)
        settings = dataclasses.replace(settings, device=device)
        with Checkpoint.open(args.path) as checkpoint:
            kind = drafter_kind(settings, checkpoint.config)
            bits = {name: linear.bits for name, linear in checkpoint.linears.items()}
            inventory = Inventory(checkpoint.path.resolve().name, checkpoint.config, bits)
            plan = make_plan(inventory, settings, [memory_budget(device)])
            if settings.context > plan.context:
                log.warning(
                    "W_CONTEXT: --context is %d; the model was made for %d, which is the window now",
                    settings.context,
                    plan.context,
                )
            require(plan, inventory, settings, GPU_CHANGES if device == "cuda" else CPU_CHANGES)
            guard = Guard(round(settings.guard_gib * GIB), plan.floor, _stop_in_order)
            guard.start()
            serve(listener, settings, lambda: _load(checkpoint, plan, kind, settings, started), _announce)
    finally:
        for engine in started:
            engine.stop()
        listener.close()
        if guard is not None:
            guard.stop()
            log.info("the least memory available was %s", guard.low)
    if guard.tripped:
        raise MemoryShortError(
            f"the server stopped because memory ran short: {guard.low} were available, --guard-gib is "
            f"{settings.guard_gib}; free memory, or lower --context or --parallel"
        )
    return 0


def _stop_in_order(low: LowWater) -> None:
    """What SIGTERM does: no new requests, those running get their time, then the end."""
    os.kill(os.getpid(), signal.SIGTERM)


def _load(checkpoint: Checkpoint, plan: Plan, kind: str, settings: Settings, started: list[Engine]) -> Served:
    """The loaded model behind a started engine; runs in a thread of its own while /health answers "loading"."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from tfglm.checkpoint.config import GenerationDefaults
    from tfglm.engine.engine import Engine
    from tfglm.engine.keep import prompt_states
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.errors import CheckpointError, ConfigError
    from tfglm.models.glm53 import load_model
    from tfglm.server.info import ModelInfo
    from tfglm.server.smoke import greeting
    from tfglm.server.state import Served
    from tfglm.server.template import ChatTemplate

    path, config = checkpoint.path, checkpoint.config
    settings = dataclasses.replace(settings, context=plan.context)
    defaults = GenerationDefaults.from_file(path / "generation_config.json")
    eos = tuple(dict.fromkeys(config.eos_token_ids + defaults.eos_token_ids))
    tokenizer, template = Tokenizer.from_folder(path), ChatTemplate.from_folder(path)
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
    name = settings.served_name or path.resolve().name
    if not name.isprintable():
        raise ConfigError(f"the model's name in the API would be {name!a}; give it a printable one with --served-name")
    greeting(tokenizer, template, plan.context)  # a window too small for any chat is found before minutes of loading
    torch.set_num_threads(settings.threads or _cores())
    columns = (TextColumn("loading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=checkpoint.nbytes, name=path.name)
        model = load_model(
            checkpoint,
            tokens=plan.tokens,
            device=settings.device,
            kv=settings.kv,
            dense=settings.dense,
            head=settings.head,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    drafting = _drafting(kind, checkpoint, model, tokenizer, settings)
    states = prompt_states(path, model, plan.kept_pages, settings, drafting.planes if drafting else ())
    engine = Engine(model, tokenizer, settings, eos, drafting, states)
    engine.start()
    started.append(engine)
    return Served(engine, tokenizer, template, ModelInfo(name, plan.context, defaults))


def _drafting(
    kind: str, checkpoint: Checkpoint, model: Glm53, tokenizer: Tokenizer, settings: Settings
) -> Drafting | None:
    """The drafter, loaded, and windows timed; None when nothing is to be drafted."""
    from tfglm.drafts.choose import load_drafter, measured_costs
    from tfglm.drafts.copy import CopyCorpus
    from tfglm.drafts.costs import TEXT, Costs
    from tfglm.drafts.policy import Policy
    from tfglm.drafts.speculator import Speculator
    from tfglm.drafts.trace import TracingDrafter
    from tfglm.engine.drafting import Drafting

    if settings.draft_trace:
        tracing = TracingDrafter(load_drafter(kind, checkpoint, model, settings), Path(settings.draft_trace))
        nothing = Policy(Costs((1.0,)))
        speculator = Speculator(tracing, nothing, copy=False, vocab_size=tokenizer.vocab_size)
        return Drafting(speculator, settings.draft_noise)
    if kind == "none" and not settings.copy:
        return None
    drafter = load_drafter(kind, checkpoint, model, settings)
    costs = measured_costs(model, drafter, tokenizer.encode(TEXT))
    log.info(
        "drafts: %s%s; a window of 1 row takes %.1f ms, of %d rows %.1f ms; a draft %.1f ms and %.1f ms a token more",
        kind,
        " and copies" if settings.copy else "",
        costs.verify_ms[0],
        len(costs.verify_ms),
        costs.verify_ms[-1],
        costs.first_ms,
        costs.next_ms,
    )
    corpus = CopyCorpus(settings.copy_corpus) if settings.copy_corpus else None
    speculator = Speculator(drafter, Policy(costs), copy=settings.copy, vocab_size=tokenizer.vocab_size, corpus=corpus)
    return Drafting(speculator, settings.draft_noise)


def _cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _announce(served: Served, url: str) -> None:
    """The one line on stdout. A reader that is gone or a full disk is no reason to drop a model that took minutes."""
    line = f"tfglm serves {served.info.name}, window {served.info.context} tokens, at {url}/v1 (Ctrl-C stops it)"
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("stdout cannot be written (%s): %s", error.strerror, line)
        # What is left in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
