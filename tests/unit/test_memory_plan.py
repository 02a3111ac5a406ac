"""The plan against published figures, against what a model really allocates, and at its limits."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tfglm.cache.disk import AHEAD
from tfglm.cache.latent import LatentCache
from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.cli.main import main
from tfglm.cli.plan import PRESETS
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.mtp import MtpDrafter
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.formats.groups import pack, pack_fp8, quantise
from tfglm.formats.latent import KvFormat
from tfglm.memory.flash import FlashInventory
from tfglm.memory.inventory import Inventory, of_folder, published
from tfglm.memory.plan import CPU_CHANGES, GIB, GPU_CHANGES, LARGEST_DEFAULT_CONTEXT, Plan, RankPlan, make_plan, require
from tfglm.memory.weights import matrix_bytes
from tfglm.models.glm53 import Glm53
from tfglm.models.glm53_cuda import PackedCache, load_weights
from tfglm.models.load import load_model
from tfglm.models.source import CheckpointSource
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.settings import Settings

FULL = Settings(**PRESETS["full"])

# README and figures of MiaAI-Lab/GLM-5.3-EXL3-3x-DGX-Sparks-TensorFold, in GiB.
WEIGHTS = (85.3, 84.8, 84.8)
CACHES = (
    ("fp4", True, 499712, 6.06),
    ("fp8", False, 163840, 8.63),
    ("fp4x", True, 618496, 6.04),
    ("fp4", True, 655360, 7.95),
    ("fp8", True, 655360, 11.50),
    ("fp4", True, 626688, 7.60),
    ("fp4", True, 1048576, 12.72),
    ("bf16", False, 163840, 14.5),
)
BYTES_A_TOKEN = {"bf16": (95232, 96640), "fp8": (56544, 57456), "fp4": (39072, 39760), "fp4x": (31476, 31976)}


@pytest.fixture(scope="module")
def full() -> Inventory:
    return published("full")


def planned(inventory: Inventory, **changes: Any) -> Plan:
    settings = dataclasses.replace(FULL, **changes)
    return make_plan(inventory, settings, [round(111.8 * GIB)] * settings.ranks)


def as_published(rank: RankPlan, prefill_rows: int) -> float:
    """The total with the published engine's buffers in the place of ours: 2.3 GiB at 2,048 rows of a chunk, and 1.05
    for 1,024 more."""
    return rank.total - rank.buffers + (2.3 + 1.05 * (prefill_rows - 2048) / 1024) * GIB


def test_published_weights_of_each_rank(full: Inventory) -> None:
    for rank, gib in zip(planned(full).ranks, WEIGHTS, strict=True):
        assert rank.weights / GIB == pytest.approx(gib, rel=0.01)
    without = planned(full, drafter="none").ranks[0].weights
    # Published: 1.8, of a rank with 6 of every expert's 16 blocks of columns; dealt out by expert it has 16 / 3.
    assert (planned(full).ranks[0].weights - without) / GIB == pytest.approx(1.8 * 16 / 3 / 6, abs=0.05)


@pytest.mark.parametrize(("kv", "cp", "context", "gib"), CACHES)
def test_published_caches(full: Inventory, kv: str, cp: bool, context: int, gib: float) -> None:
    plan = planned(full, kv=kv, cp=cp, context=context, drafter="none")
    assert plan.ranks[0].caches / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("kv", BYTES_A_TOKEN)
def test_published_bytes_a_token(full: Inventory, kv: str) -> None:
    found = (planned(full, kv=kv, drafter=drafter).bytes_per_token for drafter in ("none", "mtp"))
    assert tuple(found) == BYTES_A_TOKEN[kv]


def test_published_totals_without_context_parallelism(full: Inventory) -> None:
    """Boot p3: fp8, MTP, a window of 163,840 tokens, chunks of 2,048; nothing captured is part of these totals."""
    plan = planned(full, kv="fp8", cp=False, context=163840, prefill_rows=2048, graphs_gib=0.0)
    totals = [as_published(rank, 2048) / GIB for rank in plan.ranks[:2]]
    assert totals == pytest.approx([96.5, 96.1], rel=0.01)


def test_published_total_of_the_default_mode(full: Inventory) -> None:
    """93.2 with 0.3 of a drafter that is not planned here; needed with 1 kept and 10 of overhead: 104.2."""
    rank = planned(full, drafter="none", graphs_gib=0.0, overhead_gib=10.0).ranks[0]
    total = as_published(rank, 3072)
    assert total / GIB == pytest.approx(93.2 - 0.3, rel=0.01)
    assert (total + rank.need - rank.total) / GIB == pytest.approx(104.2 - 0.3, rel=0.01)


def test_windows_that_a_gpu_captures(full: Inventory) -> None:
    """1 to 16 rows at six contexts took 720 MiB on an H200; without drafts no more rows than requests."""
    on_gpu = {"device": "cuda", "graphs_gib": 0.0, "context": 131072, "cp": False}
    graphs = planned(full, **on_gpu).ranks[0].graphs
    assert 720 * 2**20 < graphs < 1.2 * 720 * 2**20
    alone = planned(full, **on_gpu, drafter="none", copy=False).ranks[0].graphs
    assert alone < graphs / 2
    assert planned(full, **{**on_gpu, "context": 4096}, drafter="none", copy=False).ranks[0].graphs < alone
    assert planned(full, **on_gpu | {"device": "cpu"}).ranks[0].graphs == 0
    assert planned(full, **on_gpu | {"graphs_gib": 2.0}).ranks[0].graphs == 2 * GIB


def test_buffers_are_below_what_another_engine_published(full: Inventory) -> None:
    """Ours are counted in test_memory_buffers. A CPU's are planned as published: 2.3, 1.05 for 1,024 more rows."""
    assert 0.5 < planned(full, cp=False, context=163840, prefill_rows=2048).ranks[0].buffers / GIB < 1.0
    buffers = [planned(full, device="cpu", prefill_rows=rows).ranks[0].buffers / GIB for rows in (2048, 3072)]
    assert buffers[0] == pytest.approx(2.3, abs=0.05)
    assert buffers[1] - buffers[0] == pytest.approx(1.05, abs=0.05)


