"""Every wire does the same: values of every shape and type, many gathers on end, and an end of each wait."""

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tfglm.errors import ConfigError, RanksError
from tfglm.ranks.board import tcp_store
from tfglm.ranks.control import Control, controls_in_process
from tfglm.ranks.gloo import GlooWire
from tfglm.ranks.inprocess import in_process_wires
from tfglm.ranks.shared import SharedWire
from tfglm.ranks.wire import Wire
from tfglm.ranks.wires import chosen_wire, open_wire
from tfglm.settings import Settings

RANKS = 3


def on_all(call: Callable[[int], object]) -> list[object]:
    """What `call` returns or raises for every rank, each in a thread of its own."""
    results: list[object] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Wires:
    """The ends of one wire, opened in threads, with the controls they need."""

    def __init__(self, kind: str, limit_s: float = 20.0, **options: int) -> None:
        self.controls: list[Control] = controls_in_process(RANKS)

        def make(rank: int) -> Wire:
            if kind == "gloo":
                return GlooWire(self.controls[rank], "127.0.0.1", limit_s)
            return SharedWire(self.controls[rank], limit_s, **options)

        made = in_process_wires(RANKS, limit_s) if kind == "inprocess" else on_all(make)
        for wire in made:
            if isinstance(wire, Exception):
                raise wire
        self.ends: list[Wire] = list(made)  # type: ignore[arg-type]

    def gather(self, part: Callable[[int], torch.Tensor]) -> list[object]:
        return on_all(lambda rank: self.ends[rank].gather(part(rank)))

    def close(self) -> None:
        for wire in self.ends:
            wire.close()
        for control in self.controls:
            control.close()


KINDS = ["inprocess", "gloo", "shared"]


@pytest.fixture(params=KINDS)
def wires(request: pytest.FixtureRequest):
    made = Wires(request.param)
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def impatient(request: pytest.FixtureRequest):
    made = Wires(request.param, limit_s=0.6)
    yield made
    made.close()


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def test_any_shape_and_type(wires: Wires) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool):
        for shape in ((), (0,), (1,), (3, 5, 7), (2, 6144)):
            for gathered in wires.gather(lambda rank, s=shape, d=dtype: part(rank, s, d)):
                assert isinstance(gathered, torch.Tensor), gathered
                assert gathered.dtype == dtype and gathered.shape == (RANKS, *shape)
                for rank in range(RANKS):
                    assert torch.equal(gathered[rank].float(), part(rank, shape, dtype).float())


def test_a_tensor_that_is_not_contiguous(wires: Wires) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    for gathered in wires.gather(lambda rank: whole.t()[rank : rank + 3, ::2]):
        assert torch.equal(gathered, torch.stack([whole.t()[rank : rank + 3, ::2] for rank in range(RANKS)]))


def test_what_was_given_may_be_changed_and_what_came_stays(wires: Wires) -> None:
    def run(rank: int) -> list[list[int]]:
        mine, seen = torch.empty(4, dtype=torch.int64), []
        for number in range(200):
            mine.fill_(10 * number + rank)
            seen.append(wires.ends[rank].gather(mine))
            mine.fill_(-1)
        return [one[:, 3].tolist() for one in seen]

    for seen in on_all(run):
        assert seen == [[10 * number + rank for rank in range(RANKS)] for number in range(200)]


def test_an_abort_ends_the_wait_at_once(wires: Wires) -> None:
    """Rank 1 does not come; the others are told that it died."""

    def run(rank: int) -> float:
        if rank == 1:
            time.sleep(0.5)
            for wire in wires.ends:
                wire.abort("rank 1 has died")
            raise RanksError("rank 1 has died")
        try:
            wires.ends[rank].gather(torch.ones(8))
        finally:
            ended[rank] = time.monotonic()
        return 0.0

    ended: dict[int, float] = {}
    began = time.monotonic()
    for error in on_all(run):
        assert isinstance(error, RanksError) and "rank 1" in error.message
    assert 0.5 <= max(ended.values()) - began < 5.0
    for error in wires.gather(lambda rank: torch.ones(1)):
        assert isinstance(error, RanksError)


