"""The account of a GPU's buffers against the forward pass itself: its kernels are left out, its tensors lie in host
memory that nothing touches, and what lives at the same time is counted. And against an H200's allocator."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.formats.latent import KvFormat
from tfglm.layout import Family, Layout
from tfglm.memory import buffers
from tfglm.memory.buffers import Shapes, gpu_buffers, held, rank_shapes
from tfglm.memory.inventory import Inventory
from tfglm.models.glm53_cuda import CudaGlm53
from tfglm.models.mtp import MtpWeights
from tfglm.models.mtp_cuda import CudaMtp
from tfglm.models.taps import Passed, Taps
from tfglm.models.weights import (
    AttentionWeights,
    IndexerWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from tfglm.models.window import LaidOut, Rows, appended
from tfglm.ops import cuda_attention, cuda_linear, driver
from tfglm.ops.base import Experts, PlainExperts
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.cuda_sample import Sampler
from tfglm.ops.exl3_experts_cuda import DECODE_ROWS, DecodeWorkspace, ExpertTables, PromptWorkspace
from tfglm.ops.exl3_weights import Exl3Experts
from tfglm.ranks.group import RankGroup
from tfglm.settings import Settings

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "plan_h200.json"
WIDE = {"num_hidden_layers": 5, "n_routed_experts": 8}
CPU = torch.device("cpu")


class Live(TorchDispatchMode):
    """Bytes of the tensors that were made inside and still live, as torch's GPU allocator counts them; most: the most
    so far."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._counts:
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor.untyped_storage())
            self.most = max(self.most, self.now())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if storage.nbytes() and (known is None or known[0].expired()):
            self._live[storage._cdata] = StorageWeakRef(storage), held(storage.nbytes())

    def now(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        self._counts = False
        yield
        self._counts = True


class NoKernel:
    """Stands for every kernel file, and for each kernel of it."""

    def kernel(self, name: str) -> NoKernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is launched."""


class Wire:
    """Of a group that meets nobody; what it gathers is as large as NCCL's."""

    capturable = False
    sum, concat = RankGroup.sum, RankGroup.concat

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def announce(self, message: Any) -> None:
        """There is nobody."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        data = part.contiguous().reshape(-1).view(torch.uint8)
        gathered = torch.empty(self.ranks * data.numel(), dtype=torch.uint8)
        return gathered.view(part.dtype).reshape(self.ranks, *part.shape)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load", lambda *args: NoKernel())
    monkeypatch.setattr(cuda_linear, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda_attention, "_has_room", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))


# ---- a model of one rank, of the shapes that one has and no values


class Empty:
    """Weights of one rank."""

    def __init__(self, config: ModelConfig, ops: CudaOps, ranks: int, rank: int, exl3: bool, fused: bool) -> None:
        self._config, self._ops, self._layout, self._rank = config, ops, Layout.of(config, ranks), rank
        self._exl3, self._fused = exl3, fused

    def share(self, family: Family, layer: int = 0, expert: int = 0) -> int:
        start, stop = self._layout.share(family, layer, self._rank, expert)
        return stop - start

    def matrix(self, *shape: int, float_out: bool = False) -> torch.Tensor:
        return self._ops.hold(torch.empty(shape, dtype=torch.bfloat16), "bf16", float_out=float_out)

    def layer(self, number: int, kind: str, sparse: bool) -> LayerWeights:
        hidden, partial = self._config.hidden_size, self._layout.ranks > 1
        dense = None if sparse else self._mlp(self.share(Family.DENSE, number), partial)
        norm = torch.empty(hidden)
        return LayerWeights(norm, self._attention(kind, partial), norm, dense or self._moe(number))

    def _attention(self, kind: str, partial: bool) -> AttentionWeights:
        c, heads = self._config, self.share(Family.HEADS)
        width = c.index_head_dim
        indexer = IndexerWeights(
            self.matrix(c.index_n_heads * width, c.q_lora_rank),
            self.matrix(width + c.index_n_heads, c.hidden_size),
            torch.empty(width),
            torch.empty(width),
        )
        return AttentionWeights(
            self.matrix(c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
            torch.empty(c.q_lora_rank),
            self.matrix(heads * c.qk_head_dim, c.q_lora_rank),
            torch.empty(c.kv_lora_rank),
            torch.empty(heads, c.kv_lora_rank, c.qk_nope_head_dim, dtype=torch.bfloat16),
            torch.empty(heads, c.v_head_dim, c.kv_lora_rank, dtype=torch.bfloat16),
            self.matrix(c.hidden_size, heads * c.v_head_dim, float_out=partial),
            indexer if kind == "full" else None,
        )

    def _mlp(self, inner: int, float_out: bool) -> MlpWeights:
        hidden = self._config.hidden_size
        return MlpWeights(self.matrix(2 * inner, hidden), self.matrix(hidden, inner, float_out=float_out))

    def _moe(self, number: int) -> MoeWeights:
        hidden, count = self._config.hidden_size, self._config.n_routed_experts
        shared = self._mlp(self.share(Family.SHARED, number), True)
        return MoeWeights(self.matrix(count, hidden), torch.empty(count), self._experts(number), shared)

    def _experts(self, number: int) -> Experts:
        hidden, count = self._config.hidden_size, self._config.n_routed_experts
        width = max(self.share(Family.ROUTED, number, expert) for expert in range(count))
        if not self._exl3:
            gate_up, down = (count, 2 * width, hidden), (count, hidden, width)
            return PlainExperts(*(torch.empty(shape, dtype=torch.bfloat16) for shape in (gate_up, down)))
        one, buffer = torch.empty(1, dtype=torch.float16), torch.empty(64, dtype=torch.uint8)
        self._ops._exl3._tables[buffer.data_ptr()] = ExpertTables(
            codebook="mcg",
            trellis=torch.empty(3, count, dtype=torch.int64),
            k2=one,
            columns=one,
            suh=one.expand(hidden) if self._fused else one.expand(2, count, hidden),
            svh=one.expand(2, count, width),
            down_suh=one.expand(count, width),
            down_svh=one.expand(count, hidden),
            weights=(),
            widest=6,
            paired=True,
            all_widths=False,
        )
        return Exl3Experts("mcg", buffer, one, one, one, one, one, one, one)


class Counted(CudaGlm53):
    """On the host, which is not waited for; of a window, what is on the device is counted."""

    live: Live

    def on_device(self, rows: LaidOut) -> LaidOut:
        with self.live.uncounted():
            placed = super().on_device(rows)
        self.live._add(placed.tokens.untyped_storage())
        return placed

    def _on_host(self, passed: Passed, rows: int) -> Passed:
        return dataclasses.replace(passed, logits=torch.empty(0))

    def finished(self) -> None:
        """Nothing runs."""


@dataclasses.dataclass
class Built:
    """A rank's model, its MTP layer, and what the plan makes of its shapes."""

    model: Counted
    mtp: CudaMtp
    shapes: Shapes


def build(
    preset: str, fields: dict[str, Any], ranks: int, rank: int, tokens: int, *, exl3: bool, fused: bool, mtp: bool,
    kv: str, cp: bool = False,
) -> Built:  # fmt: skip
    config = ModelConfig.from_dict(preset_config(preset, fields))
    ops = CudaOps(Precision(KvFormat(kv)), CPU)
    empty, norm = Empty(config, ops, ranks, rank, exl3, fused), torch.empty(config.hidden_size)
    vocabulary = empty.share(Family.VOCABULARY)
    weights = ModelWeights(
        embed=torch.empty(vocabulary, config.hidden_size, dtype=torch.bfloat16),
        layers=tuple(
            empty.layer(number, kind, config.mlp_layer_types[number] == "sparse")
            for number, kind in enumerate(config.indexer_types)
        ),
        norm=norm,
        head=empty.matrix(vocabulary, config.hidden_size, float_out=True),
    )
    group = Wire(rank, ranks) if ranks > 1 else None
    model = Counted(config, weights, ops, tokens=tokens, graphs=False, group=group, cp=cp)  # type: ignore[arg-type]
    last = ModelWeights(weights.embed, (empty.layer(config.num_hidden_layers, "full", True),), norm, weights.head)
    join = empty.matrix(config.hidden_size, 2 * config.hidden_size)
    layers = range(config.num_hidden_layers + 1)
    names = (f"model.layers.{n}.mlp.experts.{e}.{p}_proj" for n in layers for e in range(99) for p in ("gate", "up"))
    inventory = Inventory("empty", config, dict.fromkeys(names, 3.0) if exl3 else {}, shared_scales=fused)
    settings = Settings(ranks=ranks, cp=cp, kv=kv, drafter="mtp" if mtp else "none")
    return Built(model, CudaMtp(model, MtpWeights(last, norm, norm, join)), rank_shapes(inventory, settings, rank))


def peak(built: Built, rows: int, context: int, taps: Taps) -> int:
    """Of the second of two chunks of `rows`, which ends at `context`, through the trunk and the layer that drafts.
    Scratch that stays was made by the first, whose rows a rank other than 0 still has while the trunk runs."""
    model, live = built.model, Live()
    model.live, pool = live, model.cache.pool
    stream = model.open_stream()
    stream.pages += pool.take(-(-context // model.page_tokens) - len(stream.pages))
    stream.length = context - 2 * rows
    with torch.inference_mode(), live:
        with appended([Rows(stream, [1] * rows, 1, prompt=True)], pool, model.config) as laid_out:
            before = model._forward(laid_out, taps)
        if built.shapes.rank == 0:
            del before
        live.most = live.now()
        stays = live.now() - (0 if built.shapes.rank == 0 else handed_out(before))
        with appended([Rows(stream, [1] * rows, 1, prompt=True)], pool, model.config) as laid_out:
            passed = model._forward(laid_out, taps)
            if built.shapes.rank:
                del before
            if built.shapes.mtp:
                assert passed.normed is not None
                hidden = torch.cat([passed.normed[:1].clone(), passed.normed])
                rest = dataclasses.replace(laid_out, wanted=laid_out.wanted[:0])
                built.mtp.layer(rest, torch.cat([hidden[:rows]]), None)
    stream.close()
    return live.most - stays


def handed_out(passed: Passed) -> int:
    tensors = [passed.normed, *passed.streams.values()]
    return sum(held(tensor.nbytes) for tensor in tensors if tensor is not None)


COUNTED: list[tuple[str, dict[str, Any], int, int, int, int, dict[str, Any]]] = [
    ("full-layers", WIDE, 1, 0, 2048, 32768, {"mtp": True}),
    ("full-layers", WIDE, 1, 0, 4096, 16384, {}),
    ("full-layers", WIDE, 3, 0, 2048, 163840, {"mtp": True}),
    ("full-layers", WIDE, 3, 1, 1024, 499712, {"mtp": True, "kv": "fp4x"}),
    ("full-layers", WIDE, 3, 2, 256, 65536, {}),
    ("full-layers", WIDE, 1, 0, 512, 1048576, {"taps": (1, 3, 5)}),
    ("tiny", {}, 1, 0, 256, 4096, {"exl3": False, "mtp": True}),
    ("tiny", {}, 1, 0, 256, 8192, {"exl3": False, "kv": "bf16"}),
    ("tiny", {}, 3, 0, 64, 2048, {"exl3": False, "taps": (2, 5)}),
    ("tiny", {}, 3, 1, 128, 4096, {"mtp": True}),
    ("full-layers", WIDE, 3, 0, 512, 65536, {"mtp": True, "cp": True}),
    ("full-layers", WIDE, 3, 1, 1024, 12288, {"cp": True}),
    ("full-layers", WIDE, 3, 0, 256, 499712, {"cp": True}),
]


@pytest.mark.parametrize(("preset", "fields", "ranks", "rank", "rows", "context", "more"), COUNTED, ids=str)
def test_a_chunk_takes_what_is_planned(
    preset: str, fields: dict[str, Any], ranks: int, rank: int, rows: int, context: int, more: dict[str, Any]
) -> None:
    options = {"exl3": True, "fused": True, "mtp": False, "kv": "fp8", **more}
    layers = options.pop("taps", ())
    built = build(preset, fields, ranks, rank, context + 512, **options)
    shapes = dataclasses.replace(built.shapes, tapped=layers)
    counted = peak(built, rows, context, Taps(normed=options["mtp"], layers=layers))
    planned = buffers._Chunk(shapes, rows, context, 0).peak()
    if shapes.dealt:  # what is gathered of the caches is among the plan's exchanges
        assert counted <= planned < 1.25 * counted
    else:
        assert counted == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("preset", "rows"), [("tiny", 100), ("full-layers", 3072)])
def test_what_stays_takes_what_is_planned(preset: str, rows: int, fused: bool) -> None:
    built = build(preset, {}, 3, 1, 1024, exl3=True, fused=fused, mtp=False, kv="fp8")
    config, [kind] = built.model.config, built.shapes.exl3
    sizes = config.num_experts_per_tok, config.n_routed_experts, config.hidden_size, kind.width
    room = 1 << (rows - 1).bit_length()
    made = [
        PromptWorkspace.allocate(room, *sizes, fused, CPU),
        DecodeWorkspace.allocate(DECODE_ROWS, *sizes, fused, CPU),
    ]
    tensors = [part for space in made for part in vars(space).values() if isinstance(part, torch.Tensor)]
    assert buffers._expert_space(built.shapes, rows) == sum(held(tensor.nbytes) for tensor in tensors)
    sampler = Sampler(config.vocab_size, DECODE_ROWS, CPU)
    windows = [*vars(sampler._scratch).values(), sampler._there, sampler._drawn]
    logits = held(4 * DECODE_ROWS * config.vocab_size)  # of captured windows
    assert buffers._windows(config) == logits + sum(held(tensor.nbytes) for tensor in windows)


def test_a_longer_window_takes_no_less() -> None:
    built = build("full-layers", WIDE, 3, 0, 1024, exl3=True, fused=True, mtp=True, kv="fp8")
    for rows in (64, 256, 2048):
        for dealt in (False, True):
            shapes = dataclasses.replace(built.shapes, dealt=dealt)
            planned = [gpu_buffers(shapes, rows, context) for context in range(256, 600_000, 1792)]
            assert planned == sorted(planned)


def captured(config: ModelConfig, context: int, mtp: bool, tapped: int) -> int:
    """What captured windows of 1 to 16 rows keep of their inputs and results, which the plan counts as theirs: they
    were part of what was measured."""
    total = 0
    for kind in (4096 << n for n in range((context // 4096).bit_length())):
        for rows in range(1, 17):
            row, given = held(2 * rows * config.hidden_size), held(8 * rows * (4 + kind // 256), 8 * rows)
            chosen = held(4 * rows * config.index_topk, 4 * rows)
            total += given + tapped * row + (2 * row + given + row + chosen if mtp else 0)
    return total


@pytest.mark.parametrize("case", json.loads(MEASURED.read_text())["cases"], ids=lambda case: case["name"])
def test_what_an_h200_allocated(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts' results as they were then: 2,048 columns at once, in float32."""
    monkeypatch.setattr(buffers, "_PROMPT_SLAB", 4096)
    config = ModelConfig.from_dict(preset_config(case["preset"], case["fields"]))
    names = (f"model.layers.{n}.mlp.experts.{e}.{p}_proj" for n in range(9) for e in range(8) for p in ("gate", "up"))
    bits = dict.fromkeys(names, 2.75) if case["exl3"] else {}
    settings = Settings(prefill_rows=case["rows"], drafter="mtp" if case["mtp"] else "none")
    shapes = rank_shapes(Inventory(case["name"], config, bits, shared_scales=True), settings, 0)
    shapes = dataclasses.replace(shapes, tapped=tuple(case["tapped"]), reads=case["reads"])
    whole = (case["context"] - 32) // case["rows"] * case["rows"]  # where the last chunk of all rows ended
    planned = gpu_buffers(shapes, case["rows"], whole) + captured(
        config, case["context"], case["mtp"], len(case["tapped"])
    )
    assert planned / 2**20 == pytest.approx(case["used_mib"], rel=0.02)
