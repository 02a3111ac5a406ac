"""Heartbeats between two supervisors' sockets on loopback addresses: what is believed, what is not, and rails."""

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tfglm.hosts.cabling import LEAST_MTU
from tfglm.supervisor.beats import Beat, Beats, decode
from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.facts import parse

BEAT = Beat(rank=1, boot=5, sequence=1, digest="d", release="1", phase="waiting", boots=(1, 5))
RAILS = ("127.0.1.1", "127.0.1.2")


def pair(rail_mtu: int = 0, context: tuple[str, str] = ("1", "1")) -> list[Beats]:
    """Beats of ranks 0 and 1; with a rail between them when it has an MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = []
    for rank in (0, 1):
        rails = [[{"peer": 1 - end, "address": RAILS[end]}] if rail_mtu else [] for end in (0, 1)]
        facts = {
            "version": 1,
            "name": "pair",
            "checkpoint": "/x",
            "settings": {"context": context[rank]},
            "ports": {"heartbeat": port},
            "ranks": [{"name": f"s{end}", "control": f"127.0.0.{end + 1}", "rails": rails[end]} for end in (0, 1)],
        }
        mine: list[dict[str, Any]] = []
        if rail_mtu:
            mine = [{"peer": 1 - rank, "interface": "lo", "address": RAILS[rank], "peer_address": RAILS[1 - rank]}]
            mine[0]["mtu"] = rail_mtu
        node = {"version": 1, "rank": rank, "interface": "lo", "rails": mine}
        both.append(Beats(parse(Cluster, facts, "cluster"), parse(Node, node, "node")))
    return both


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_beat_arrives_as_it_was_sent() -> None:
    one, other = pair()
    await one.open()
    await other.open()
    other.send(BEAT)
    await until(lambda: one.peers[1].beat)
    assert one.peers[1].beat == BEAT
    one.close()
    other.close()


def test_only_the_clusters_own_addresses_and_formats_are_believed() -> None:
    one, _ = pair()
    good = BEAT.encode("pair")
    for data, source in [
        (good, "127.0.0.3"),  # a stranger
        (good, "127.0.0.1"),  # rank 0's address, rank 1's words
        (BEAT.encode("other"), "127.0.0.2"),
        (b"\xff\x00", "127.0.0.2"),
        (b"[]", "127.0.0.2"),
        (b'{"cluster": "pair"}', "127.0.0.2"),
        (b'{"cluster": "pair", "beat": []}', "127.0.0.2"),
        (b"[" * 100000, "127.0.0.2"),
        (good.replace(b'"sequence":1', b'"sequence":"1"'), "127.0.0.2"),
        (good.replace(b'"phase":"waiting"', b'"phase":null'), "127.0.0.2"),
    ]:
        one.take(data, source, None)
        assert one.peers[1].beat is None, data[:80]
    one.take(good, "127.0.0.2", None)
    assert one.peers[1].beat == BEAT


def test_a_newer_release_may_say_more() -> None:
    message = json.loads(BEAT.encode("pair"))
    message["beat"]["colour"] = "blue"
    assert decode(json.dumps(message).encode(), "pair") == (BEAT, None)


def test_what_is_overtaken_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair()
    now = [1000.0]
    monkeypatch.setattr("tfglm.supervisor.beats.time.monotonic", lambda: now[0])

    def hear(boot: int, sequence: int) -> tuple[int, int]:
        beat = Beat(1, boot, sequence, "d", "1", "waiting")
        one.take(beat.encode("pair"), "127.0.0.2", None)
        got = one.peers[1].beat
        assert got is not None
        return got.boot, got.sequence

    assert hear(5, 7) == (5, 7)
    assert hear(5, 6) == (5, 7)
    assert hear(6, 1) == (6, 1)  # restarted
    assert hear(5, 8) == (6, 1)  # the dead one's last words, late
    now[0] += 10  # silence: a restarted one whose clock was set back
    assert hear(4, 1) == (4, 1)


async def test_the_field_in_which_cluster_json_differs_is_found() -> None:
    one, other = pair(context=("4096", "8192"))
    await one.open()
    await other.open()
    other.send(BEAT)
    await until(lambda: one.peers[1].beat)
    assert one.difference(1) == ""
    one.send(Beat(0, 1, 1, "e", "1", "waiting"))
    await until(lambda: other.peers[0].beat)
    other.send(Beat(1, 5, 2, "d", "1", "waiting"))  # now it knows that rank 0 has another digest
    await until(lambda: one.difference(1))
    assert one.difference(1) == "settings.context is 4096 on rank 0 and 8192 on rank 1"
    one.close()
    other.close()


async def test_a_rail_is_heard_in_full_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair(rail_mtu=9000)
    sizes = []
    take = one.take
    monkeypatch.setattr(one, "take", lambda data, *rest: (sizes.append(len(data)), take(data, *rest)))
    await one.open()
    await other.open()
    other.send(BEAT)
    await until(lambda: one.peers[1].rails)
    assert one.silent_rail(5.0) == ""
    assert max(sizes) == 9000 - 28
    one.close()
    other.close()


async def test_a_rail_over_which_nothing_comes_is_named() -> None:
    one, _ = pair(rail_mtu=1500)
    await one.open()
    assert one.silent_rail(5.0) == ""  # of a peer that is not there at all, nothing is known
    one.take(BEAT.encode("pair"), "127.0.0.2", None)
    assert one.silent_rail(5.0) == (
        "rail lo (127.0.1.1): no full packet comes from 127.0.1.2 of rank 1: "
        "wrong port, broken cable, or different MTUs"
    )
    one.close()


def full_beat(reason: str = "r" * 999) -> Beat:
    """The longest that there can be: eight ranks, each with two rails to every other."""
    rails = [[f"enP2p1s0f{i}np{i}", 12000.5, 12000.5, 200.0] for i in range(14)]
    figures = {"pid": 4194304, "since": 1e9 + 0.1, "available_gib": 111.11, "low_gib": 10.01, "tok_s": 87.3}
    return Beat(
        rank=1,
        boot=2**61,
        sequence=10**7,
        digest="d" * 16,
        release="1.10.100",
        phase="preparing",
        generation=10**5,
        ended=10**5,
        boots=(2**61,) * 8,
        reason=reason,
        code="E_CHECKPOINT",
        lost="l" * 200,
        figures=figures | {"running": 8, "rails": rails},
    )


def test_a_beat_fits_a_packet() -> None:
    for reason in ("r" * 999, 'Gerät nicht verfügbar: "x"\n' * 20):
        beat = full_beat(reason)
        data = dataclasses.replace(beat, figures={}).encode("a-cluster-with-a-name")
        assert len(data) <= LEAST_MTU - 28
        assert reason.startswith(json.loads(data)["beat"]["reason"])


async def test_a_beat_that_is_too_long_for_a_rail_goes_over_it_without_its_figures() -> None:
    one, other = pair(rail_mtu=LEAST_MTU)
    await one.open()
    await other.open()
    beat = full_beat()
    assert len(beat.encode("pair")) > LEAST_MTU - 28
    other.send(beat)
    await until(lambda: one.peers[1].rails and one.peers[1].beat)
    assert one.peers[1].beat is not None
    assert one.peers[1].beat.figures["running"] == 8, "which the control network has brought"
    one.close()
    other.close()
