"""EXL3 on a CPU: error of the ring search on Gaussian tiles by width and codebook, and speed of search and decode.

    python benchmarks/exl3_cpu.py [--tiles 200] [--out benchmarks/results/exl3_cpu.json]

NMSE: squared error over that of the tile, N(0, 1) weights scaled to a share of the codebook's standard deviation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from tfglm.formats import exl3
from tfglm.formats.exl3_code import codebook_table

SCALES = {1: 1.0, 1.5: 1.0, 2: 0.98, 2.5: 0.95, 3: 0.95, 3.5: 0.95, 4: 0.9, 5: 0.85, 6: 0.8, 7: 0.8, 8: 0.8}
HALF_WIDTHS = (1.5, 2.5, 3.5)


def nmse(tiles: np.ndarray, bits: float, codebook: str) -> dict[str, object]:
    table = codebook_table(codebook).astype(np.float64)
    x = tiles * SCALES[bits] * table.std()
    found = {}
    for costs in ("fp32", "fp16"):
        started = time.perf_counter()
        states = exl3.encode_tiles(x.astype(np.float32), bits, codebook, costs=costs)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        found[costs] = float(np.sum((table[states] - x) ** 2) / np.sum(x**2))
        found[f"{costs}_tiles_per_second"] = len(tiles) / seconds
    return {"codebook": codebook, "bits": bits, "input_scale": SCALES[bits], **found}


def decode(bits: int) -> dict[str, object]:
    trellis = np.random.default_rng(0).integers(-(2**15), 2**15, (128, 128, 16 * bits), dtype=np.int16)
    best = np.inf
    for _ in range(5):
        started = time.perf_counter()
        out = exl3.decode_tiles(trellis, "mcg")
        best = min(best, time.perf_counter() - started)
    return {
        "bits": bits,
        "packed_mb_per_second": trellis.nbytes / best / 1e6,
        "fp16_mb_per_second": out.nbytes / best / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exl3_cpu.json"))
    args = parser.parse_args()
    tiles = np.random.default_rng(1).standard_normal((args.tiles, 256))
    exl3.encode_tiles(tiles[:2].astype(np.float32), 2, "mcg")  # compiles
    errors = []
    for codebook in ("mcg", "mul1", "3inst"):
        for bits in SCALES:
            if codebook == "mul1" or bits not in HALF_WIDTHS:
                errors.append(nmse(tiles, bits, codebook))
                print(errors[-1], flush=True)
    facts = {
        "command": f"python {' '.join(sys.argv)}",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "tiles": args.tiles,
        "nmse": errors,
        "decode": [decode(bits) for bits in (2, 3, 4)],
    }
    print(facts["decode"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
