"""One rank's share of GLM-5.3 over three ranks, layer by layer, on one GPU with random weights.

Usage: python benchmarks/rank_share.py RESULT.json

The share: 22 heads, routed experts of 640 columns in mixed 2/3/4-bit EXL3 (81/158/17 of 256), shared expert of 640,
dense weights in 4-bit groups, fp8 latents, bf16 index keys; whole router and indexer. Exchanges between ranks are left
out. Four distinct layers, the first with an indexer (GLM-5.3's pattern), are captured in a graph; figures are the
median of its replays. Rows are random, so experts are chosen uniformly: text clusters more.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.formats.latent import KvFormat, row_bytes
from tfglm.models import mla, moe
from tfglm.models.weights import AttentionWeights, IndexerWeights, LayerWeights, MlpWeights, MoeWeights
from tfglm.ops.base import Selection, Span, Window
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.exl3_weights import Exl3Experts

DEVICE = torch.device("cuda")
WIDTH, LAYERS = 640, 4
BITS = (2,) * 81 + (3,) * 158 + (4,) * 17
HBM, EXL3 = 4.3e12, 1.65e12
"""Bytes a second that an H200 reads, and of 2.75-bit weights that its lanes can decode (7 slots a weight)."""

GATES = {"experts": (79, 212, 369, 635), "layer": (125, 270, 430, None)}
"""us at 1, 4, 8, 16 rows that are to be reached (a layer: at a context of 8192)."""


def share_config() -> ModelConfig:
    whole = ModelConfig.from_dict(preset_config("full-layers", {"n_routed_experts": 256}))
    return replace(whole, num_attention_heads=22, moe_intermediate_size=WIDTH)


def random_experts(config: ModelConfig) -> Exl3Experts:
    count, hidden = config.n_routed_experts, config.hidden_size
    order = torch.randperm(count).tolist()
    half_bits = torch.tensor([[2 * BITS[e] for e in order]] * 3, dtype=torch.int32)
    sizes = (hidden * WIDTH * half_bits // 16).to(torch.int64)
    offsets = (sizes.T.flatten().cumsum(0) - sizes.T.flatten()).view(count, 3).T.contiguous()
    buffer = torch.randint(0, 256, (int(sizes.sum()),), dtype=torch.uint8, device=DEVICE)

    def scales(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * 0.1 + 1).half()

    return Exl3Experts(
        "mcg", buffer, offsets, half_bits, torch.full((count,), WIDTH, dtype=torch.int32), scales(hidden), scales(2, count, WIDTH) * 0.02, scales(count, WIDTH),
        scales(count, hidden) * 0.02,
    )  # fmt: skip


def random_layer(config: ModelConfig, ops: CudaOps, full: bool) -> LayerWeights:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    dense = ops.precision.dense

    def matrix(n: int, k: int, kind: str = dense, *, float_out: bool = False) -> torch.Tensor:
        return ops.hold(torch.randn(n, k, device=DEVICE) * k**-0.5, kind, float_out=float_out)

    def vector(n: int) -> torch.Tensor:
        return torch.ones(n, device=DEVICE)

    def per_head(n: int, k: int) -> torch.Tensor:
        return ops.hold_heads(torch.randn(heads, n, k, device=DEVICE) * k**-0.5)

    index_heads, index_width = config.index_n_heads, config.index_head_dim
    indexer = IndexerWeights(
        matrix(index_heads * index_width, config.q_lora_rank, "bf16"),
        matrix(index_width + index_heads, hidden, "bf16"), vector(index_width), vector(index_width) * 0,
    )  # fmt: skip
    attention = AttentionWeights(
        a_proj=matrix(config.q_lora_rank + latent + config.qk_rope_head_dim, hidden),
        q_norm=vector(config.q_lora_rank),
        q_b_proj=matrix(heads * config.qk_head_dim, config.q_lora_rank),
        latent_norm=vector(latent),
        key_up=per_head(latent, config.qk_nope_head_dim),
        value_up=per_head(config.v_head_dim, latent),
        o_proj=matrix(hidden, heads * config.v_head_dim),
        indexer=indexer if full else None,
    )
    shared = MlpWeights(matrix(2 * WIDTH, hidden), matrix(hidden, WIDTH, float_out=True))
    experts = ops.hold_experts(random_experts(config))
    ffn = MoeWeights(
        matrix(config.n_routed_experts, hidden, "bf16"), vector(config.n_routed_experts) * 0, experts, shared
    )
    return LayerWeights(vector(hidden), attention, vector(hidden), ffn)


@dataclass
class Share:
    """Four layers, their caches of `tokens` tokens, and how to run a window at the end of a context."""

    config: ModelConfig
    ops: CudaOps
    layers: list[LayerWeights]
    planes: list[LayerPlanes]
    pages: torch.Tensor

    @classmethod
    def random(cls, tokens: int) -> Share:
        config, ops = share_config(), CudaOps(Precision(KvFormat.FP8, "q4", "fp8"), DEVICE)
        size = row_bytes(KvFormat.FP8, config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)

        def plane(width: int) -> torch.Tensor:
            return torch.randint(0, 60, (tokens // PAGE, PAGE, width), dtype=torch.uint8, device=DEVICE)

        planes = [
            LayerPlanes(plane(size.latent), plane(size.rotary), plane(size.index) if layer == 0 else None)
            for layer in range(LAYERS)
        ]
        layers = [random_layer(config, ops, layer == 0) for layer in range(LAYERS)]
        return cls(config, ops, layers, planes, torch.randperm(tokens // PAGE, device=DEVICE)[None])

    def runner(self, rows: int, context: int, parts: str = "all") -> Callable[[], None]:
        """A function that runs the group of layers once."""
        at = torch.arange(context - rows, context, device=DEVICE)
        slots = self.pages[0, at // PAGE] * PAGE + at % PAGE
        spans = (Span(0, rows, context - rows),)
        window = Window(at, slots, self.pages, torch.zeros_like(at), spans)
        x0 = torch.randn(rows, self.config.hidden_size, device=DEVICE).bfloat16()
        half = torch.arange(0, 64, 2, device=DEVICE) / 64
        rope = self.ops.angles(at, 1.0 / self.config.rope_theta**half)
        ops, config = self.ops, self.config

        def experts() -> None:
            for layer in self.layers:
                routing = ops.route(x0, layer.ffn.gate, layer.ffn.correction, config)
                ops.experts(x0, routing, layer.ffn.experts)

        def routing_alone() -> None:
            for layer in self.layers:
                ops.route(x0, layer.ffn.gate, layer.ffn.correction, config)

        def everything() -> None:
            ops.context = context
            x, branch, selection = x0, x0, None
            for layer, planes in zip(self.layers, self.planes, strict=True):
                x, h = ops.add_rms_norm(x, branch, layer.attention_norm, config.rms_norm_eps)
                branch, selection = mla.attention(ops, config, layer.attention, h, rope, window, planes, selection)
                x, h = ops.add_rms_norm(x, branch, layer.ffn_norm, config.rms_norm_eps)
                branch = moe.feed_forward(ops, config, layer.ffn, h)

        def shared_layers() -> None:
            """The three layers without an indexer."""
            ops.context = context
            x, branch = x0, x0
            count = min(context, config.index_topk)
            selection = Selection(slots_listed[:, :count].contiguous(), counts)
            for layer, planes in zip(self.layers[1:], self.planes[1:], strict=True):
                x, h = ops.add_rms_norm(x, branch, layer.attention_norm, config.rms_norm_eps)
                branch, _ = mla.attention(ops, config, layer.attention, h, rope, window, planes, selection)
                x, h = ops.add_rms_norm(x, branch, layer.ffn_norm, config.rms_norm_eps)
                branch = moe.feed_forward(ops, config, layer.ffn, h)

        slots_listed = torch.arange(config.index_topk, dtype=torch.int32, device=DEVICE)[None].repeat(rows, 1) * (
            max(1, context // config.index_topk)
        )
        counts = torch.full((rows,), min(context, config.index_topk), dtype=torch.int32, device=DEVICE)
        return {"all": everything, "experts": experts, "routing": routing_alone, "shared": shared_layers}[parts]


@torch.inference_mode()
def graph_us(run: Callable[[], None], replays: int = 15) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[2:])


@torch.inference_mode()
def by_kernel(run: Callable[[], None]) -> dict[str, dict[str, float]]:
    """us and launches a layer of each kernel, launched one by one."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    total: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "launches": 0.0})
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:60]]["us"] += event.device_time / LAYERS
            total[event.name[:60]]["launches"] += 1 / LAYERS
    kernels = sorted(total.items(), key=lambda item: -item[1]["us"])
    return {name: {key: round(value, 2) for key, value in figures.items()} for name, figures in kernels}


