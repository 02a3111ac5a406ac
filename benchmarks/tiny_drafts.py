"""What drafts are worth on the tiny trained model: how many are kept, by source and slot, and tokens a second.

    python benchmarks/tiny_drafts.py [--out benchmarks/results/tiny_drafts.json] [--count 12] [--threads 2]

Greedy and sampled replies (temperature 0.6) to problems of the test set, one request at a time, thinking on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tiny_model import DSPARK, ask, hardware, served

from tfglm.checks.problem import Problem
from tfglm.checks.suite import problem
from tfglm.engine.api import Finished, GenerationRequest, SamplingParams, Snapshot
from tfglm.server.state import Served
from tfglm.settings import Settings

WAYS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none", "copy": False},
    "copies": {"drafter": "none", "copy": True},
    "mtp": {"drafter": "mtp", "copy": False},
    "mtp, copies": {"drafter": "mtp", "copy": True},
    "dspark": {**DSPARK, "copy": False},
    "dspark, copies": {**DSPARK, "copy": True},
}
CATEGORIES = ("arithmetic", "ledger", "python", "json")


def answered(model: Served, one: Problem, number: int, sampling: SamplingParams) -> Finished:
    ids = model.tokenizer.encode(model.template.render(one.messages, tools=list(one.tools)))
    return ask(model, GenerationRequest(f"q{number}", ids, sampling, 400, starts_in_reasoning=True)).end


def measured(model: Served, count: int, temperature: float) -> dict[str, Any]:
    before = model.engine.snapshot()
    tokens, milliseconds, by_category = 0, 0.0, {}
    for category in CATEGORIES:
        spent, made = 0.0, 0
        for number in range(count):
            sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=number)
            finished = answered(model, problem(category, 700_000 + number, 0), number, sampling)
            made += finished.usage.completion_tokens
            spent += finished.timings.predicted_ms
        by_category[category] = round(1000 * made / spent, 1)
        tokens, milliseconds = tokens + made, milliseconds + spent
    return {
        "tokens": tokens,
        "tokens_a_second": round(1000 * tokens / milliseconds, 1),
        "tokens_a_round": round(tokens / (model.engine.snapshot().rounds - before.rounds), 2),
        "by_category": by_category,
        "drafts": by_slot(before, model.engine.snapshot()),
    }


def by_slot(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What was drafted and kept in between, by source and slot."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for sign, snapshot in ((-1, before), (1, after)):
        for entry in snapshot.drafts:
            key = f"{entry.source} {entry.slot}"
            counts[key][0] += sign * entry.drafted
            counts[key][1] += sign * entry.accepted
    return {key: {"drafted": d, "kept": a, "share": round(a / d, 3)} for key, (d, a) in counts.items() if d}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiny_drafts.json"))
    parser.add_argument("--count", type=int, default=12, help="problems a category")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    results = []
    for name, given in WAYS.items():
        with served(args.threads, **given) as model:
            answered(model, problem("ledger", 600_000, 0), 0, SamplingParams(temperature=0.0))  # warm
            for temperature in (0.0, 0.6):
                started = time.monotonic()
                figures = measured(model, args.count, temperature)
                results.append({"drafts_by": name, "temperature": temperature, **figures})
                print(name, temperature, figures["tokens_a_second"], round(time.monotonic() - started, 1), flush=True)
    facts = {
        **hardware(args.threads),
        "settings": {name: dataclasses.asdict(Settings())[name] for name in ("draft_noise", "kv")},
        "results": results,
    }
    args.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
