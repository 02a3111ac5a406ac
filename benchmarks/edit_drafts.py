"""What copies beside a model's drafts are worth on edits, with the tiny trained model.

    PYTHONPATH=. python benchmarks/edit_drafts.py [--out benchmarks/results/edit_drafts.json] [--clock sparks]

Texts to repeat, texts with one word replaced, code with a name changed, lines of a log: of the kinds that the model was
trained on, with numbers of their own. One request at a time, thinking on, greedy and at temperature 0.6. Every reply is
compared with the one that nobody drafted for. By the cost table of three DGX Sparks, which no load of this machine can
change, and (--clock here) with costs measured here and real tokens a second, for which it must be quiet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

from tiny_drafts import WAYS, by_slot
from tiny_model import Reply, SparkClock, ask, hardware, served

from tfglm.drafts.costs import THREE_SPARKS
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.server.state import Served
from training.data import editing
from training.data.exchange import Exchange

TASKS: dict[str, Callable[[Random], Exchange]] = {
    "repeat": editing.repeat,
    "replace": editing.replace,
    "rename": editing.rename,
    "lines": editing.lines,
}


def replies(model: Served, count: int, temperature: float) -> dict[str, list[Reply]]:
    found: dict[str, list[Reply]] = {}
    for task, make in TASKS.items():
        found[task] = []
        for number in range(count):
            prompt = model.template.render([{"role": "user", "content": make(Random(f"edits {number}")).prompt}])
            sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=number)
            request = GenerationRequest(
                f"{task} {number}", model.tokenizer.encode(prompt), sampling, 400, starts_in_reasoning=True
            )
            found[task].append(ask(model, request))
    return found


def right(task: str, found: list[Reply]) -> int:
    return sum(
        reply.text.strip() == TASKS[task](Random(f"edits {number}")).answer.strip()
        for number, reply in enumerate(found)
    )


def measured(
    model: Served, count: int, temperature: float, clock: SparkClock
) -> tuple[dict[str, Any], list[list[int]]]:
    before, ms, tokens = model.engine.snapshot(), clock.ms, clock.tokens
    found = replies(model, count, temperature)
    after = model.engine.snapshot()
    ends = {task: [reply.end for reply in some] for task, some in found.items()}
    made = {task: sum(end.usage.completion_tokens for end in some) for task, some in ends.items()}
    took = {task: sum(end.timings.predicted_ms for end in some) for task, some in ends.items()}
    figures: dict[str, Any] = {
        "tokens": sum(made.values()),
        "tokens_a_round": round((sum(made.values()) - 4 * count) / (after.rounds - before.rounds), 2),
    }
    if drafted := clock.ms - ms:
        figures["tokens_a_second"] = round(1000 * (clock.tokens - tokens) / drafted, 1)
    elif clock.on:
        figures["tokens_a_second"] = round(1000 / THREE_SPARKS.window(1), 1)
    else:
        figures["tokens_a_second"] = round(1000 * sum(made.values()) / sum(took.values()), 1)
        figures["by_task"] = {task: round(1000 * made[task] / took[task], 1) for task in TASKS}
    figures["right"] = {task: right(task, some) for task, some in found.items()}
    figures["drafts"] = by_slot(before, after)
    return figures, [reply.ids for some in found.values() for reply in some]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/edit_drafts.json"))
    parser.add_argument("--count", type=int, default=12, help="edits of each of the four kinds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("sparks", "here"), default="sparks")
    args = parser.parse_args()
    facts, results = {**hardware(args.threads), "clock": args.clock}, []
    serial: dict[float, list[list[int]]] = {}
    for name, given in WAYS.items():
        clock = SparkClock()
        with clock.running() if args.clock == "sparks" else nullcontext(), served(args.threads, **given) as model:
            replies(model, 1, 0.0)  # warm
            for temperature in (0.0, 0.6):
                figures, ids = measured(model, args.count, temperature, clock)
                if ids != serial.setdefault(temperature, ids):
                    raise SystemExit(f"drafts by {name} changed a reply")
                results.append({"drafts_by": name, "temperature": temperature, **figures})
                print(name, temperature, {k: v for k, v in figures.items() if k != "drafts"}, flush=True)
    args.out.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
