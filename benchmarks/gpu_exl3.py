"""EXL3 kernels of one rank's share of GLM-5.3 on the GPU at hand: the search, experts of a window, experts of a prompt.

    python benchmarks/gpu_exl3.py encode|experts|prompt|placement [--json FILE] [--try NAME=VALUE ...]

Experts: hidden 6144, 256 experts, top 8, this rank's columns 640 or 768, 81/158/17 experts of 2/3/4 bits (mcg), one
input scale, random words, 4 distinct layers x 4 routings in one CUDA graph, median of 30 replays / 16. "clustered"
routing draws the smaller number of distinct experts that real text shows. placement: the slowest of three ranks, which
the others wait for in every layer, where the sixth block of 128 columns is one rank's for all experts of a layer, and
where it goes by expert; mean over 4 routings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from tfglm.layout import Family, Layout, Placement
from tfglm.ops import exl3_cuda, nvrtc
from tfglm.ops import exl3_experts_cuda as experts_cuda

HIDDEN, EXPERTS, SLOTS = 6144, 256, 8
BITS = [2] * 81 + [3] * 158 + [4] * 17
CLUSTERED = {2: 0.95, 3: 0.87, 4: 0.85, 5: 0.80, 8: 0.65, 9: 0.65, 16: 0.58}
LAYERS, ROUTINGS = 4, 4


def machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nvrtc": nvrtc.compiler_version(),
        "commit": commit or "unknown",
    }


def median_ms(run: Callable[[], None], repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def layer(columns: int | list[int], seed: int) -> experts_cuda.ExpertTables:
    """One rank's experts of a layer, random words made on the GPU. columns: inner columns of all, or of each."""
    own = [columns] * EXPERTS if isinstance(columns, int) else columns
    width = max(own)
    g = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed)).tolist()

    def words(rows: int, columns: int, bits: int) -> torch.Tensor:
        shape = (rows // 16, columns // 16, 16 * bits)
        return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=g)

    def signed(*shape: int) -> torch.Tensor:
        sign = torch.randint(0, 2, shape, device="cuda", generator=g) * 2 - 1
        return (sign * (0.5 + torch.rand(shape, device="cuda", generator=g))).half()

    bits = [BITS[i] for i in order]
    return experts_cuda.expert_tables(
        [words(HIDDEN, n, b) for n, b in zip(own, bits, strict=True)],
        [words(HIDDEN, n, b) for n, b in zip(own, bits, strict=True)],
        [words(n, HIDDEN, b) for n, b in zip(own, bits, strict=True)],
        suh=(signed(HIDDEN).float() / (1.24 * HIDDEN**0.5)).half(),
        svh=signed(2, EXPERTS, width),
        down_suh=(signed(EXPERTS, width).float() / (1.24 * width**0.5)).half(),
        down_svh=signed(EXPERTS, HIDDEN),
        codebook="mcg",
    )


