"""What a gather takes, by wire and size, between ranks that are processes of this machine.

    PYTHONPATH=. python benchmarks/wires.py --out FILE.json [--ranks 3] [--wires shared,gloo] [--device cpu]

A gather brings every rank the float32 partial [rows, 6144] of all: 1 row of a decode step, 8 of a verification, 64 and
1024 of prompts. Times are rank 0's, in microseconds: `gather` alone, `sum` with the ordered addition of the partials as
after o_proj and the experts, `message` from an announcement until every follower has answered with a gather of one
number. Ranks begin each repeat together, at a gather of one number that is not counted. With fewer cores than ranks the
scheduler is part of what is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tfglm.ops.group import Message
from tfglm.ranks.bootstrap import join, lead, listen
from tfglm.ranks.control import end_process_on_failure
from tfglm.ranks.group import RankGroup
from tfglm.ranks.wires import open_wire

HIDDEN = 6144
ROWS = {1: 300, 8: 300, 64: 100, 1024: 10}  # and how often
MESSAGES = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--wires", default="shared,gloo")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; ranks take the GPUs in turn, or share one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    result = {
        "hardware": hardware(args.device),
        "load_average": round(load, 2),
        "ranks": args.ranks,
        "wires": {wire: measured(wire, args.ranks, args.device) for wire in args.wires.split(",")},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def hardware(device: str) -> dict[str, Any]:
    cpus = {line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")}
    named = {"cpu": ", ".join(sorted(cpus)) or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    if device == "cuda":
        named["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return named


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def measured(wire: str, ranks: int, device: str) -> dict[str, Any]:
    """One wire's figures, from processes that end with it."""
    context = multiprocessing.get_context("spawn")
    listener = listen(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    mine, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_process, args=(rank, ranks, port, wire, device, theirs if rank == 0 else None))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        figures: dict[str, Any] = mine.recv()
        return figures
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def rank_process(rank: int, ranks: int, port: int, wire: str, device: str, out: Connection | None) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    address = ("127.0.0.1", port)
    control = join(address, rank, ranks, {}) if rank else lead(listen(address), ranks, {})
    end_process_on_failure(control)
    group = RankGroup(open_wire(wire, control, limit_s=60.0), control)
    group.meet("loading", 60.0)
    figures: dict[str, Any] = {"by_rows": []}
    for rows, repeats in ROWS.items():
        partial = torch.randn(rows, HIDDEN, device=device)
        gather = timed(group, lambda p=partial: group.gather(p), repeats, device)
        added = timed(group, lambda p=partial: group.sum(p), repeats, device)
        figures["by_rows"].append(
            {"rows": rows, "bytes_a_rank": rows * HIDDEN * 4, "gather_us": gather, "sum_us": added}
        )
    figures["message_us"] = spread(messages(group, device))
    if out is not None:
        out.send(figures)
    if rank:
        group.receive()  # until rank 0 stops
    group.close()


def timed(group: RankGroup, call: Callable[[], object], repeats: int, device: str) -> dict[str, float]:
    one = torch.ones(1, device=device)
    times = []
    for _ in range(repeats + 3):
        group.gather(one)
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return spread(times[3:])


def messages(group: RankGroup, device: str) -> list[float]:
    one = torch.ones(1, device=device)
    ids = {"ids": torch.arange(16), "pages": torch.arange(128)}
    times = []
    for number in range(MESSAGES):
        began = time.perf_counter()
        if group.rank == 0:
            group.announce(Message("forward", {"rows": 16}, ids))
        else:
            received = group.receive()
            assert received is not None and received.number == number + 1
            group.done(received.number)
        group.gather(one).tolist()
        times.append(time.perf_counter() - began)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(times)
    return {
        "median": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e6, 1),
    }


if __name__ == "__main__":
    main()
