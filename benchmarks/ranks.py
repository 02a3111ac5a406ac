"""One checkpoint on several ranks of this machine against one: milliseconds a window, prompt rows a second, and whether
the logits are what they must be. Prints JSON.

    python benchmarks/ranks.py PATH --device cpu --runs 1 2:shared 3:shared 3:gloo

A run is RANKS or RANKS:WIRE. Every rank is a process of its own. Checked of every run: the same bits however the text
is cut into windows of up to 16 rows, and in a second run of the same kind; and how far the logits of a row are from
those of the first run: by roundings, except in rows where one of them turns over a choice of experts or tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.engine.machine import cores
from tfglm.engine.spread import Leader, follow
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.ranks.bootstrap import listen
from tfglm.settings import Settings

TEXT_ROWS = 240
CACHE = 8192
LIMIT_S = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2048, help="rows of the prompt that is timed, in chunks of 256")
    parser.add_argument("--runs", nargs="+", default=["1", "2:shared", "3:shared", "3:gloo"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # JSON of one rank's settings: this is a child
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        one_rank(args)
        return
    print(json.dumps(compared(args), indent=2))


def compared(args: argparse.Namespace) -> dict[str, Any]:
    results, first = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(args.runs):
            ranks, _, wire = run.partition(":")
            file = Path(folder) / f"{number}.pt"
            result = spread_run(args, int(ranks), wire or "shared", file)
            again = spread_run(args, int(ranks), wire or "shared", Path(folder) / "again.pt")
            logits, second = torch.load(file), torch.load(Path(folder) / "again.pt")
            first = logits if first is None else first
            result["window_ms"] = {k: min(v, again["window_ms"][k]) for k, v in result["window_ms"].items()}
            result["prompt_rows_s"] = max(result["prompt_rows_s"], again["prompt_rows_s"])
            result["same_bits_in_a_second_run"] = torch.equal(logits, second)
            apart = (logits - first).abs().max(dim=1).values
            result["median_difference_from_the_first_run"] = float(apart.median())
            result["largest_difference_from_the_first_run"] = float(apart.max())
            result["logits_std"] = round(float(logits.std()), 3)
            results.append({"ranks": int(ranks), "wire": wire or None, **result})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    gpu = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()} if args.device == "cuda" else {}
    machine = {"cores": cores(), "load": os.getloadavg()[0], "torch": torch.__version__, **gpu}
    return {
        "checkpoint": args.path.name,
        "device": args.device,
        "threads": args.threads,
        "machine": machine,
        "runs": results,
    }


def spread_run(args: argparse.Namespace, ranks: int, wire: str, logits: Path) -> dict[str, Any]:
    """What rank 0 has to say of one run."""
    with listen(("127.0.0.1", 0)) as probe:
        leader = f"127.0.0.1:{probe.getsockname()[1]}"
    children = []
    for rank in range(ranks):
        settings = {"rank": rank, "ranks": ranks, "leader": leader, "wire": wire, "device": args.device}
        given = json.dumps({**settings, "drafter": "none", "threads": args.threads, "guard_gib": 0.0})
        command = [sys.executable, __file__, str(args.path), "--rank", given, "--logits", str(logits)]
        command += ["--prompt", str(args.prompt)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
    try:
        out, _ = children[0].communicate(timeout=LIMIT_S)
        for child in children:
            if child.wait(30):
                raise SystemExit(f"a rank of {ranks} over {wire} ended with {child.returncode}")
        return dict(json.loads(out))
    finally:
        for child in children:
            child.kill()


def one_rank(args: argparse.Namespace) -> None:
    settings = Settings(**json.loads(args.rank))
    torch.set_num_threads(settings.threads)
    if settings.device == "cuda":
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    host, _, port = settings.leader.rpartition(":")
    if settings.rank:
        follow(args.path, settings, (host, int(port)))
        return
    with Checkpoint.open(args.path) as checkpoint:
        common = {"tokens": CACHE, "device": settings.device}
        if settings.ranks == 1:
            print(json.dumps(measured(load_model(checkpoint, **common), args)))
            return
        leader = Leader(settings, listen((host, int(port))), lambda: None, lambda error: None)
        leader.meet(checkpoint)
        model = load_model(checkpoint, **common, group=leader.open(CACHE, 0))
        leader.loaded()
        print(json.dumps(measured(model, args)), flush=True)
        model.close()
        leader.close(idle=True)


def measured(model: Glm53, args: argparse.Namespace) -> dict[str, Any]:
    text = [(7919 * i * i + 37 * i) % (model.config.vocab_size - 64) for i in range(max(TEXT_ROWS, args.prompt))]
    cut = {size: read(model, text[:TEXT_ROWS], size) for size in (1, 3, 8, 16)}
    torch.save(cut[1], args.logits)
    stream = model.open_stream()
    began = time.perf_counter()
    for start in range(0, args.prompt, 256):
        model.forward([Rows(stream, text[start : start + 256], 0, prompt=True)])
    prompt_rows_s = args.prompt / (time.perf_counter() - began)
    length = stream.length
    windows = {}
    for rows in (1, 4, 16):
        times = []
        for _ in range(40):
            began = time.perf_counter()
            model.forward([Rows(stream, text[:rows], rows)])
            times.append(time.perf_counter() - began)
            stream.truncate(length)
        windows[str(rows)] = round(1000 * sorted(times)[len(times) // 4], 3)
    stream.close()
    alike = all(torch.equal(logits, cut[1]) for logits in cut.values())
    return {"window_ms": windows, "prompt_rows_s": round(prompt_rows_s), "same_bits_in_any_window": alike}


def read(model: Glm53, text: list[int], size: int) -> torch.Tensor:
    stream = model.open_stream()
    rows = [
        model.forward([Rows(stream, text[i : i + size], len(text[i : i + size]))]) for i in range(0, len(text), size)
    ]
    stream.close()
    return torch.cat(rows)


if __name__ == "__main__":
    main()