def routing(rows: int, clustered: bool, seed: int) -> torch.Tensor:
    """int32 [rows, 8]: uniform picks, or picks from as many experts as clustered text would touch."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.randperm(EXPERTS, generator=g)
    if clustered and rows in CLUSTERED:
        pool = pool[: round(CLUSTERED[rows] * EXPERTS * (1 - (1 - SLOTS / EXPERTS) ** rows))]
    return torch.stack([pool[torch.randperm(len(pool), generator=g)[:SLOTS]] for _ in range(rows)]).int().cuda()


def in_graph_us(
    path: str, layers: list[experts_cuda.ExpertTables], rows: int, clustered: bool, seeds: range | None = None
) -> tuple[float, float]:
    """(median microseconds of one call, expert bytes it reads). seeds: of the routings, by default four a layer."""
    t = layers[0]
    x, out = torch.randn(rows, HIDDEN, device="cuda").bfloat16(), torch.empty(rows, HIDDEN, device="cuda")
    weights = torch.rand(rows, SLOTS, device="cuda")
    cls = experts_cuda.DecodeWorkspace if path == "decode" else experts_cuda.PromptWorkspace
    workspace = cls.allocate(rows, SLOTS, EXPERTS, HIDDEN, t.width, True, x.device)
    picks = [routing(rows, clustered, seed) for seed in seeds or range(len(layers) * ROUTINGS)]
    picks *= max(1, len(layers) // len(picks))

    def calls() -> None:
        for i, chosen in enumerate(picks):
            getattr(experts_cuda, path)(layers[i % len(layers)], x, chosen, weights, workspace, out)

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    moved = 0
    for i, chosen in enumerate(picks):
        for e in chosen.unique().tolist():
            moved += sum(w.nbytes for w in layers[i % len(layers)].weights[e::EXPERTS])
    return median_ms(graph.replay, 30) * 1e3 / len(picks), moved / len(picks)


def bench_experts(widths: list[int], windows: list[int], kinds: list[bool]) -> list[dict[str, float | int | str]]:
    found: list[dict[str, float | int | str]] = []
    for width in widths:
        layers = [layer(width, seed) for seed in range(LAYERS)]
        for clustered in kinds:
            for rows in windows:
                us, moved = in_graph_us("decode", layers, rows, clustered)
                kind = "clustered" if clustered else "uniform"
                found.append(
                    {"width": width, "rows": rows, "routing": kind, "us": round(us, 1), "gb_s": round(moved / us / 1e3)}
                )
                print(f"decode width {width} rows {rows:2} {kind:9} {us:7.1f} us {moved / us / 1e3:6.0f} GB/s")
    return found


def bench_prompt(widths: list[int], chunks: list[int]) -> list[dict[str, float | int]]:
    found: list[dict[str, float | int]] = []
    for width in widths:
        layers = [layer(width, seed) for seed in range(LAYERS)]
        for rows in chunks:
            us, _ = in_graph_us("prompt", layers, rows, False)
            tflops = rows * SLOTS * 3 * HIDDEN * width * 2 / us / 1e6
            found.append({"width": width, "rows": rows, "ms": round(us / 1e3, 3), "tflop_s": round(tflops, 1)})
            print(f"prompt width {width} rows {rows:4} {us / 1e3:7.3f} ms {tflops:6.1f} TFLOP/s")
    return found


def bench_placement(windows: list[int]) -> list[dict[str, float | int | str]]:
    found: list[dict[str, float | int | str]] = []
    for placement in Placement:
        layout = Layout(3, 64, 2048, 2048, 12288, 154_880, placement)
        held = []
        for rank in range(3):
            shares = (layout.share(Family.ROUTED, 0, rank, e) for e in range(EXPERTS))
            columns = [stop - start for start, stop in shares]
            held.append([layer(columns, seed) for seed in range(LAYERS)])
        for rows in windows:
            path = "decode" if rows <= experts_cuda.DECODE_ROWS else "prompt"
            times = [
                [in_graph_us(path, ranks, rows, False, range(seed, seed + 1))[0] for ranks in held]
                for seed in range(ROUTINGS)
            ]
            slowest = statistics.mean(max(ranks) for ranks in times)
            mean = statistics.mean(statistics.mean(ranks) for ranks in times)
            found.append(
                {"placement": placement.value, "rows": rows, "slowest_us": round(slowest, 1), "mean_us": round(mean, 1)}
            )
            print(f"placement by {placement.value:6} rows {rows:4} slowest {slowest:7.1f} us, mean {mean:7.1f} us")
    return found


def bench_encode(tiles: int) -> list[dict[str, float | int]]:
    found: list[dict[str, float | int]] = []
    x = torch.randn(tiles, 256, device="cuda") * 1.18
    table = exl3_cuda.codebook_table("mcg").double()
    model_tiles = 75 * EXPERTS * 3 * HIDDEN * 2048 // 256
    for bits in exl3_cuda.ENCODE_BITS:
        states = exl3_cuda.encode_tiles(x, bits, "mcg")
        error = (((table[states.long()] - x.double()) ** 2).sum() / (x.double() ** 2).sum()).item()
        ms = median_ms(lambda bits=bits: exl3_cuda.encode_tiles(x, bits, "mcg"), 3)  # type: ignore[misc]
        rate = tiles * 2 * 256 * 65536 / ms * 1e3
        hours = model_tiles * 2 * 256 * 65536 / rate / 3600
        found.append(
            {
                "bits": bits,
                "tiles_s": round(tiles / ms * 1e3),
                "candidates_s": float(f"{rate:.3g}"),
                "hours_full_model": round(hours, 2),
                "nmse": round(error, 6),
                "peak_bytes": torch.cuda.max_memory_allocated(),
            }
        )
        print(f"encode {bits} bits {rate:.3g} candidates/s, full model {hours:.2f} h, NMSE {error:.6f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("encode", "experts", "prompt", "placement"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[640, 768])
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--uniform-only", action="store_true")
    parser.add_argument("--tiles", type=int, default=132 * 31)
    parser.add_argument("--try", dest="trial", nargs="*", default=[], help="launch shape macros, NAME=VALUE")
    given = parser.parse_args()
    for item in given.trial:
        name, value = item.split("=")
        experts_cuda.trial_shape[name] = int(value)
    if given.what == "encode":
        found: list = bench_encode(given.tiles)
    elif given.what == "experts":
        kinds = [False] if given.uniform_only else [False, True]
        found = bench_experts(given.widths, given.rows or [1, 2, 3, 4, 8, 16], kinds)
    elif given.what == "placement":
        found = bench_placement(given.rows or [1, 4, 8, 16, 2048])
    else:
        found = bench_prompt(given.widths, given.rows or [512, 1024, 2048, 3072, 4096])
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**machine(), "shape": given.trial, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