def test_sums_through_host_memory_are_planned(full: Inventory) -> None:
    through = [planned(full, wire=wire).ranks[0].exchanges for wire in ("nccl", "gloo")]
    assert through[1] - through[0] == (3 + 1) * 3072 * 6144 * 4, "what one rank sends and what all have sent"


def test_pages_on_their_way_to_the_disk_are_planned(full: Inventory) -> None:
    with_disk, without = planned(full, disk_cache="/cache"), planned(full)
    pages = (with_disk.ranks[0].need - without.ranks[0].need) / (PAGE * without.bytes_per_token)
    assert 8 <= pages <= 32 and pages == int(pages)
    own, other = (rank.disk // (PAGE * without.bytes_per_token) for rank in with_disk.ranks[:2])
    assert (own, other) == (pages, pages + AHEAD), "what waits to be written is a copy on other ranks"
    assert with_disk.largest < without.largest


def test_the_largest_window_fits_and_one_page_more_does_not(full: Inventory) -> None:
    largest = planned(full).largest
    assert largest % PAGE == 0
    assert planned(full, context=largest).shortfall == 0
    assert planned(full, context=largest + 3 * PAGE).shortfall > 0


def test_a_refusal_names_rank_shortfall_window_and_what_settings_buy(full: Inventory) -> None:
    settings = dataclasses.replace(FULL, context=1048576, kv="fp8")
    plan = make_plan(full, settings, [round(111.8 * GIB)] * 3)
    with pytest.raises(MemoryShortError) as caught:
        require(plan, full, settings, GPU_CHANGES)
    text = str(caught.value)
    fp4 = make_plan(full, dataclasses.replace(settings, kv="fp4"), [round(111.8 * GIB)] * 3)
    saved = (plan.ranks[0].need - fp4.ranks[0].need) / GIB
    for part in ("rank 0", f"{plan.shortfall / GIB:.2f} too few", f"--context {plan.largest} fits"):
        assert part in text
    assert f"--kv fp4 saves {saved:.2f} GiB" in text
    assert "--kv fp8" not in text and "--dense q4" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "--ranks 2 or more"),
        ({"guard_gib": 4.0}, "must be below the floor"),
    ],
)
def test_settings_that_exclude_each_other(full: Inventory, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(full, **changes)


@pytest.mark.parametrize("held_as", ["q4", "q6", "q8", "fp8"])
@pytest.mark.parametrize(("rows", "columns"), [(40, 128), (16, 64)])
def test_formats_take_what_their_packers_make(held_as: str, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    if held_as == "fp8":
        packed = pack_fp8(weight)
        made = packed.pieces.nbytes + packed.scale.nbytes
    else:
        groups = pack(quantise(weight, int(held_as[1:])))
        made = groups.pieces.nbytes + groups.scales.nbytes
    assert matrix_bytes(rows, columns, held_as) == made


# ---- the published GLM-5.3-Flash on two Sparks

FLASH = Settings(**PRESETS["flash"])


def flash(**changes: Any) -> Plan:
    settings = dataclasses.replace(FLASH, **changes)
    return make_plan(FlashInventory(), settings, [109 * GIB] * settings.ranks)


def test_flash_has_the_parameters_its_specification_counts() -> None:
    """313.3 billion in the main stack and 7.43 in the MTP layer; an expert has 25.17 million."""
    counts = {"main": 0, "mtp": 0}
    for name, spec in FlashInventory().tensors.items():
        counts["mtp" if name.startswith("model.layers.45.") else "main"] += math.prod(spec.shape)
    assert counts["main"] / 1e9 == pytest.approx(313.3, abs=0.2)
    assert counts["mtp"] / 1e9 == pytest.approx(7.43, abs=0.05)


def test_flash_caches_and_states_are_the_published_ones() -> None:
    """6,397 bytes a token are published, of rows 12 bytes shorter in each of 11 layers: ours end on 16 bytes."""
    plan = flash()
    assert plan.bytes_per_token - 11 * 12 == pytest.approx(6397, rel=0.01)
    pool = 4098 * 512 * (plan.bytes_per_token - 11 * 12)
    assert pool / GIB == pytest.approx(12.5, rel=0.01)
    inventory = FlashInventory()
    rows = 34 * 3 * 3 * 64 * 128 * 2
    assert inventory.bytes_per_request(0, 1) - 142_606_336 == 142_606_336 + rows
    once = (inventory.bytes_per_request(1, 2) - rows // 2) // 2 + rows // 2
    assert once / 2**20 == pytest.approx(70.4, rel=0.01)


def test_flash_models_share_of_a_spark_is_the_published_one() -> None:
    """83.3 GiB "model": experts and the rest in q8, DFlash2, vision, buffers, the states of 8 streams; there embedding
    and head are whole on both machines, here each has half."""
    rank = flash(parallel=8).ranks[0]
    model = rank.weights + rank.vocabulary + rank.buffers + rank.states
    assert model / GIB == pytest.approx(83.3, rel=0.01)


def test_flash_refuses_what_it_cannot_have() -> None:
    for changes, message in (({"cp": True, "parallel": 1}, "GLM-5.3-Flash takes 0"), ({"kv": "fp4"}, "bf16 or fp8")):
        with pytest.raises(ConfigError, match=message):
            flash(**changes)


def test_two_windows_of_a_million_tokens_fit_and_three_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "flash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert main(["plan", "--preset", "flash", "--kv", "bf16", "--parallel", "1"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("reckoned with --ranks 2 --context 1048576 --parallel 1 --kv bf16 --dense q8 --head q8 ")
    assert said.endswith("--available-gib 109.0")
    assert main(["plan", "--preset", "flash", "--parallel", "3"]) == 1
    assert "E_MEMORY" in capsys.readouterr().err


def test_copy_indexes_are_planned_where_they_are_used(full: Inventory) -> None:
    first, second, _ = planned(full).ranks
    assert (first.copies, second.copies) == (160 * 499712, 0)
    assert planned(full, copy=False).ranks[0].copies == 0


# ---- a real model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny"
    write_checkpoint(path, "tiny", 1)
    return path


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[tuple[Checkpoint, Glm53]]:
    with Checkpoint.open(tiny) as checkpoint:
        plan = make_plan(of_folder(tiny), Settings(context=1000, parallel=2), [1 << 40])
        yield checkpoint, load_model(checkpoint, tokens=plan.tokens)


def tensor_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all tensors that hang on a value, each memory once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if dataclasses.is_dataclass(value):
        return sum(tensor_bytes(getattr(value, f.name), seen) for f in dataclasses.fields(value))
    return sum(tensor_bytes(one, seen) for one in value) if isinstance(value, tuple | list) else 0


def test_what_is_planned_is_allocated(tiny: Path, model: tuple[Checkpoint, Glm53]) -> None:
    settings = Settings(context=1000, parallel=2)
    checkpoint, trunk = model
    [rank] = make_plan(of_folder(tiny), settings, [1 << 40]).ranks
    seen: set[int] = set()
    trunk_bytes = tensor_bytes(trunk.weights, seen)
    assert rank.weights - rank.drafter == pytest.approx(trunk_bytes, rel=0.01)
    drafter = load_drafter("mtp", checkpoint, trunk, settings)
    assert isinstance(drafter, MtpDrafter)
    assert rank.drafter == pytest.approx(tensor_bytes(drafter._mtp.weights, seen), rel=0.01)
    planes = tensor_bytes(trunk.cache.layers, set()) + tensor_bytes(drafter._mtp.cache.layers, set())
    assert rank.caches + rank.kept == planes


@pytest.mark.parametrize(("dense", "head"), [("bf16", "bf16"), ("q4", "fp8"), ("q8", "q6"), ("fp8", "q4")])
def test_what_is_planned_in_a_gpus_formats_is_what_it_holds(dense: str, head: str, tiny: Path) -> None:
    """To the byte; the GPU's formats are packed by torch, so a CPU can hold them too."""
    ops = CudaOps(Precision(KvFormat.FP4, dense, head), torch.device("cpu"))
    with Checkpoint.open(tiny) as checkpoint:
        weights = load_weights(checkpoint.config, CheckpointSource(checkpoint), ops)
    seen: set[int] = set()
    held = tensor_bytes(weights, seen) + tensor_bytes(list(ops._dense.values()), seen)
    [rank] = make_plan(of_folder(tiny), Settings(dense=dense, head=head, drafter="none"), [1 << 40]).ranks
    assert rank.weights == held


def test_what_is_planned_of_exl3_experts_is_allocated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "exl3", "tiny", 1, expert_bits=2.75, hidden_size=256)
    with Checkpoint.open(tmp_path / "exl3") as checkpoint:
        trunk = load_model(checkpoint, tokens=PAGE)
    [rank] = make_plan(of_folder(tmp_path / "exl3"), Settings(drafter="none"), [1 << 40]).ranks
    assert rank.weights == pytest.approx(tensor_bytes(trunk.weights, set()), rel=0.01)


@pytest.mark.parametrize("kv", list(KvFormat))
def test_what_is_planned_of_every_cache_format_is_allocated(kv: KvFormat, tiny: Path) -> None:
    settings = Settings(kv=kv.value, drafter="none", context=1000, kept_gib=0.001)
    plan = make_plan(of_folder(tiny), settings, [1 << 40])
    cache = PackedCache(of_folder(tiny).config, plan.tokens, kv, torch.device("cpu"))
    assert plan.kept_pages and plan.ranks[0].caches + plan.ranks[0].kept == tensor_bytes(cache.layers, set())


def test_what_is_planned_of_a_cache_dealt_out_to_ranks_is_allocated(tiny: Path) -> None:
    plan = make_plan(of_folder(tiny), Settings(ranks=3, cp=True, drafter="none", context=5000), [1 << 40] * 3)
    cache = LatentCache(of_folder(tiny).config, plan.tokens, "bf16", 3)
    assert {rank.caches + rank.kept for rank in plan.ranks} == {tensor_bytes(cache.layers, set())}


def facts(tiny: Path, available: int, **settings: Any) -> Plan:
    return make_plan(of_folder(tiny), Settings(**settings), [available] * settings.get("ranks", 1))


def test_auto_takes_the_models_window_when_it_fits_and_shrinks_when_not(tiny: Path) -> None:
    whole = facts(tiny, 1 << 40)
    assert whole.context == min(LARGEST_DEFAULT_CONTEXT, 8192)
    tight = facts(tiny, 1 << 40, context=8192 - 10 * PAGE).ranks[0].need + whole.floor
    less = facts(tiny, tight)
    assert (less.context, less.shortfall) == (8192 - 10 * PAGE, 0)


def test_ranks_of_a_small_model_hold_it_all_and_no_more_than_is_replicated(tiny: Path) -> None:
    one, three = (facts(tiny, 1 << 40, ranks=ranks) for ranks in (1, 3))
    assert sum(rank.experts for rank in three.ranks) == one.ranks[0].experts
    assert one.ranks[0].dense < sum(rank.dense for rank in three.ranks) < 3 * one.ranks[0].dense


def test_weights_that_do_not_fit_are_refused(tiny: Path) -> None:
    settings = Settings()
    plan = make_plan(of_folder(tiny), settings, [GIB // 2])
    with pytest.raises(MemoryShortError, match=r"no window fits.*--kept-gib 0 saves 1\.00 GiB") as caught:
        require(plan, of_folder(tiny), settings, CPU_CHANGES)
    assert "saves 0.00" not in str(caught.value)


# ---- the command


def test_the_command_prints_a_table_and_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny), "--ranks", "3", "--context", "4096"]) == 0
    assert "rank 2" in capsys.readouterr().out
    assert main(["plan", "--preset", "full", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["context"] == 499712 and len(told["ranks"]) == 3
    assert all(rank["need"] == rank["total"] + rank["kept"] + rank["disk"] + rank["overhead"] for rank in told["ranks"])


def test_a_window_that_the_model_lacks_is_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny), "--context", "1000000"]) == 0
    assert "1000000 is more than the model was made for" in capsys.readouterr().out
    assert main(["plan", str(tiny), "--context", "1024"]) == 0
    assert "more than the model" not in capsys.readouterr().out


def test_the_command_refuses_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "full", "--available-gib", "90"]) == 1
    assert "E_MEMORY" in capsys.readouterr().err
    assert main(["plan", "--preset", "full", "--available-gib", "90", "--json"]) == 1
    assert "too few" in json.loads(capsys.readouterr().out)["refusal"]
    assert main(["plan"]) == 1
