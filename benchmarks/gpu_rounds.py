"""What a round of decoding costs on a GPU beside its kernels: graphs and launches, captures, where tokens are drawn.

Usage: python benchmarks/gpu_rounds.py CHECKPOINT RESULT.json [LAYERS]

CHECKPOINT: such as `tfglm synth OUT --preset full-layers --experts exl3:2.75`, GLM-5.3's widths with few experts. Its
last layer stands for all further ones up to LAYERS (78), without an indexer of its own: they share weights, and each
has a cache. So graphs, logits and launches (but for the indexers') are the full model's, while the weights that a round
reads are not: these are no tokens a second of GLM-5.3.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.engine.api import SamplingParams
from tfglm.engine.sampler import choose
from tfglm.formats.latent import KvFormat
from tfglm.models.glm53_cuda import CudaGlm53, load_weights
from tfglm.models.mtp_cuda import load_mtp_cuda
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.weights import ModelWeights
from tfglm.models.window import Rows
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.draw import Draw

TAPS = Taps(normed=True)
READ = 512
WINDOWS = (1, 2, 4, 8, 16)
TOKENS = [(37 * i + 5) % 5000 for i in range(READ + max(WINDOWS))]


def median_ms(run: Callable[[], object], repeats: int = 11) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 3)


def deep(config: ModelConfig, weights: ModelWeights, layers: int) -> tuple[ModelConfig, ModelWeights]:
    """The model with its last layer again and again."""
    more, last = layers - len(weights.layers), weights.layers[-1]
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        indexer_types=config.indexer_types[: len(weights.layers)] + config.indexer_types[-1:] * more,
        mlp_layer_types=config.mlp_layer_types[: len(weights.layers)] + config.mlp_layer_types[-1:] * more,
    ), dataclasses.replace(weights, layers=weights.layers + (last,) * more)


def captures(model: CudaGlm53, window: int) -> dict[str, float]:
    assert model.graphs is not None
    start, before, free = time.perf_counter(), len(model.graphs), torch.cuda.mem_get_info()[0]
    model.prepare(16, window, TAPS)
    seconds, taken = time.perf_counter() - start, free - torch.cuda.mem_get_info()[0]
    return {
        "window": window,
        "captured": len(model.graphs) - before,
        "seconds": round(seconds, 2),
        "mib": round(taken / 2**20, 1),
    }


def rounds(model: CudaGlm53, launched: CudaGlm53) -> dict[str, Any]:
    """Milliseconds of a window by its rows: replayed or launched with its logits brought to the host, and replayed with
    its tokens drawn."""
    streams = {}
    for one in (model, launched):
        streams[one] = one.open_stream()
        one.forward([Rows(streams[one], TOKENS[:READ], 0, prompt=True)])

    def window(one: CudaGlm53, rows: int, draws: list[Draw | None]) -> None:
        entries = [Rows(streams[one], TOKENS[READ : READ + rows], rows)]
        if draws:
            one.forward_drawn(entries, TAPS, draws)
        else:
            one.forward_tapped(entries, TAPS)
        streams[one].truncate(READ)

    found: dict[str, Any] = {"replayed_ms": {}, "drawn_ms": {}, "launched_ms": {}, "replay_alone_ms": {}}
    for rows in WINDOWS:
        draws: list[Draw | None] = [
            Draw(1.0, 0, 0.95, -math.inf, 99 + row, model.config.vocab_size) for row in range(rows)
        ]
        found["replayed_ms"][rows] = median_ms(partial(window, model, rows, []))
        found["drawn_ms"][rows] = median_ms(partial(window, model, rows, draws))
        found["launched_ms"][rows] = median_ms(partial(window, launched, rows, []), 5)
        assert model.graphs is not None
        ready = model.graphs.find(("trunk", rows, 4096, TAPS))
        assert ready is not None
        found["replay_alone_ms"][rows] = median_ms(ready.graph.replay)
    row = model.forward([Rows(streams[model], TOKENS[:1], 1)])[0].numpy()
    params = SamplingParams(temperature=1.0, top_p=0.95)
    found["host_sampler_ms_a_row"] = median_ms(lambda: choose(row, params, 1, 5, vocab_size=len(row)))
    return found


def mtp_step(checkpoint: Checkpoint, model: CudaGlm53) -> float:
    """Milliseconds of a step of the MTP layer with its logits, one row."""
    mtp, trunk = load_mtp_cuda(model, CheckpointSource(checkpoint)), model.open_stream()
    mtp.prepare(2, 4096)
    passed = model.forward_tapped([Rows(trunk, TOKENS[:9], 1)], TAPS)
    own = mtp.open_stream(trunk)
    own.length = 0
    assert passed.normed is not None
    step = mtp.absorb([Rows(own, TOKENS[1:10], 1)], passed.normed)

    def chain() -> None:
        nonlocal step
        own.length = 5
        step = mtp.chain([Rows(own, [4], 1)], step)

    return median_ms(chain)


def main(arguments: list[str]) -> None:
    path, result, layers = Path(arguments[0]), Path(arguments[1]), int((arguments[2:] or ["78"])[0])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    with Checkpoint.open(path) as checkpoint:
        ops = CudaOps(Precision(kv=KvFormat.FP8), torch.device("cuda"))
        shallow = load_weights(checkpoint.config, CheckpointSource(checkpoint), ops)
        config, weights = deep(checkpoint.config, shallow, layers)
        model = CudaGlm53(config, weights, ops, tokens=2048)
        launched = CudaGlm53(config, weights, ops, tokens=2048, graphs=False)
        launched.forward([Rows(launched.open_stream(), TOKENS[:READ], 1, prompt=True)])  # loads kernels, makes scratch
        found: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit,
            "layers": layers,
            "experts": config.n_routed_experts,
            "kv": "fp8",
            "captures": [captures(model, window) for window in (4096, 8192, 16384)],
            **rounds(model, launched),
            "mtp_step_ms": mtp_step(checkpoint, CudaGlm53(checkpoint.config, shallow, ops, tokens=2048)),
        }
    result.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
