"""`tfglm doctor`: real ranks over real wires, rails over loopback addresses, and what is judged broken."""

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised import Supervised

from tfglm.cli.doctor import _print, judge
from tfglm.cli.main import main
from tfglm.errors import RanksError
from tfglm.ranks.trial import SIZES, try_wire
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.facts import parse
from tfglm.supervisor.rails import Carried, measure


def test_three_ranks_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "3", "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["wire"] for report in reports] == ["gloo", "shared"]
    for report in reports:
        assert [gather["bytes"] for gather in report["gathers"]] == [size for size, _ in SIZES]
        assert all(gather["us"] > 0 and gather["gbit_s"] > 0 for gather in report["gathers"])


def test_a_number_of_ranks_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "1"]) == 1
    assert "--ranks is 1; a trial has 2 to 8 ranks" in capsys.readouterr().err


class Wrong:
    """A wire that swaps the other ranks' parts."""

    rank, ranks, capturable = 0, 3, False

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [tensor + rank * (1 << 22) for rank in (0, 2, 1)]
        return torch.stack(parts)

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def test_a_wire_that_mixes_up_ranks_is_found_out() -> None:
    with pytest.raises(RanksError, match="rank 0 got 3072 of 3072 values of rank 1 wrong"):
        try_wire(Wrong())


ENDS = {0: ["127.0.1.1", "127.0.2.1"], 1: ["127.0.1.2", "127.0.2.2"]}


class Meeting:
    """Exchanges numbers between the threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._rows: list[list[int]] = [[] for _ in range(ranks)]

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        self._rows[rank] = list(numbers)
        self._barrier.wait()
        rows = [list(row) for row in self._rows]
        self._barrier.wait()
        return rows


def test_every_rail_is_filled_in_both_directions() -> None:
    ranks = [
        {
            "name": f"s{rank}",
            "control": f"127.0.0.{rank + 1}",
            "rails": [{"peer": 1 - rank, "address": a} for a in ENDS[rank]],
        }
        for rank in (0, 1)
    ]
    cluster = parse(Cluster, {"version": 1, "name": "c", "checkpoint": "/x", "ranks": ranks}, "cluster")
    meeting, found = Meeting(2), {}

    def be(rank: int) -> None:
        pairs = zip(ENDS[rank], ENDS[1 - rank], strict=True)
        rails = [{"peer": 1 - rank, "interface": "lo", "address": a, "peer_address": b} for a, b in pairs]
        if rank == 1:
            rails[1]["peer_address"] = "127.0.2.1"
        node = parse(Node, {"version": 1, "rank": rank, "interface": "lo", "rails": rails}, "node")
        found[rank] = measure(cluster, node, lambda numbers: meeting.exchange(rank, numbers), seconds=0.2)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    carried: list[Carried] = found[0] + found[1]
    assert [(one.sender, one.receiver, one.problem) for one in carried] == [(0, 1, "")] * 2 + [(1, 0, "")] * 2
    assert all(one.gbit_s > 0 for one in carried)


def rail(gbit_s: float, speed: float = 200.0, problem: str = "", sender: int = 0) -> dict[str, Any]:
    facts = {"sender": sender, "receiver": 1 - sender, "interface": "p0"}
    return facts | {"gbit_s": gbit_s, "speed_gbit_s": speed, "problem": problem}


@pytest.mark.parametrize(
    ("rails", "us", "problems", "warning"),
    [
        ([rail(40), rail(38)], 80.0, 0, ""),
        ([rail(40), rail(12)], 80.0, 0, "p0: 12 Gbit/s of 200 by TCP; power off both ends"),
        ([rail(90, 0), rail(30, 0)], 80.0, 0, "less than half of the fastest rail's 90"),
        ([rail(0, problem="10.0.0.1 to 10.0.0.2: refused"), rail(40)], 80.0, 1, ""),
        ([], 900.0, 0, "a gather of 12288 bytes takes 900 us, expected 300"),
    ],
)
def test_what_is_judged_broken_or_slow(rails: list[dict[str, Any]], us: float, problems: int, warning: str) -> None:
    report = {"wire": "nccl", "gathers": [{"bytes": 12288, "us": us}], "rails": rails}
    broken, slow = judge(report)
    assert len(broken) == problems
    assert (warning in " ".join(slow)) if warning else not slow


def test_what_is_expected_stands_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    gathers = [{"bytes": size, "us": us, "gbit_s": 1.0} for size, us in ((12288, 80.0), (1 << 20, 500.0))]
    report = {"wire": "nccl", "ranks": 2, "gathers": gathers, "rails": [rail(40), rail(12)]}
    report["problems"], report["warnings"] = judge(report)
    _print(report)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "12 KiB 80 us below 300 us 1.00 Gbit/s" in lines
    assert "1024 KiB 500 us 1.00 Gbit/s" in lines
    assert "rank 0 to 1, p0 12.00 Gbit/s above 20.00 200 Gbit/s" in lines


def test_two_nodes_of_a_cluster_meet_where_cluster_json_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Supervised(tmp_path, count=2, settings={"wire": "gloo"}) as two:
        two.cluster["ports"]["doctor"] = port
        for rank in (0, 1):
            two.write(rank)
        other = two.run(1, "doctor", "--rank", "1", "--config", str(two.config(1)))
        assert main(["doctor", "--rank", "0", "--config", str(two.config(0)), "--json"]) == 0
        assert other.wait(60) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["ranks"], report["wire"], report["rails"], report["problems"]) == (2, "gloo", [], [])
