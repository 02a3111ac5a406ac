"""What a group of ranks computes, whatever carries it."""

import json
import threading
from collections.abc import Callable

import pytest
import torch
from rank_processes import Toys

from tfglm.errors import RanksError
from tfglm.ops.group import Message
from tfglm.ranks.follower import follow
from tfglm.ranks.group import RankGroup
from tfglm.ranks.inprocess import in_process_groups


def on_all(groups: list[RankGroup], call: Callable[[RankGroup], object]) -> list[object]:
    """What `call` returns or raises on every rank, each in a thread of its own."""
    results: list[object] = [None] * len(groups)

    def run(group: RankGroup) -> None:
        try:
            results[group.rank] = call(group)
        except Exception as error:
            results[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.fixture
def groups():
    made = in_process_groups(3, settings="alike", limit_s=20)
    yield made
    for group in made:
        group.close()


def test_sum_adds_in_rank_order_on_every_rank(groups: list[RankGroup]) -> None:
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(4, 64, generator=generator) * 10.0 ** (3 * r) for r in range(3)]
    before = [part.clone() for part in parts]
    expected = (parts[0] + parts[1]) + parts[2]
    other_order = (parts[2] + parts[1]) + parts[0]
    assert not torch.equal(expected, other_order)  # or the order could not be seen
    for total in on_all(groups, lambda group: group.sum(parts[group.rank])):
        assert torch.equal(total, expected)
    assert all(map(torch.equal, parts, before)), "a sum changed what it was given"


def test_concat_of_uneven_columns(groups: list[RankGroup]) -> None:
    whole = torch.arange(5 * 64.0).reshape(5, 64)
    widths = [22, 21, 21]
    pieces = whole.split(widths, dim=1)
    for joined in on_all(groups, lambda group: group.concat(pieces[group.rank], widths)):
        assert torch.equal(joined, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2)])
def test_gather_of_any_shape(groups: list[RankGroup], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for gathered in on_all(groups, lambda group: group.gather(torch.full(shape, group.rank % 2, dtype=dtype))):
        assert gathered.shape == (3, *shape) and gathered.dtype == dtype
        assert torch.equal(gathered, torch.stack([torch.full(shape, r % 2, dtype=dtype) for r in range(3)]))


def test_many_gathers_without_a_pause_stay_apart(groups: list[RankGroup]) -> None:
    def run(group: RankGroup) -> list[list[int]]:
        return [group.gather(torch.tensor(100 * n + group.rank)).tolist() for n in range(300)]

    for seen in on_all(groups, run):
        assert seen == [[100 * n, 100 * n + 1, 100 * n + 2] for n in range(300)]


MESSAGE = Message(
    "forward",
    {"rows": 3, "theta": 0.1, "name": "a", "pages": [1, 2]},
    {"ids": torch.tensor([7, 8]), "half": torch.tensor([[1.5]], dtype=torch.bfloat16), "none": torch.empty(0, 2)},
)


def test_followers_replay_what_rank_0_announces(groups: list[RankGroup]) -> None:
    seen: dict[int, list[Message]] = {1: [], 2: []}

    def run(group: RankGroup) -> object:
        def forward(message: Message) -> None:
            seen[group.rank].append(message)
            group.sum(torch.ones(1))

        if group.rank:
            return follow(group, {"forward": forward})
        for _ in range(3):
            group.announce(MESSAGE)
            group.sum(torch.ones(1))
        return group.close()

    assert on_all(groups, run) == [None, None, None]
    for rank in (1, 2):
        assert len(seen[rank]) == 3
        for message in seen[rank]:
            assert message.kind == "forward" and message.facts == MESSAGE.facts
            for name, tensor in MESSAGE.arrays.items():
                assert message.arrays[name].dtype == tensor.dtype and torch.equal(message.arrays[name], tensor)


def test_a_message_is_encoded_once(groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's chunk brings a hundred kilobytes, and every other rank waits for them: no rank encodes them again."""
    encoded: list[str] = []
    dumps = json.dumps

    def counted(value: dict, **options: object) -> str:
        encoded.append(value["kind"])
        return dumps(value, **options)

    monkeypatch.setattr("tfglm.ranks.messages.json.dumps", counted)
    for number in (1, 2):
        groups[0].announce(MESSAGE)
        for group in groups[1:]:
            received = group.receive()
            assert received is not None and received.number == number
    assert encoded.count("work") == 2


def test_a_failing_handler_ends_all_ranks(groups: list[RankGroup]) -> None:
    def run(group: RankGroup) -> None:
        def forward(message: Message) -> None:
            if group.rank == 2:
                raise ValueError("no such page")
            group.sum(torch.ones(1))

        if group.rank:
            follow(group, {"forward": forward})
        group.announce(MESSAGE)
        group.sum(torch.ones(1))

    for error in on_all(groups, run):
        assert isinstance(error, RanksError)
        assert error.message == "rank 2 failed at 'forward' (message 1): ValueError: no such page"


@pytest.mark.parametrize("wire", ["gloo", "shared"])
def test_three_processes_sum(toys: Toys, wire: str) -> None:
    ranks = toys.start_ranks(3, wire=wire, phase="done")
    for toy in ranks:
        toy.wait_end()
        assert toy.exit_code == 0, toy.story()
        sums = [event["value"] for event in toy.events if event["event"] == "sum"]
        assert sums == [6 * 6.0, 6 * 12.0, 6 * 18.0]


def test_a_storm_of_gathers_through_shared_memory(toys: Toys) -> None:
    """Processes that run at once, unlike threads: each must see what the others wrote, and no place too early."""
    for toy in toys.start_ranks(3, wire="shared", phase="storm"):
        assert toy.wait_for("storm")["wrong"] == 0
