"""`tfglm quantize SRC DST`: write a checkpoint with its routed experts in EXL3."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfglm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tfglm.checkpoint.store import Checkpoint
    from tfglm.quantize.recipe import Recipe
    from tfglm.quantize.run import Report


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="quantise a checkpoint's routed experts to EXL3",
        description="Write the checkpoint SRC into the folder DST with its routed experts in EXL3, each expert at the "
        "width that pays most for the mean asked for. A run that was stopped goes on where it was.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="BF16 checkpoint folder")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to write into; made if it does not exist")
    parser.add_argument("--bits", type=float, default=2.75, help="mean width of an expert's weight (default: 2.75)")
    parser.add_argument(
        "--widths",
        default="2,3,4",
        metavar="LIST",
        help="widths an expert may have (default: 2,3,4; one: all the same)",
    )
    parser.add_argument(
        "--codebook", default="mcg", choices=("mcg", "mul1", "3inst"), help="mul1 has half widths too (default: mcg)"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text to calibrate on: paragraphs, or .jsonl with {"messages": [...]} or {"text": ...} a line; '
        "the built-in text is short and meant for small models",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=512000, metavar="N", help="tokens of it to use (default: 512000)"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")
    parser.add_argument(
        "--own-scales", action="store_true", help="input scales of its own for every matrix, not one set a layer"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto takes a GPU if there is one (default)"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: one a core)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantise with a progress bar, then print the report; returns the exit status. Raises TfglmError."""
    import torch
    from rich.console import Console

    from tfglm.checkpoint.store import Checkpoint
    from tfglm.quantize.recipe import Recipe

    widths = _widths(args.widths)
    recipe = Recipe(args.bits, widths, args.codebook, shared_suh=not args.own_scales)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    console = Console(stderr=True)
    with Checkpoint.open(args.source) as checkpoint:
        report = _quantise(checkpoint, args, recipe, console)
    _print(report, console)
    console.print(f"{args.target}: {report.nbytes / 1e6:,.1f} MB, experts of {report.bits:.4g} bits", highlight=False)
    return 0


def _quantise(checkpoint: Checkpoint, args: argparse.Namespace, recipe: Recipe, console: Console) -> Report:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.quantize.run import quantise_checkpoint
    from tfglm.quantize.text import conversations, sequences
    from tfglm.server.template import ChatTemplate, TemplateRefusedError

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return template.render(messages, add_generation_prompt=False)
        except TemplateRefusedError as error:
            raise ConfigError(f"the chat template refuses a conversation of the calibration text: {error}") from None

    template, tokenizer = ChatTemplate.from_folder(args.source), Tokenizer.from_folder(args.source)
    tokens = sequences(
        conversations(args.calibration),
        render,
        tokenizer.encode,
        length=min(args.length, checkpoint.config.max_position_embeddings),
        tokens=args.calibration_tokens,
    )
    columns = (
        TextColumn("quantising experts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    told = 0

    def show(done: int, total: int) -> None:
        nonlocal told
        bar.update(task, completed=done, total=total)
        # A log gets a line every tenth of the work, a terminal the bar.
        if not console.is_terminal and 10 * done // total > told:
            told = 10 * done // total
            console.print(f"quantised {done} of {total} experts", highlight=False)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("experts", total=None)
        return quantise_checkpoint(
            checkpoint,
            args.target,
            recipe,
            tokens,
            device=args.device,
            progress=show,
        )


def _print(report: Report, console: Console) -> None:
    from rich.table import Table

    from tfglm.quantize.report import table

    head, *rows = table(report)
    shown = Table(*head)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def _widths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--widths {text}: numbers with commas between them are needed, such as 2,3,4") from None
