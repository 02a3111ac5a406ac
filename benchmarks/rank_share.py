"""One rank's share of GLM-5.3 over three ranks, layer by layer, on one GPU with random weights.

Usage: python benchmarks/rank_share.py RESULT.json

The share: 22 heads, routed experts of 640 columns in mixed 2/3/4-bit EXL3 (81/158/17 of 256), shared expert of 640,
dense weights in 4-bit groups, fp8 latents, bf16 index keys; whole router and indexer. Exchanges between ranks are left
out. Four distinct layers, the first with an indexer (GLM-5.3's pattern), are captured in a graph; figures are the
median of its replays. The router runs, then drawn choices take its place: uniform ones, or "clustered" ones from as few
distinct experts as real text shows. Kernels are timed one by one, without overlap of neighbours.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import gpu_exl3
import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.formats.latent import KvFormat, row_bytes
from tfglm.models import mla, moe
from tfglm.models.weights import AttentionWeights, IndexerWeights, LayerWeights, MlpWeights, MoeWeights
from tfglm.ops import driver
from tfglm.ops.base import Routing, Selection, Span, Window
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.exl3_weights import Exl3Experts

DEVICE = torch.device("cuda")
WIDTH, LAYERS = 640, 4
BITS = (2,) * 81 + (3,) * 158 + (4,) * 17
HBM, EXL3 = 4.3e12, 1.65e12
"""Bytes a second that an H200 reads, and of 2.75-bit weights that its lanes can decode (7 slots a weight)."""

GATES = {"experts": (79, 212, 369, 635), "layer": (125, 270, 430, None)}
"""us at 1, 4, 8, 16 rows that are to be reached (a layer: at a context of 8192)."""


CONTEXTS, WINDOWS, CHUNKS = (8192, 102_400, 512_000), (1, 2, 4, 8, 16), (2048, 3072, 4096)
FAMILIES = {
    "dense linears": ("linear_",),
    "routed experts": ("experts_", "prompt_"),
    "attention": ("attend_", "merge_"),
    "indexer": ("index_", "select_", "write_index", "rotate"),
    "norms, cache writes, swiglu": ("add_rms", "split_", "swiglu"),
    "router": ("route",),
}


class DrawnOps(CudaOps):
    """Choices of experts drawn beforehand, a layer each, in the place of the router's; the router runs all the same."""

    drawn: list[torch.Tensor]
    layer: int

    def route(self, *given: object) -> Routing:
        routing = super().route(*given)  # type: ignore[arg-type]
        self.layer += 1
        return Routing(self.drawn[self.layer - 1], routing.weights)


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
        "mcg", buffer, offsets, half_bits, torch.full((count,), WIDTH, dtype=torch.int32), scales(hidden),
        scales(2, count, WIDTH) * 0.02, scales(count, WIDTH), scales(count, hidden) * 0.02,
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
    ops: DrawnOps
    layers: list[LayerWeights]
    planes: list[LayerPlanes]
    pages: torch.Tensor
    drawn: dict[tuple[int, bool], list[torch.Tensor]] = field(default_factory=dict)

    def choices(self, rows: int, clustered: bool) -> list[torch.Tensor]:
        """int32 [rows, 8] for each layer."""
        if (rows, clustered) not in self.drawn:
            self.drawn[rows, clustered] = [gpu_exl3.routing(rows, clustered, seed) for seed in range(LAYERS)]
        return self.drawn[rows, clustered]

    @classmethod
    def random(cls, tokens: int) -> Share:
        config, ops = share_config(), DrawnOps(Precision(KvFormat.FP8, "q4", "fp8"), DEVICE)
        size = row_bytes(KvFormat.FP8, config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)

        def plane(width: int) -> torch.Tensor:
            return torch.randint(0, 60, (tokens // PAGE, PAGE, width), dtype=torch.uint8, device=DEVICE)

        planes = [
            LayerPlanes(plane(size.latent), plane(size.rotary), plane(size.index) if layer == 0 else None)
            for layer in range(LAYERS)
        ]
        layers = [random_layer(config, ops, layer == 0) for layer in range(LAYERS)]
        return cls(config, ops, layers, planes, torch.randperm(tokens // PAGE, device=DEVICE)[None])

    def runner(self, rows: int, context: int, parts: str = "all", clustered: bool = False) -> Callable[[], None]:
        """A function that runs the group of layers once."""
        choices = self.choices(rows, clustered)
        at = torch.arange(context - rows, context, device=DEVICE)
        slots = self.pages[0, at // PAGE] * PAGE + at % PAGE
        spans = (Span(0, rows, context - rows),)
        window = Window(at, slots, self.pages, torch.zeros_like(at), spans)
        x0 = torch.randn(rows, self.config.hidden_size, device=DEVICE).bfloat16()
        half = torch.arange(0, 64, 2, device=DEVICE) / 64
        rope = self.ops.angles(at, 1.0 / self.config.rope_theta**half)
        ops, config = self.ops, self.config

        def experts() -> None:
            ops.drawn, ops.layer = choices, 0
            for layer in self.layers:
                routing = ops.route(x0, layer.ffn.gate, layer.ffn.correction, config)
                ops.experts(x0, routing, layer.ffn.experts)

        def routing_alone() -> None:
            ops.drawn, ops.layer = choices, 0
            for layer in self.layers:
                ops.route(x0, layer.ffn.gate, layer.ffn.correction, config)

        def everything() -> None:
            ops.context, ops.drawn, ops.layer = context, choices, 0
            x, branch, selection = x0, x0, None
            for layer, planes in zip(self.layers, self.planes, strict=True):
                x, h = ops.add_rms_norm(x, branch, layer.attention_norm, config.rms_norm_eps)
                branch, selection = mla.attention(ops, config, layer.attention, h, rope, window, planes, selection)
                x, h = ops.add_rms_norm(x, branch, layer.ffn_norm, config.rms_norm_eps)
                branch = moe.feed_forward(ops, config, layer.ffn, h)

        def shared_layers() -> None:
            """The three layers without an indexer."""
            ops.context, ops.drawn, ops.layer = context, choices, 0
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


@contextmanager
def one_by_one() -> Iterator[None]:
    """Launches that wait for their predecessors' end, so that a kernel's time holds no waiting."""
    call = driver.Kernel.__call__

    def plainly(self: driver.Kernel, *given: object, overlap: bool = False, **more: object) -> None:
        call(self, *given, **more)  # type: ignore[arg-type]

    driver.Kernel.__call__ = plainly  # type: ignore[method-assign]
    try:
        yield
    finally:
        driver.Kernel.__call__ = call  # type: ignore[method-assign]


@torch.inference_mode()
def by_kernel(run: Callable[[], None]) -> dict[str, dict[str, float]]:
    """us and launches a layer of each kernel."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "launches": 0.0})
    with one_by_one():
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:60]]["us"] += event.device_time / LAYERS
            total[event.name[:60]]["launches"] += 1 / LAYERS
    kernels = sorted(total.items(), key=lambda item: -item[1]["us"])
    return {name: {key: round(value, 2) for key, value in figures.items()} for name, figures in kernels}


def by_family(kernels: dict[str, dict[str, float]]) -> dict[str, float]:
    """us a layer of each family of kernels."""
    total: dict[str, float] = defaultdict(float)
    for name, figures in kernels.items():
        family = next((family for family, names in FAMILIES.items() if name.startswith(names)), "other")
        total[family] += figures["us"]
    return {family: round(us, 1) for family, us in total.items()}


def must_move(share: Share, rows: int, context: int, clustered: bool) -> dict[str, float]:
    """Bytes a layer (mean of the four) that a window has to read once, by kind, and the least us it can take.

    A limit: everything at the rate of memory, but the experts' weights at the rate at which they can be decoded where
    that is lower. Products of prompts take longer and are not counted.
    """
    config, ops = share.config, share.ops
    dense = 0
    for layer in share.layers:
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(ffn, MoeWeights)
        held = [attention.a_proj, attention.q_b_proj, attention.o_proj, ffn.gate, ffn.shared.gate_up, ffn.shared.down]
        if attention.indexer is not None:
            held += [attention.indexer.wq_b, attention.indexer.key_and_heads]
        dense += sum(ops._held(weight).nbytes for weight in held) + attention.key_up.nbytes + attention.value_up.nbytes
    experts = 0
    for layer, chosen in zip(share.layers, share.choices(rows, clustered), strict=True):
        assert isinstance(layer.ffn, MoeWeights) and isinstance(layer.ffn.experts, Exl3Experts)
        distinct = chosen.unique().cpu().long()
        experts += int(layer.ffn.experts.half_bits[:, distinct].sum()) * config.hidden_size * WIDTH // 16
    size = row_bytes(KvFormat.FP8, config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)
    listed = rows * min(context, config.index_topk) * (size.latent + size.rotary) * LAYERS
    keys = context * size.index
    moved = {"dense": dense, "experts": experts, "cached rows": listed, "index keys": keys}
    limit = (dense + listed + keys) / HBM + experts / min(HBM, EXL3)
    figures = {name: round(nbytes / LAYERS / 1e6, 2) for name, nbytes in moved.items()}
    return {**figures, "limit_us": round(limit / LAYERS * 1e6, 1)}


def expert_ratios(share: Share, rows: int, us: float, clustered: bool) -> dict[str, float]:
    """The share of two limits that the routed experts reach."""
    nbytes = must_move(share, rows, 8192, clustered)["experts"] * 1e6
    limits = {"of reading them": HBM, "of decoding them": EXL3}
    return {name: round(nbytes / rate * 1e6 / us, 2) for name, rate in limits.items()}


def main(result: Path) -> None:
    share = Share.random(512_000)
    properties = torch.cuda.get_device_properties(DEVICE)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, object] = {
        "hardware": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": commit or "unknown",
        "what": __doc__,
        "gates": GATES,
    }

    def keep(section: str, key: str, value: object) -> None:
        report.setdefault(section, {})[key] = value  # type: ignore[index]
        result.write_text(json.dumps(report, indent=1) + "\n")
        print(section, key, value, flush=True)

    for clustered in (False, True):
        kind = "clustered " if clustered else ""
        for rows in WINDOWS[1 if clustered else 0 :]:
            parts = ("experts", "routing")
            both, routing = (graph_us(share.runner(rows, 8192, part, clustered)) / LAYERS for part in parts)
            keep("experts_us", f"{kind}{rows}", round(both - routing, 1))
            keep("ratios", f"{kind}{rows}", expert_ratios(share, rows, both - routing, clustered))
        for context in CONTEXTS:
            for rows in WINDOWS[1 if clustered else 0 :]:
                four = graph_us(share.runner(rows, context, clustered=clustered))
                shared = graph_us(share.runner(rows, context, "shared", clustered)) / (LAYERS - 1)
                full, moved = four - shared * (LAYERS - 1), must_move(share, rows, context, clustered)
                mean = {"mean": round(four / LAYERS, 1), "shared": round(shared, 1), "with indexer": round(full, 1)}
                keep("layer_us", f"{kind}R={rows} T={context}", mean)
                reached = round(moved["limit_us"] * LAYERS / four, 2)
                keep("moved_MB", f"{kind}R={rows} T={context}", {**moved, "limit reached": reached})
    for rows in CHUNKS:
        keep("prompt_ms", str(rows), round(graph_us(share.runner(rows, 8192), 5) / LAYERS / 1e3, 2))
        both, routing = (graph_us(share.runner(rows, 8192, part), 5) / LAYERS for part in ("experts", "routing"))
        keep("prompt_experts_ms", str(rows), round((both - routing) / 1e3, 2))
    for rows in (1, 8, 2048):
        kernels = by_kernel(share.runner(rows, 8192))
        keep("kernels_us", f"R={rows} T=8192", kernels)
        keep("families_us", f"R={rows} T=8192", by_family(kernels))
        keep("launches_per_layer", f"R={rows} T=8192", sum(k["launches"] for k in kernels.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
