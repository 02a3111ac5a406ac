"""`tfglm plan PATH`: what every rank would hold, and the largest window that fits. Loads nothing, needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfglm.cli.playbooks import add_arguments, play
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.settings import Settings, flag_name, flags, help_text

if TYPE_CHECKING:
    from tfglm.memory.demand import Planned
    from tfglm.memory.plan import Plan

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # GLM-5.3 on three DGX Sparks, as its published recipe runs it: overhead as measured there, less the captured
    # windows, which are a term of their own here; available as on the fullest of its idle machines.
    "full": {
        "ranks": 3,
        "cp": True,
        "context": 499712,
        "parallel": 1,
        "kv": "fp4",
        "dense": "q4",
        "head": "fp8",
        "prefill_rows": 3072,
        "kept_gib": 1.0,
        "graphs_gib": 2.9,
        "overhead_gib": 7.1,
        "floor_gib": 4.0,
        "guard_gib": 3.0,
        "available_gib": 111.8,
    },
    # GLM-5.3-Flash on two, as its published recipe runs it: two windows of a million tokens in one pool, and memory
    # planned against what is free beside the reserve of 9.5, which here is overhead and floor.
    "flash": {
        "ranks": 2,
        "context": 1048576,
        "parallel": 2,
        "kv": "fp8",
        "dense": "q8",
        "head": "q8",
        "drafter": "dflash2",
        "prefill_rows": 4096,
        "kept_gib": 3.6,
        "overhead_gib": 5.5,
        "floor_gib": 4.0,
        "guard_gib": 2.5,
        "available_gib": 109.0,
    },
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what a model needs in memory, before anything is loaded",
        description="Print what every rank would hold and the largest window that fits; exit code 1 if it does not.",
    )
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="checkpoint folder")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="a published model and cluster instead of a folder, with its settings"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="for an inventory: cables, memory and command line of every rank, and what tfglm up would change",
    )
    add_arguments(parser)
    for f in flags("plan"):
        parser.add_argument(flag_name(f.name), metavar="VALUE", help=help_text(f))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.memory.flash import FlashInventory
    from tfglm.memory.info import read_memory
    from tfglm.memory.inventory import of_folder, published
    from tfglm.memory.plan import GIB, GPU_CHANGES, make_plan, require

    if args.cluster:
        return play("plan.yml", args)
    if (args.path is None) == (args.preset is None):
        raise ConfigError("tfglm plan takes one of a checkpoint folder, --preset full, --preset flash and --cluster")
    given = {f.name: getattr(args, f.name) for f in flags("plan")}
    settings = Settings.from_sources(given, defaults=PRESETS.get(args.preset, {}))
    inventory: Planned
    if args.path is not None:
        inventory = of_folder(args.path)
    else:
        inventory = FlashInventory() if args.preset == "flash" else published(args.preset)
    each = round(settings.available_gib * GIB) or read_memory().budget
    plan = make_plan(inventory, settings, [each] * settings.ranks)
    refusal = ""
    try:
        require(plan, inventory, settings, GPU_CHANGES)
    except MemoryShortError as error:
        refusal = error.message
    if args.json:
        print(json.dumps(as_json(plan, settings, refusal), indent=2))
    else:
        _print(plan, settings)
        if args.preset is not None:
            print(f"reckoned with {_assumed(args.preset, settings)}")
    if refusal and not args.json:
        raise MemoryShortError(refusal)
    return 1 if refusal else 0


def _assumed(preset: str, settings: Settings) -> str:
    """The settings of a preset as they were reckoned with, as one would give them."""
    words = []
    for name in PRESETS[preset]:
        value = getattr(settings, name)
        words.append(f"{flag_name(name)} {int(value) if isinstance(value, bool) else value}")
    return " ".join(words)


def as_json(plan: Plan, settings: Settings, refusal: str) -> dict[str, Any]:
    """The plan with every sum that the table shows; sizes in bytes."""
    ranks = [
        dataclasses.asdict(rank)
        | {"weights": rank.weights, "total": rank.total, "need": rank.need, "lowest_free": rank.lowest_free}
        for rank in plan.ranks
    ]
    return {
        "model": plan.name,
        "settings": {f.name: getattr(settings, f.name) for f in flags("plan")},
        "fits": not refusal,
        "refusal": refusal,
        "context": plan.context,
        "largest_context": plan.largest,
        "bytes_per_token": plan.bytes_per_token,
        "shortfall": plan.shortfall,
        "floor": plan.floor,
        "ranks": ranks,
    }


def _print(plan: Plan, settings: Settings) -> None:
    from rich.console import Console
    from rich.table import Table

    from tfglm.memory.plan import GIB

    rows = (
        ("routed experts", "experts"),
        ("other layers", "dense"),
        ("embedding and head", "vocabulary"),
        ("drafter", "drafter"),
        ("weights", "weights"),
        ("caches", "caches"),
        ("states of requests", "states"),
        ("copy indexes", "copies"),
        ("buffers", "buffers"),
        ("exchanges", "exchanges"),
        ("captured windows", "graphs"),
        ("or, while loading, staging", "staging"),
        ("engine", "total"),
        ("kept prompt states", "kept"),
        ("disk cache", "disk"),
        ("overhead", "overhead"),
        ("needed", "need"),
        ("available", "available"),
        ("lowest free", "lowest_free"),
    )
    sums = {"weights", "total", "need", "lowest_free"}
    table = Table("GiB", *(f"rank {rank.rank}" for rank in plan.ranks), title=f"{plan.name}, ranks: {settings.ranks}")
    for column in table.columns[1:]:
        column.justify = "right"
    for title, field in rows:
        values = (f"{getattr(rank, field) / GIB:.2f}" for rank in plan.ranks)
        table.add_row(title, *values, style="bold" if field in sums else "", end_section=field in sums)
    console = Console()
    console.print(table)
    console.print(
        f"window {settings.parallel} x {plan.context} tokens, {plan.bytes_per_token} bytes a token"
        f"{f' on one of {settings.ranks} ranks' if settings.cp else ''}; the largest that leaves "
        f"{plan.floor / GIB:.1f} GiB free is {plan.largest}"
        f"{f'; {settings.context} is more than the model was made for' if settings.context > plan.context else ''}",
        highlight=False,
        soft_wrap=True,
    )
