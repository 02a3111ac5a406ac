"""Times of the dense, indexer and attention kernels at one rank's share of GLM-5.3 (22 heads, three ranks).

Usage: python benchmarks/cuda_kernels.py RESULT.json [FAMILY ...]

Each figure is the median of replays of one CUDA graph that launches the kernel over several sets of weights or caches,
more bytes than the L2 cache holds, divided by the launches. GB/s counts the bytes that must be read once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tfglm.formats import latent as formats
from tfglm.formats.latent import KvFormat
from tfglm.ops import cuda_attention, cuda_cache, cuda_indexer, cuda_linear, cuda_rows
from tfglm.ops.base import Rope, Selection, Window

DEVICE = torch.device("cuda")
PAGE = 256
HEADS, LATENT, ROTARY, TOPK = 22, 512, 64, 2048
DECODE = (1, 4, 8, 16)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def median_us(launches: list[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds a launch."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times) / len(launches)


def row(name: str, us: float, nbytes: float = 0, flops: float = 0) -> dict[str, object]:
    line = {"case": name, "us": round(us, 2)}
    if nbytes:
        line["GB/s"] = round(nbytes / us / 1e3)
    if flops:
        line["TFLOP/s"] = round(flops / us / 1e6, 1)
    print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    return line


# ---- families


def linear() -> Iterator[dict[str, object]]:
    shapes = {
        "q_a|kv_a": (2624, 6144),
        "q_b": (5632, 2048),
        "o": (6144, 5632),
        "index q_b": (4096, 2048),
        "head": (51648, 6144),
    }
    for name, (n, k) in shapes.items():
        for kind in ("fp8",) if name == "head" else ("bf16", "fp8", "q4", "q6", "q8"):
            first = cuda_linear.pack(torch.randn(n, k, device=DEVICE) * 0.02, kind)
            copies = max(2, min(12, int(300e6 // first.nbytes)))
            weights = [cuda_linear.Dense(kind, n, k, first.data.clone(), first.scales) for _ in range(copies)]
            for rows in DECODE:
                x, out = torch.randn(rows, k, device=DEVICE).bfloat16(), empty((rows, n), torch.bfloat16)
                us = median_us([lambda w=w, x=x, out=out: cuda_linear.linear(x, w, out) for w in weights])
                yield row(f"linear {name} {kind} R={rows}", us, first.nbytes)
            if name in ("o", "q_b"):
                for rows in (64, 2048):
                    x, out = torch.randn(rows, k, device=DEVICE).bfloat16(), empty((rows, n), torch.bfloat16)
                    us = median_us([lambda w=w, x=x, out=out: cuda_linear.linear(x, w, out) for w in weights[:2]])
                    yield row(f"linear {name} {kind} R={rows}", us, 0, 2 * rows * n * k)


def heads() -> Iterator[dict[str, object]]:
    for name, n, k in (("absorb", LATENT, 192), ("expand", 256, LATENT)):
        weights = [torch.randn(HEADS, n, k, device=DEVICE).bfloat16() for _ in range(16)]
        for rows in (*DECODE, 2048):
            x, out = torch.randn(rows, HEADS, k, device=DEVICE).bfloat16(), empty((rows, HEADS, n), torch.bfloat16)
            us = median_us([lambda w=w, x=x, out=out: cuda_linear.per_head(x, w, out) for w in weights])
            yield row(f"per_head {name} R={rows}", us, weights[0].nbytes, 2 * rows * HEADS * n * k)


def attention() -> Iterator[dict[str, object]]:
    tokens = 128 * 1024
    for kv in KvFormat:
        size = formats.row_bytes(kv, LATENT, ROTARY, 128)
        planes = [
            [
                torch.randint(0, 60, (tokens // PAGE, PAGE, n), dtype=torch.uint8, device=DEVICE)
                for n in (size.latent, size.rotary)
            ]
            for _ in range(2)
        ]
        for rows in (*DECODE, 2048):
            q = torch.randn(rows, HEADS, LATENT + ROTARY, device=DEVICE).bfloat16()
            lists = [
                torch.stack([torch.randperm(tokens, device=DEVICE)[:TOPK].sort().values for _ in range(min(rows, 64))])
                .repeat(-(-rows // 64) if rows > 64 else 1, 1)
                .int()
                for _ in range(2)
            ]
            counts = torch.full((rows,), TOPK, dtype=torch.int32, device=DEVICE)
            rope = Rope(*(torch.randn(rows, ROTARY // 2, device=DEVICE) for _ in range(2)))
            out = empty((rows, HEADS, LATENT), torch.bfloat16)
            launches = [
                lambda p=p, s=s, q=q, counts=counts, out=out, kv=kv, rope=rope: cuda_attention.attend(
                    q[:, :, :LATENT], q[:, :, LATENT:], rope, Selection(s, counts), 1 / 16, kv, *p, TOPK, out, empty
                )
                for p in planes
                for s in lists
            ]
            us = median_us(launches)
            read = rows * TOPK * (size.latent + size.rotary)
            yield row(f"attend {kv.value} R={rows}", us, read, 2 * rows * HEADS * TOPK * (2 * LATENT + ROTARY))


def indexer() -> Iterator[dict[str, object]]:
    heads, width = 32, 128
    for kv in (KvFormat.BF16, KvFormat.FP4X):
        size = formats.row_bytes(kv, LATENT, ROTARY, width).index
        for context, windows in ((8192, (1, 8, 16, 2048)), (102_400, (1, 8, 16, 512)), (512_000, (1, 8, 16))):
            pages = torch.randperm(context // PAGE, device=DEVICE)[None]
            plane = torch.randint(0, 60, (context // PAGE, PAGE, size), dtype=torch.uint8, device=DEVICE)
            for rows in windows:
                q = torch.randn(rows, heads, width, device=DEVICE).bfloat16()
                w = torch.randn(rows, heads, device=DEVICE).bfloat16()
                at = torch.arange(context - rows, context, device=DEVICE)
                problem = (q, w, Window(at, at, pages, torch.zeros_like(at), ()), plane, kv, TOPK, context, empty)
                us = median_us([lambda problem=problem: cuda_indexer.select(*problem)] * 2)
                yield row(
                    f"score+select {kv.value} T={context} R={rows}",
                    us,
                    context * size,
                    2 * rows * context * heads * width,
                )


def small() -> Iterator[dict[str, object]]:
    weight = torch.randn(6144, device=DEVICE)
    for rows in (1, 16, 2048):
        x, branch = (torch.randn(rows, 6144, device=DEVICE).bfloat16() for _ in range(2))
        total, out = empty((rows, 6144), torch.bfloat16), empty((rows, 6144), torch.bfloat16)
        us = median_us([lambda a=(x, branch, weight, 1e-5, total, out): cuda_rows.add_rms_norm(*a)] * 20)
        yield row(f"add_rms_norm R={rows}", us, 4 * x.nbytes)
        a = torch.randn(rows, 2624, device=DEVICE).bfloat16()
        rope = Rope(*(torch.randn(rows, 32, device=DEVICE) for _ in range(2)))
        slots = torch.randperm(4096, device=DEVICE)[:rows]
        for kv in KvFormat:
            size = formats.row_bytes(kv, LATENT, ROTARY, 128)
            planes = [torch.zeros(16, PAGE, n, dtype=torch.uint8, device=DEVICE) for n in (size.latent, size.rotary)]

            q = empty((rows, 2048), torch.bfloat16)
            problem = (a, weight[:2048], weight[:512], 1e-5, rope, slots, kv, *planes, q)
            us = median_us([lambda problem=problem: cuda_cache.split_latents(*problem)] * 20)
            yield row(f"split_latents {kv.value} R={rows}", us)


FAMILIES = {f.__name__: f for f in (linear, heads, attention, indexer, small)}


def main(arguments: list[str]) -> None:
    result, chosen = Path(arguments[0]), arguments[1:] or list(FAMILIES)
    big = torch.empty(2, 1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    copy = big.nbytes / median_us([lambda: big[1].copy_(big[0])] * 2) / 1e3
    properties = torch.cuda.get_device_properties(DEVICE)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, object] = {
        "hardware": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "copy_GB/s": round(copy),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": commit,
    }
    for family in chosen:
        report[family] = list(FAMILIES[family]())
        result.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
