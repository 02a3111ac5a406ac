"""`python -m training.run OUT`: train, stop by itself, export. Started again with the same OUT it goes on.

The budget is seconds of training (--seconds; those of earlier pieces count) or steps (--steps, for exact repeats).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training.data.vocabulary import trained_tokenizer
from training.export import export, load_tensors
from training.feed import Feed, Place
from training.model import Trained
from training.plan import PLANS, Phase, Plan
from training.shape import MICRO, TINY, config_of, raw_config
from training.trainer import Trainer, save

STATE = "state.pt"
LOG = "log.jsonl"
_LOG_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the state, the log and the exported checkpoint")
    parser.add_argument("--plan", choices=sorted(PLANS), default="tiny")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--seconds", type=float, help="budget of the whole training, compilation of this piece included"
    )
    budget.add_argument("--steps", type=int, help="budget of the whole training")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds of this piece")
    parser.add_argument("--stop-at", type=int, help="step at which this piece ends")
    parser.add_argument("--keep-every", type=float, default=120.0, help="seconds between states on the disk")
    parser.add_argument("--checkpoint", type=Path, help="where the model is exported to (default: OUT/checkpoint)")
    parser.add_argument("--from-checkpoint", type=Path, help="begin with the weights of an exported checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> Trainer:
    args.out.mkdir(parents=True, exist_ok=True)
    plan, shape = PLANS[args.plan], MICRO if args.plan == "micro" else TINY
    tokenizer_json = _tokenizer(args.out, shape["vocab_size"])
    model = Trained(config_of(shape), plan.room)
    model.initialise(args.seed)
    if args.from_checkpoint:
        from tfglm.checkpoint.store import Checkpoint
        from tfglm.models.source import CheckpointSource

        with Checkpoint.open(args.from_checkpoint) as checkpoint:
            source = CheckpointSource(checkpoint)
            load_tensors(model, {name: source.tensor(name).float() for name in checkpoint.entries})
    trainer = Trainer(model, plan, torch.device(args.device), args.seed)
    feed = Feed(tokenizer_json, args.seed, args.workers)
    elapsed = _resume(args.out / STATE, trainer, feed)

    def keep(seconds: float) -> None:
        save(args.out / STATE, _state(trainer, feed, seconds))
        export(model, raw_config(shape), tokenizer_json, args.checkpoint or args.out / "checkpoint")

    try:
        first = plan.phases[0]
        feed.prepare(first.mixture, first.length)
        warm = _warm_up(trainer)
        elapsed = _loop(args, plan, trainer, feed, elapsed, warm, keep)
    finally:
        feed.close()
    keep(elapsed)
    return trainer


def _warm_up(trainer: Trainer) -> float:
    """Compile what every phase needs before the clock starts; the seconds that took. Nothing on a CPU."""
    began = time.monotonic()
    if trainer.device.type == "cuda":
        for phase in trainer.plan.phases:
            trainer.warm_up(phase)
            print(f"{phase.mixture} is compiled after {time.monotonic() - began:.1f} s", flush=True)
    return time.monotonic() - began


def _tokenizer(out: Path, vocab_size: int) -> str:
    """Made once for a run: it may not change when the run goes on."""
    path = out / "tokenizer.json"
    if not path.exists():
        path.write_text(trained_tokenizer(vocab_size).to_str(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _loop(
    args: argparse.Namespace, plan: Plan, trainer: Trainer, feed: Feed, elapsed: float, warm: float,
    keep: Callable[[float], None],
) -> float:  # fmt: skip
    """Train until the budget or this piece ends; returns the seconds trained in all."""
    began, kept = time.monotonic(), time.monotonic()
    figures: list[dict[str, torch.Tensor]] = []
    spent = elapsed
    with (args.out / LOG).open("a", encoding="utf-8") as log:
        while True:
            spent = elapsed + time.monotonic() - began
            progress = trainer.step / args.steps if args.steps else spent / (args.seconds - warm)
            stop = trainer.step == args.stop_at or spent - elapsed >= args.stop_after
            if progress >= 1 or stop:
                return spent
            phase = plan.phase(progress)
            _prepare(plan, phase, progress, feed)
            tokens, weights = feed.take(phase.mixture, phase.length, phase.rows)
            figures.append(trainer.train(tokens, weights, phase, progress))
            if trainer.step % _LOG_EVERY == 0 or trainer.step <= 3:
                _write(log, trainer, spent, progress, phase, figures)
                figures = []
            if time.monotonic() - kept > args.keep_every:
                keep(spent)
                kept = time.monotonic()


def _prepare(plan: Plan, phase: Phase, progress: float, feed: Feed) -> None:
    """Begin with the next phase's data a little before it begins."""
    if progress > phase.end - 0.05:
        following = plan.phase(phase.end)
        feed.prepare(following.mixture, following.length)


def _write(
    log: Any, trainer: Trainer, spent: float, progress: float, phase: Phase, figures: list[dict[str, Any]]
) -> None:
    means = {name: sum(float(f[name]) for f in figures) / len(figures) for name in figures[-1]}
    entry = {
        "step": trainer.step, "tokens": trainer.tokens, "seconds": round(spent, 2), "progress": round(progress, 4),
        "phase": phase.mixture, "lr": round(trainer.plan.lr(progress), 4),
        **{name: round(value, 4) for name, value in means.items()},
    }  # fmt: skip
    log.write(json.dumps(entry) + "\n")
    log.flush()
    print(json.dumps(entry), flush=True)


def _state(trainer: Trainer, feed: Feed, seconds: float) -> dict[str, Any]:
    places = {key: (place.number, place.row) for key, place in feed.places.items()}
    return {**trainer.state(), "places": places, "seconds": seconds}


def _resume(path: Path, trainer: Trainer, feed: Feed) -> float:
    """Seconds trained before; 0 for a new run."""
    if not path.exists():
        return 0.0
    state = torch.load(path, map_location=trainer.device, weights_only=True)
    trainer.load_state(state)
    feed.places |= {key: Place(*place) for key, place in state["places"].items()}
    return float(state["seconds"])


if __name__ == "__main__":
    main()