def expert_ratios(experts_us: dict[str, float]) -> dict[str, dict[str, float]]:
    """The share of two limits that the routed experts reach, for the distinct experts that independent draws need."""
    one = 3 * 6144 * WIDTH * sum(BITS) / len(BITS) / 8
    ratios = {}
    for rows, us in experts_us.items():
        nbytes = 256 * (1 - (1 - 8 / 256) ** int(rows)) * one
        limits = {"of reading them": HBM, "of decoding them": EXL3}
        ratios[rows] = {name: round(nbytes / rate * 1e6 / us, 2) for name, rate in limits.items()}
    return ratios


def main(result: Path) -> None:
    share = Share.random(512_000)
    properties = torch.cuda.get_device_properties(DEVICE)
    report: dict[str, object] = {
        "hardware": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "what": __doc__,
        "gates": GATES,
    }

    def keep(section: str, key: str, value: object) -> None:
        report.setdefault(section, {})[key] = value  # type: ignore[index]
        result.write_text(json.dumps(report, indent=1) + "\n")
        print(section, key, value, flush=True)

    for rows in (1, 2, 4, 8, 16):
        experts, routing = (graph_us(share.runner(rows, 8192, part)) / LAYERS for part in ("experts", "routing"))
        keep("experts_us", str(rows), round(experts - routing, 1))
    experts_us = report["experts_us"]
    assert isinstance(experts_us, dict)
    keep("ratios", "experts", expert_ratios(experts_us))
    for context in (8192, 102_400, 512_000):
        for rows in (1, 2, 4, 8, 16) if context == 8192 else (1, 4, 8):
            four = graph_us(share.runner(rows, context))
            shared = graph_us(share.runner(rows, context, "shared")) / (LAYERS - 1)
            full = four - shared * (LAYERS - 1)
            mean = {"mean": round(four / LAYERS, 1), "shared": round(shared, 1), "with indexer": round(full, 1)}
            keep("layer_us", f"R={rows} T={context}", mean)
    for rows in (2048,):
        keep("prompt_ms", str(rows), round(graph_us(share.runner(rows, 8192), 5) / LAYERS / 1e3, 2))
        experts, routing = (graph_us(share.runner(rows, 8192, part), 5) / LAYERS for part in ("experts", "routing"))
        keep("prompt_experts_ms", str(rows), round((experts - routing) / 1e3, 2))
    for rows in (1, 8, 2048):
        keep("kernels_us", f"R={rows} T=8192", by_kernel(share.runner(rows, 8192)))
    kernels = report["kernels_us"]
    assert isinstance(kernels, dict)
    launches = {window: sum(k["launches"] for k in times.values()) for window, times in kernels.items()}
    keep("launches_per_layer", "mean", launches)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
