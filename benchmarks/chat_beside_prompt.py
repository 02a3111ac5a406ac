"""How long a chat pauses while a long prompt is read beside it, for several shares of the time that prompts get.

    python benchmarks/chat_beside_prompt.py [--out benchmarks/results/chat_beside_prompt.json] [--device cpu]

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

import torch
from tiny_model import DSPARK, hardware, served

from tfglm.checks.suite import problem
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.engine import Engine
from tfglm.engine.scheduler import Plan, Scheduler
from tfglm.server.state import Served

GREEDY = SamplingParams(temperature=0.0)
RUNS = {256: [(1.0, 8000), (0.68, 8000), (0.5, 8000), (0.25, 8000), (0.68, 15000)], 64: [(0.68, 8000)]}
"""By rows of a chunk: shares and prompts."""


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


def beside(served: Served, prompt: list[int], share: float) -> dict[str, Any]:
    assert isinstance(served.engine, Engine)
    served.engine._scheduler._prefill_share = share  # all that a server of another share differs in
    chunks: list[float] = []
    took = Scheduler.took

    def noting(scheduler: Scheduler, plan: Plan, seconds: float) -> None:
        if plan.prompt is not None:
            chunks.append(1000 * seconds)
        took(scheduler, plan, seconds)

    chat, long = Watch(), Watch()
    messages = problem("ledger", 700_000, 0).messages
    opening = served.tokenizer.encode(served.template.render(messages))
    served.engine.submit(GenerationRequest("chat", opening, GREEDY, 16384 - len(opening) - 1, ignore_eos=True), chat)
    assert chat.begun.wait(60)
    time.sleep(2.0)
    Scheduler.took = noting  # type: ignore[method-assign]
    start = time.perf_counter()
    served.engine.submit(GenerationRequest("long", prompt, GREEDY, 1), long)
    assert long.ended.wait(600)
    Scheduler.took = took  # type: ignore[method-assign]
    end = long.moments[0]
    served.engine.cancel("chat")
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    facts, results = {**hardware(args.threads), "device": device}, []
    for rows, runs in RUNS.items():
        settings = {"device": args.device, "prefill_rows": rows, "context": 16384, "parallel": 2, "kept_gib": 0}
        with served(args.threads, **settings, **DSPARK) as model:
            beside(model, text(model, 600), 1.0)  # warm
            for share, length in runs:
                figures = beside(model, text(model, length), share)
                results.append({"share": share, "rows_a_chunk": rows, "prompt": length, **figures})
                print(results[-1], flush=True)
    args.out.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
