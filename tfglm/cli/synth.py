"""`tfglm synth`: write a random checkpoint in the published layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError

_EXL3 = "exl3:"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "synth",
        help="write a random checkpoint",
        description="Write a checkpoint with random weights in the exact layout of the published ones. "
        "The same preset, seed and fields give the same bytes everywhere.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write into; made if it does not exist")
    parser.add_argument(
        "--preset", default="tiny", help="tiny (19 MB), small (190 MB) or full-layers (9.6 GB; default: tiny)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, other weights (default: 0)")
    parser.add_argument("--layers", type=int, metavar="N", help="short for --set num_hidden_layers=N")
    parser.add_argument(
        "--experts",
        action="append",
        default=[],
        metavar="N|exl3:BITS",
        help="a number is short for --set n_routed_experts=N; exl3:2.75 makes the routed experts EXL3, each of 2, 3 or "
        "4 bits with that mean; may be given twice",
    )
    parser.add_argument(
        "--set",
        dest="fields",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="replace a field of config.json; VALUE is JSON or plain text",
    )
    parser.add_argument(
        "--shard-mib",
        type=int,
        metavar="N",
        help="largest shard in MiB (default: a third of the checkpoint, at most 5120)",
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that is in OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint with a progress bar; returns the exit status. Raises TfglmError."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tfglm.checkpoint.synth import write_checkpoint

    overrides, expert_bits = _overrides(args), _expert_bits(args)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"writing {args.out}", total=None)
        config = write_checkpoint(
            args.out,
            args.preset,
            args.seed,
            shard_bytes=None if args.shard_mib is None else args.shard_mib << 20,
            expert_bits=expert_bits,
            force=args.force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **overrides,
        )
    shards = [file.stat().st_size for file in args.out.glob("*.safetensors")]
    console.print(
        f"{args.out}: {sum(shards) / 1e6:,.1f} MB in {len(shards)} shards, {config.num_hidden_layers} layers, "
        f"{config.n_routed_experts} experts, window {config.max_position_embeddings}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for text in args.fields:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: FIELD=VALUE is needed, such as --set index_topk=64")
        try:
            overrides[name] = json.loads(value)
        except ValueError:
            overrides[name] = value
    if args.layers is not None:
        overrides["num_hidden_layers"] = args.layers
    for text in args.experts:
        if not text.startswith(_EXL3):
            try:
                overrides["n_routed_experts"] = int(text)
            except ValueError:
                raise ConfigError(
                    f"--experts {text}: a number of experts or exl3:BITS, such as exl3:2.75, is needed"
                ) from None
    return overrides


def _expert_bits(args: argparse.Namespace) -> float | None:
    for text in args.experts:
        if text.startswith(_EXL3):
            try:
                return float(text.removeprefix(_EXL3))
            except ValueError:
                raise ConfigError(f"--experts {text}: a mean width is needed, such as exl3:2.75") from None
    return None
