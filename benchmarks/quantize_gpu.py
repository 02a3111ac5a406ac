"""The quantiser on a GPU: seconds an expert of GLM-5.3's size, peak memory, and what the whole model would take.

    python benchmarks/quantize_gpu.py --out benchmarks/results/quantize_h200.json

Random weights and rows: time does not depend on them. The first expert is left out, since it compiles kernels and
searches the scales.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.ops.base import PlainExperts, Routing
from tfglm.quantize.encoder import search_on
from tfglm.quantize.experts import ExpertLayer
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.run import quantise_checkpoint

LAYERS, EXPERTS = 76, 256  # sparse layers of GLM-5.3 and its MTP layer
CANDIDATES = 2 * 256 * 65536  # a tile


class Clock:
    """A search that adds up its own time and tiles."""

    def __init__(self, device: torch.device) -> None:
        self._search, self.device, self.seconds, self.tiles = search_on(device), device, 0.0, 0

    def __call__(self, tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
        wait(self.device)
        started = time.perf_counter()
        found = self._search(tiles, bits, codebook)
        wait(self.device)
        self.seconds += time.perf_counter() - started
        self.tiles += len(tiles)
        return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def experts(device: torch.device, hidden: int, inner: int, rows: int) -> dict[str, object]:
    """Three experts of 2, 3 and 4 bits after one to warm up."""
    random = torch.Generator().manual_seed(0)
    count = 4
    x = torch.randn(rows, hidden, generator=random).to(device, torch.bfloat16)
    chosen = torch.randint(count, (rows, 1), generator=random).to(device)
    routing = Routing(chosen, torch.rand(rows, 1, generator=random).to(device) + 0.1)
    gate_up = torch.randn(count, 2 * inner, hidden, generator=random).to(device, torch.bfloat16) * hidden**-0.5
    down = torch.randn(count, hidden, inner, generator=random).to(device, torch.bfloat16) * inner**-0.5
    plain, recipe = PlainExperts(gate_up, down), Recipe(3, (2.0, 3.0, 4.0))
    layer = ExpertLayer("layer", x, routing, plain, recipe, search_on(device))
    measured = []
    started = time.perf_counter()
    for number, done in enumerate(layer.quantised([(3.0, 3.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)])):
        wait(device)
        seconds = time.perf_counter() - started
        if number:
            proxy = [matrix.proxy_error for matrix in done.matrices]
            measured.append({"bits": done.widths[0], "seconds": seconds, "proxy_errors": proxy})
            print(measured[-1], flush=True)
        started = time.perf_counter()
    clock = Clock(device)
    next(ExpertLayer("layer", x, routing, plain, Recipe(3, (3.0,)), clock).quantised([(3.0, 3.0)]))
    mean = sum(float(entry["seconds"]) for entry in measured) / len(measured)
    return {
        "experts": measured,
        "candidates_per_second": clock.tiles * CANDIDATES / clock.seconds,
        "seconds_an_expert": mean,
        "hours_for_glm53": mean * LAYERS * EXPERTS / 3600,
    }


def small_model(device: str) -> list[float]:
    """Proxy error by layer of a small model, every step of it on the device."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        write_checkpoint(source, "tiny", 0, num_hidden_layers=5, n_routed_experts=4, moe_intermediate_size=128)
        tokens = [[(31 * i + 7 * s) % 1400 for i in range(400)] for s in range(2)]
        with Checkpoint.open(source) as checkpoint:
            report = quantise_checkpoint(
                checkpoint, Path(scratch) / "out", Recipe(2.75, (2.0, 3.0, 4.0)), tokens, device=device
            )
    return [layer.proxy_error for layer in report.layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantize_h200.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32768)
    args = parser.parse_args()
    device = torch.device(args.device)
    started = time.perf_counter()
    proxy = small_model(args.device)
    print("small model", proxy, time.perf_counter() - started, flush=True)
    with torch.inference_mode():
        result = experts(device, args.hidden, args.inner, args.rows)
    cuda = device.type == "cuda"
    facts = {
        "command": f"python {' '.join(sys.argv)}",
        "hardware": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "hidden": args.hidden,
        "inner": args.inner,
        "rows": args.rows,
        "small_model_proxy_errors": proxy,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
        **result,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
