"""How long a chat pauses while a long prompt is read beside it, for several shares of the time that prompts get.

    python benchmarks/chat_beside_prompt.py [--out benchmarks/results/chat_beside_prompt.json] [--threads 2]

The tiny trained model, one greedy reply that streams without end, and beside it a second request of 8,000 tokens, or of
15,000 (the model's window is 16,384). Counted are the gaps between the moments at which the chat's tokens leave the
engine, from the second request's arrival to its first token. No prompt is kept for another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from tiny_model import DSPARK, hardware, served

from tfglm.checks.suite import problem
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.scheduler import Plan, Scheduler
from tfglm.server.state import Served

GREEDY = SamplingParams(temperature=0.0)


class Watch:
    """Moments at which a request's tokens left the engine."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise SystemExit(f"a reply failed: {event.message}")
        if isinstance(event, Delta) and event.token_ids:
            self.moments.append(time.perf_counter())
            self.begun.set()
        if isinstance(event, Finished):
            self.ended.set()


def text(served: Served, tokens: int) -> list[int]:
    ids: list[int] = []
    number = 0
    while len(ids) < tokens:
        ids += served.tokenizer.encode(str(problem("ledger", 800_000 + number, 2).messages[-1]["content"]))
        number += 1
    return ids[:tokens]


def beside(served: Served, prompt: list[int], name: str) -> dict[str, Any]:
    chunks: list[float] = []
    took = Scheduler.took

    def noting(scheduler: Scheduler, plan: Plan, seconds: float) -> None:
        if plan.prompt is not None:
            chunks.append(1000 * seconds)
        took(scheduler, plan, seconds)

    chat, long = Watch(), Watch()
    messages = problem("ledger", 700_000, 0).messages
    opening = served.tokenizer.encode(served.template.render(messages))
    served.engine.submit(
        GenerationRequest(f"chat {name}", opening, GREEDY, 16384 - len(opening) - 1, ignore_eos=True), chat
    )
    assert chat.begun.wait(60)
    time.sleep(2.0)
    Scheduler.took = noting  # type: ignore[method-assign]
    start = time.perf_counter()
    served.engine.submit(GenerationRequest(f"long {name}", prompt, GREEDY, 1), long)
    assert long.ended.wait(600)
    Scheduler.took = took  # type: ignore[method-assign]
    end = long.moments[0]
    served.engine.cancel(f"chat {name}")
    assert chat.ended.wait(60)
    alone = [moment for moment in chat.moments if moment < start]
    during = [alone[-1], *(moment for moment in chat.moments if start <= moment <= end), end]
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(during)]
    quiet = [1000 * (b - a) for a, b in itertools.pairwise(alone)]
    return {
        "first_token_s": round(end - start, 2),
        "alone_ms": spread(quiet),
        "beside_ms": spread(gaps),
        "chunk_ms": spread(chunks),
        "time_in_chunks": round(sum(chunks) / (1000 * (end - start)), 3),
    }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "worst": round(ordered[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chat_beside_prompt.json"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    facts, results = hardware(args.threads), []
    runs = [(share, 256, 8000) for share in (1.0, 0.68, 0.5, 0.25)] + [(0.68, 64, 8000), (0.68, 256, 15000)]
    for share, rows, length in runs:
        settings = {"prefill_share": share, "prefill_rows": rows, "context": 16384, "parallel": 2, "kept_gib": 0}
        with served(args.threads, **settings, **DSPARK) as model:
            figures = beside(model, text(model, length), "measured")
        results.append({"share": share, "rows_a_chunk": rows, "prompt": length, **figures})
        print(results[-1], flush=True)
    args.out.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
