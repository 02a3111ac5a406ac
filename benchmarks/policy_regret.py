"""How far the policy is from the best fixed number of drafts, on traces of the tiny trained model.

    PYTHONPATH=. python benchmarks/policy_regret.py [--out benchmarks/results/policy_regret.json] [--count 12]

Every position of serial replies (problems of the test set and edits, thinking on, greedy and at temperature 0.6) is
drafted for by the MTP layer and by DSpark. The traces are replayed as one server's life, from nothing learned: under
the policy that serves, and under every fixed length; the best of these is known with hindsight, from the whole trace.
The clock is the published cost table of three DGX Sparks, or one whose rows cost next to nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from edit_drafts import TASKS
from tiny_drafts import CATEGORIES
from tiny_model import DSPARK, ask, hardware, served

from tfglm.checks.suite import problem
from tfglm.drafts.costs import THREE_SPARKS, Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.trace import FixedPolicy, Trace, read_trace, replay
from tfglm.engine.api import GenerationRequest, SamplingParams

CLOCKS = {
    "three Sparks": THREE_SPARKS,
    "cheap rows": Costs(tuple(20 + 0.2 * rows for rows in range(16)), first_ms=2.0, next_ms=1.0),
}
"""Where rows cost half the serial time, and where a row more is 1 % of it."""


def traced(given: dict[str, Any], count: int, threads: int) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with served(threads, draft_trace=str(path), **given) as model:
            asked = [(problem(category, 700_000 + n, 0).messages, n) for category in CATEGORIES for n in range(count)]
            for make in TASKS.values():
                asked += [([{"role": "user", "content": make(Random(f"edits {n}")).prompt}], n) for n in range(count)]
            for number, (messages, seed) in enumerate(asked):
                for temperature in (0.0, 0.6):
                    ids = model.tokenizer.encode(model.template.render(messages))
                    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
                    ask(model, GenerationRequest(f"{number} {temperature}", ids, sampling, 400))
        return read_trace(path)


def regret(trace: Trace, costs: Costs, copy: bool) -> dict[str, Any]:
    lengths = range(trace.most + 1)
    fixed = {n: replay(trace, FixedPolicy(costs, n), copy=copy).tokens_per_second for n in lengths}
    best = max(fixed, key=lambda n: fixed[n])
    done = replay(trace, Policy(costs), copy=copy)
    return {
        "fixed_tok_s": {str(n): round(rate, 2) for n, rate in fixed.items()},
        "best_fixed": best,
        "policy_tok_s": round(done.tokens_per_second, 2),
        "policy_tokens_a_round": round(done.tokens_per_round, 3),
        "regret": round(1 - done.tokens_per_second / fixed[best], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy_regret.json"))
    parser.add_argument("--count", type=int, default=12, help="problems a category, and edits of each kind")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    facts, results = hardware(args.threads), []
    for name, given in (("mtp", {"drafter": "mtp"}), ("dspark", DSPARK)):
        trace = traced(given, args.count, args.threads)
        tokens = sum(len(reply.tokens) - reply.prompt for reply in trace.replies)
        for clock, costs in CLOCKS.items():
            for copy in (False, True):
                found = regret(trace, costs, copy)
                head = {"drafter": name, "copies": copy, "clock": clock}
                results.append({**head, "replies": len(trace.replies), "tokens": tokens, **found})
                print(*head.values(), found["regret"], flush=True)
    args.out.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
