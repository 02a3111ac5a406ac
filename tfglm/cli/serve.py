"""`tfglm serve [PATH]`: serve a checkpoint, with all ranks of it on this machine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from tfglm.bundled import DRAFTER, MODEL
from tfglm.settings import Settings, flag_name, flags, help_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve a checkpoint behind an OpenAI-compatible API. Each setting is an environment variable too.",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", nargs="?", default=MODEL,
        help=f"checkpoint folder (default: the tiny model that comes with tfglm, {MODEL.name})",
    )  # fmt: skip
    for f in flags("serve"):
        parser.add_argument(flag_name(f.name), metavar="VALUE", help=help_text(f))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.cli.local_ranks import LocalRanks
    from tfglm.cli.serving import serve_model, start_logging

    given = {f.name: getattr(args, f.name) for f in flags("serve")}
    settings = Settings.from_sources(given | {"rank": 0})
    settings = with_drafter(args.path, settings)
    start_logging(settings)
    return serve_model(args.path, settings, LocalRanks(args.path) if settings.ranks > 1 else None)


def with_drafter(path: Path, settings: Settings) -> Settings:
    """The settings, with the folder of the drafter that the tiny model comes with where they leave that open."""
    if path.resolve() != MODEL.resolve() or settings.drafter not in ("auto", "dspark") or settings.drafter_path:
        return settings
    return dataclasses.replace(settings, drafter_path=str(DRAFTER))
