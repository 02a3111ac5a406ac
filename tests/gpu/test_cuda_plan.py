"""The plan of a GPU's memory against its allocator: weights, drafter, caches and what prompts and windows take beside
them are as planned; what loading does is no more than planned.

Since the buffers are planned tensor by tensor this has not been run; figures of before are in
benchmarks/results/plan_h200.json, with which tests/unit/test_memory_buffers.py compares the plan.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_drafts import block_folder

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Drafter, Kept
from tfglm.drafts.block_files import HOST_TABLES, tensor_entries
from tfglm.drafts.choose import load_drafter, prepare
from tfglm.drafts.kind import drafter_kind
from tfglm.memory.buffers import held
from tfglm.memory.inventory import of_folder
from tfglm.memory.plan import RankPlan, make_plan
from tfglm.models.glm53_cuda import CudaGlm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

HALF_MIB = 1 << 19

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("tiny", {}),
    # GLM-5.3's own widths, with few layers and experts
    "wide": ("full-layers", {"num_hidden_layers": 4, "n_routed_experts": 8, "expert_bits": 2.75}),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {"context": 4096, "parallel": 2, "kv": "fp8", "drafter": "mtp"}),
    ("tiny", {"context": 8192, "kv": "bf16", "dense": "q4", "head": "fp8", "drafter": "none", "copy": False}),
    ("tiny", {"context": 4096, "kv": "fp4x", "drafter": "dspark"}),
    ("wide", {"context": 32768, "parallel": 2, "kv": "fp8", "drafter": "mtp", "prefill_rows": 2048}),
    ("wide", {"context": 16384, "kv": "fp4", "dense": "q4", "head": "fp8", "drafter": "none", "prefill_rows": 4096}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A checkpoint by its name, written when it is first asked for; the wide one has 6 GB, so none is left behind."""
    written: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in written:
            preset, fields = CHECKPOINTS[name]
            written[name] = tmp_path_factory.mktemp("plan") / name
            write_checkpoint(written[name], preset, 1, **fields)
        return written[name]

    yield of
    for path in written.values():
        shutil.rmtree(path)


@dataclass
class Used:
    """Bytes since the start: of tensors now and at the most since the last look, of the driver beside them."""

    tensors: int
    most: int
    driver: int


class Meter:
    def __init__(self) -> None:
        self._start = Used(0, 0, 0)
        torch.zeros(1, device="cuda")
        self._start = self.read()

    def read(self) -> Used:
        torch.cuda.synchronize()
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        driver = total - free - torch.cuda.memory_reserved()
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = self._start
        return Used(now - start.tensors, most - start.tensors, driver - start.driver)


def of_windows(model: CudaGlm53) -> int:
    """What a model allocates for windows when it is made, beside weights and caches."""
    assert model.graphs is not None
    sampler = model._sampler
    scratch = sum(tensor.nbytes for tensor in vars(sampler._scratch).values())
    return model.graphs.logits.nbytes + scratch + sampler._there.nbytes + sampler._drawn.nbytes


def captured(model: CudaGlm53) -> int:
    """Of the inputs and results of captured windows, which the plan counts among the graphs."""
    assert model.graphs is not None
    logits, found = model.graphs.logits.data_ptr(), {}
    for ready in model.graphs._captured.values():
        for tensor in tensors_in((ready.inputs, ready.result)):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = held(storage.nbytes())
    found.pop(logits, None)
    return sum(found.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))


def work(model: CudaGlm53, drafter: Drafter | None, settings: Settings) -> None:
    """Whole windows of prompts, a chunk at a time, and decode windows after them."""
    for _ in range(settings.parallel):
        stream, length = model.open_stream(), settings.context - 32
        context = drafter.open(stream) if drafter else None
        for start in range(0, length, settings.prefill_rows):
            tokens = [(37 * i + 5) % 1000 for i in range(start, min(start + settings.prefill_rows, length))]
            rows = [Rows(stream, tokens, 1, prompt=True)]
            if drafter is None:
                model.forward(rows)
            else:
                drafter.read([Kept(context, tokens, 0)], model.forward_tapped(rows, drafter.taps))
        for count in (1, 16):
            model.forward([Rows(stream, list(range(count)), count)])


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_what_is_planned_is_what_the_gpu_allocates(
    name: str, given: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(name)
    if given["drafter"] == "dspark":
        drafts = block_folder(tmp_path, "dspark", of_folder(path).config)
        given = {**given, "drafter_path": drafts.drafter_path}
    settings = Settings(device="cuda", kept_gib=0.0, **{"parallel": 1, **given})
    inventory = dataclasses.replace(of_folder(path), shared_scales=True)  # as those of synthetic checkpoints are
    plan = make_plan(inventory, settings, [1 << 40])
    [rank] = plan.ranks
    meter = Meter()
    formats = {"kv": settings.kv, "dense": settings.dense, "head": settings.head}
    with Checkpoint.open(path) as opened:
        model = load_model(opened, tokens=plan.tokens, device="cuda", **formats)
        assert isinstance(model, CudaGlm53)
        windows = of_windows(model)
        loaded = meter.read()
        kind = drafter_kind(settings, opened.config)
        drafter = load_drafter(kind, opened, model, settings)
        whole = meter.read()
        prepare(model, drafter, settings.context)
        work(model, drafter, settings)
        served, kept = meter.read(), captured(model)
    with capsys.disabled():
        print(f"\n{told(name, settings, rank, loaded, whole, served, windows)}")
    held = whole.tensors - windows + host_tables(settings)
    assert held == pytest.approx(rank.weights + rank.caches, rel=0.01)
    if kind == "mtp":
        assert whole.tensors - loaded.tensors == pytest.approx(
            rank.drafter + rank.caches - trunk_bytes(model), rel=0.01
        )
    assert max(loaded.most, whole.most) <= rank.weights + rank.caches + rank.staging + windows
    # What captured graphs take of the driver is not looked at: other processes may use the GPU meanwhile. The last
    # whole chunk ends before the window does, which a small model's scores show.
    used = served.most - whole.tensors + windows - kept
    assert used - HALF_MIB <= rank.buffers <= 1.01 * used + HALF_MIB


def host_tables(settings: Settings) -> int:
    """Of a block drafter, what stays in the memory of the host; where the GPU shares that, it is one."""
    entries = tensor_entries(Path(settings.drafter_path)).values() if settings.drafter_path else ()
    return sum(entry.nbytes for entry in entries if entry.name.startswith(HOST_TABLES))


def trunk_bytes(model: CudaGlm53) -> int:
    """Of the trunk's caches."""
    return sum(plane.nbytes for planes in model.cache.layers for plane in vars(planes).values() if plane is not None)


def told(name: str, settings: Settings, rank: RankPlan, loaded: Used, whole: Used, served: Used, windows: int) -> str:
    """Planned and used, in MiB."""
    pairs = {
        "held": (rank.weights + rank.caches, whole.tensors - windows),
        "drafter": (rank.drafter, whole.tensors - loaded.tensors),
        "while it loads": (rank.staging, max(loaded.most - loaded.tensors, whole.most - whole.tensors)),
        "buffers": (rank.buffers, served.most - whole.tensors + windows),
        "graphs": (rank.graphs, served.driver - whole.driver),
    }
    figures = ", ".join(f"{what} {p / 2**20:.1f} {u / 2**20:.1f}" for what, (p, u) in pairs.items())
    return f"{name} {settings.kv} {settings.drafter} {settings.prefill_rows} rows: planned, used MiB: {figures}"
