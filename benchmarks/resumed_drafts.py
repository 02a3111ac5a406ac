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
import os
import platform
import queue
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfglm.bundled import DRAFTER, MODEL
from tfglm.checkpoint.store import Checkpoint
from tfglm.checks.suite import problem
from tfglm.cli import loading
from tfglm.cli.session import Session
from tfglm.drafts import choose
from tfglm.drafts.costs import THREE_SPARKS
from tfglm.engine.api import Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.server.state import Served
from tfglm.settings import Settings

WAYS = {"read": (0.0, True), "resumed": (1.0, True), "resumed, no rows kept": (1.0, False)}
TURNS = 10
"""Problems of a conversation before the one that is measured: some 750 tokens, more than the drafter's window."""


def ask(served: Served, name: str, ids: list[int], tokens: int) -> Finished:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = GenerationRequest(name, ids, SamplingParams(temperature=0.0), max_tokens=tokens, ignore_eos=True)
    served.engine.submit(request, events.put)
    while True:
        event = events.get(timeout=300)
        if isinstance(event, Failed):
            raise SystemExit(f"a reply failed: {event.message}")
        if isinstance(event, Finished):
            return event


def conversation(number: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        question = problem("ledger", 800_000 + 100 * number + turn, 0).messages[-1]
        messages += [question, {"role": "assistant", "content": f"I will look at entry {turn}."}]
    return messages


def measured(kept_gib: float, rows: bool, count: int, threads: int) -> dict[str, Any]:
    loading.sound_costs = lambda model, drafter, text: (drafter, THREE_SPARKS)
    own = choose.kept_pages
    if not rows:
        choose.kept_pages = lambda block, settings: 0
    drafted = accepted = tokens = rounds = prompt = cached = 0
    session = Session(None)
    with Checkpoint.open(MODEL) as checkpoint:
        settings = Settings.from_sources(
            {
                "device": "cpu", "threads": threads, "context": 4096, "parallel": 1, "drafter": "dspark",
                "drafter_path": str(DRAFTER), "copy": False, "kept_gib": kept_gib,
            }
        )  # fmt: skip
        served = loading.load(checkpoint, settings, session)
        for number in range(count):
            messages = conversation(number)
            render = served.template.render
            ask(served, f"first {number}", served.tokenizer.encode(render(messages[:-1])), 24)
            last = [*messages, problem("ledger", 800_000 + 100 * number + TURNS, 0).messages[-1]]
            before = served.engine.snapshot().rounds
            usage = ask(served, f"then {number}", served.tokenizer.encode(render(last)), 48).usage
            rounds += served.engine.snapshot().rounds - before
            tokens, prompt, cached = (
                tokens + usage.completion_tokens,
                prompt + usage.prompt_tokens,
                cached + usage.cached_tokens,
            )
            drafted, accepted = drafted + usage.drafted_tokens, accepted + usage.accepted_tokens
        assert session.engine is not None
        session.engine.stop()
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
        with tempfile.TemporaryDirectory() as nothing_learned:
            os.environ["XDG_STATE_HOME"] = nothing_learned
            results[name] = measured(kept_gib, rows, args.count, args.threads)
        print(name, results[name], flush=True)
    facts = {
        "command": f"python {' '.join(sys.argv)}",
        "hardware": f"{platform.machine()}, {args.threads} threads, load {os.getloadavg()[0]:.1f}",
        "results": results,
    }
    args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
