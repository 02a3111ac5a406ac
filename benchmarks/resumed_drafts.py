"""What a block drafter's kept rows are worth: drafts kept after a prompt that resumes, on the tiny trained model.

    python benchmarks/resumed_drafts.py [--out benchmarks/results/resumed_drafts_cpu.json] [--count 8] [--threads 1]

A conversation of several problems is asked once, so that its pages are kept; then again with the next problem at its
end. Counted are the drafts of the second reply: the conversation read anew, resumed, and resumed by a drafter that kept
no rows of its own. Greedy, DSpark, no copies; rounds cost what they do on three Sparks, so that this machine's load
decides nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_model import DSPARK, SparkClock, ask, hardware, served

from tfglm.checks.suite import problem
from tfglm.drafts import choose
from tfglm.engine.api import Finished, GenerationRequest, SamplingParams
from tfglm.server.state import Served

WAYS = {"read": (0.0, True), "resumed": (1.0, True), "resumed, no rows kept": (1.0, False)}
TURNS = 10
"""Problems of a conversation before the one that is measured: some 750 tokens, more than the drafter's window."""


def answered(model: Served, name: str, messages: list[dict[str, Any]], tokens: int) -> Finished:
    ids = model.tokenizer.encode(model.template.render(messages))
    return ask(model, GenerationRequest(name, ids, SamplingParams(temperature=0.0), tokens, ignore_eos=True)).end


def conversation(number: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        question = problem("ledger", 800_000 + 100 * number + turn, 0).messages[-1]
        messages += [question, {"role": "assistant", "content": f"I will look at entry {turn}."}]
    return messages


def measured(kept_gib: float, rows: bool, count: int, threads: int) -> dict[str, Any]:
    own = choose.kept_pages
    if not rows:
        choose.kept_pages = lambda block, settings: 0
    drafted = accepted = tokens = rounds = prompt = cached = 0
    settings = {**DSPARK, "context": 4096, "copy": False, "kept_gib": kept_gib}
    with SparkClock().running(), served(threads, **settings) as model:
        for number in range(count):
            messages = conversation(number)
            answered(model, f"first {number}", messages[:-1], 24)
            last = [*messages, problem("ledger", 800_000 + 100 * number + TURNS, 0).messages[-1]]
            before = model.engine.snapshot().rounds
            usage = answered(model, f"then {number}", last, 48).usage
            rounds += model.engine.snapshot().rounds - before
            tokens, prompt, cached = (
                tokens + usage.completion_tokens,
                prompt + usage.prompt_tokens,
                cached + usage.cached_tokens,
            )
            drafted, accepted = drafted + usage.drafted_tokens, accepted + usage.accepted_tokens
    choose.kept_pages = own
    return {
        "prompt_tokens": prompt,
        "resumed_tokens": cached,
        "drafted": drafted,
        "kept": accepted,
        "share": round(accepted / max(drafted, 1), 3),
        "tokens_per_round": round((tokens - count) / rounds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resumed_drafts_cpu.json"))
    parser.add_argument("--count", type=int, default=8, help="conversations")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for name, (kept_gib, rows) in WAYS.items():
        results[name] = measured(kept_gib, rows, args.count, args.threads)
        print(name, results[name], flush=True)
    facts = {**hardware(args.threads), "results": results}
    args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
