"""`tfglm inspect PATH`: what a checkpoint holds, and what each of N ranks would hold of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Column, Table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Check every header of a checkpoint and show bytes by kind, the widths of quantised experts by "
        "layer, and the weights each rank would hold.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    parser.add_argument("--ranks", type=int, default=3, help="ranks to spread the weights over (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print to stdout; returns the exit status. Raises TfglmError."""
    facts = inspect(args.path, args.ranks)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    from rich.console import Console

    console = Console()
    model = facts["model"]
    console.print(
        f"{args.path}: {model['layers']} layers{', MTP layer' if model['mtp'] else ''}, {model['experts']} experts, "
        f"{model['parameters'] / 1e6:,.1f} million parameters in {_size(model['nbytes'])}",
        highlight=False,
        soft_wrap=True,
    )
    for table in _tables(facts):
        console.print(table)
    return 0


def inspect(path: Path, ranks: int) -> dict[str, Any]:
    """The facts as plain values. Raises TfglmError for a checkpoint that cannot be opened or an impossible rank."""
    from tfglm.checkpoint.contents import kinds, layer_widths
    from tfglm.checkpoint.store import Checkpoint
    from tfglm.memory.inventory import of_folder
    from tfglm.memory.weights import layout_of, weight_bytes

    with Checkpoint.open(path) as checkpoint:
        config = checkpoint.config
        found = kinds(config, checkpoint.entries, checkpoint.linears)
        widths = layer_widths(checkpoint.linears)
    inventory = of_folder(path)
    shares = weight_bytes(inventory, layout_of(inventory, ranks), dense="bf16", head="bf16")
    return {
        "model": {
            "layers": config.num_hidden_layers,
            "mtp": bool(config.num_nextn_predict_layers),
            "experts": config.n_routed_experts,
            "parameters": sum(kind.parameters for kind in found),
            "nbytes": sum(kind.nbytes for kind in found),
        },
        "kinds": [dataclasses.asdict(kind) | {"bits": kind.bits} for kind in found],
        "layers": [dataclasses.asdict(layer) for layer in widths],
        "ranks": [dataclasses.asdict(share) for share in shares],
    }


def _tables(facts: dict[str, Any]) -> list[Table]:
    from rich.table import Table

    kinds = Table("kind", "tensors", "parameters", "size", "bits", "stored as", title="Bytes by kind")
    _align_right(kinds.columns[1:-1])
    for kind in facts["kinds"]:
        stored = ", ".join(f"{name} {_size(size)}" for name, size in kind["stored"].items())
        kinds.add_row(
            kind["name"],
            str(kind["tensors"]),
            f"{kind['parameters']:,}",
            _size(kind["nbytes"]),
            f"{kind['bits']:.3f}",
            stored,
        )
    tables = [kinds]
    if facts["layers"]:
        layers = Table("layer", "mean bits", "matrices of each width", "codebook", "gate = up", title="EXL3 experts")
        for layer in facts["layers"]:
            layers.add_row(
                str(layer["layer"]),
                f"{layer['mean']:.3f}",
                ", ".join(f"{count} x {width}" for width, count in layer["widths"].items()),
                ", ".join(layer["codebooks"]),
                "yes" if layer["paired"] else "no",
            )
        tables.append(layers)
    ranks = Table("rank", "experts", "dense", "vocabulary", "MTP", "all", title="Weights of each rank")
    _align_right(ranks.columns[1:])
    for number, rank in enumerate(facts["ranks"]):
        parts = [rank[name] for name in ("experts", "dense", "vocabulary", "mtp")]
        ranks.add_row(str(number), *(_size(part) for part in (*parts, sum(parts))))
    tables.append(ranks)
    return tables


def _align_right(columns: Sequence[Column]) -> None:
    for column in columns:
        column.justify = "right"


def _size(nbytes: int) -> str:
    """Decimal units, as in the files' own sizes."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 2), ("kB", 1e3, 1)):
        if nbytes >= size:
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes} B"