def test_a_wait_has_a_limit(impatient: Wires) -> None:
    def run(rank: int) -> None:
        if rank != 1:
            impatient.ends[rank].gather(torch.ones(8))

    began = time.monotonic()
    results = on_all(run)
    assert time.monotonic() - began < 10.0
    for rank in (0, 2):
        assert isinstance(results[rank], RanksError)
        assert "0.6 s" in results[rank].message
    for wire in impatient.ends:
        wire.abort("over")


def test_wires_have_names() -> None:
    with pytest.raises(ConfigError, match="there is no wire 'string'; there are gloo, shared, nccl"):
        open_wire("string", controls_in_process(1)[0])


@pytest.mark.parametrize(
    ("settings", "gpus", "here", "elsewhere"),
    [
        ({"wire": "gloo", "device": "cuda"}, 8, "gloo", "gloo"),
        ({"device": "cpu"}, 8, "shared", "gloo"),
        ({"device": "cuda"}, 3, "nccl", "nccl"),
        ({"device": "cuda"}, 2, "shared", "nccl"),  # of three ranks on one machine two would share a GPU
        ({"device": "auto"}, 0, "shared", "gloo"),
    ],
)
def test_a_wire_is_asked_for_or_chosen(
    settings: dict[str, str], gpus: int, here: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    asked = Settings(ranks=3, **settings)
    assert [chosen_wire(asked, one_machine=one) for one in (True, False)] == [here, elsewhere]
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert "nccl" not in [chosen_wire(asked, one_machine=one) for one in (True, False)]


# -- shared memory alone


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 1000])
def test_a_tensor_goes_in_pieces(size: int) -> None:
    wires = Wires("shared", place_bytes=64)
    try:
        for _ in range(5):
            for gathered in wires.gather(lambda rank: part(rank, (size,), torch.uint8)):
                assert torch.equal(gathered, torch.stack([part(rank, (size,), torch.uint8) for rank in range(RANKS)]))
    finally:
        wires.close()


def test_ranks_that_gather_different_sizes_are_told() -> None:
    wires = Wires("shared")
    try:
        results = wires.gather(lambda rank: torch.ones(8 if rank else 9))
        messages = [result.message for result in results if isinstance(result, RanksError)]
        assert "gather 0 has 36 bytes on rank 0 and 32 on rank 1: they have not been doing the same" in messages
        assert len(messages) >= 2
    finally:
        wires.close()


def test_memory_that_is_not_rank_0s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the ranks are on different hosts: the path leads nowhere, or to something else."""
    controls = controls_in_process(2)
    controls[0].post("shared", bytes(16) + b"/dev/null")
    with pytest.raises(RanksError, match="rank 1 cannot share memory with rank 0, which takes one host and one user"):
        SharedWire(controls[1], 5.0)
    assert controls[0].failure(5) is not None
    for control in controls:
        control.close()


# -- where torch's groups meet


def test_torchs_own_store_serves_a_group_that_asks_late() -> None:
    """As NCCL does: at its first gather, when whoever opened the store has long returned."""
    controls = controls_in_process(RANKS)

    def run(rank: int) -> list[float]:
        store = tcp_store(controls[rank], "late")
        gc.collect()
        time.sleep(0.1 * rank)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, RANKS, options)
        gathered = torch.empty(RANKS)
        group._allgather_base(gathered, torch.tensor([float(rank)])).wait()
        controls[rank].meet("the end", 20.0)  # rank 0 serves until then
        return gathered.tolist()

    assert on_all(run) == RANKS * [[0.0, 1.0, 2.0]]
    for control in controls:
        control.close()


def test_the_board_answers_for_as_long_as_its_wire_is_there() -> None:
    wires = Wires("gloo")
    try:
        gc.collect()
        wire = wires.ends[1]
        assert isinstance(wire, GlooWire)
        dist.PrefixStore("later", wire._board).set("key", "value")
        other = wires.ends[2]
        assert isinstance(other, GlooWire)
        assert dist.PrefixStore("later", other._board).get("key") == b"value"
    finally:
        wires.close()


# -- GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_tensors_of_ranks_that_share_a_gpu(wires: Wires) -> None:
    for size in (3, 6144, 6144 * 300):
        for number in range(3):
            parts = [part(rank + number, (2, size), torch.float32) for rank in range(RANKS)]
            for gathered in wires.gather(lambda rank, p=parts: p[rank].cuda()):
                assert isinstance(gathered, torch.Tensor), gathered
                assert gathered.is_cuda and torch.equal(gathered.cpu(), torch.stack(parts))
