"""When ranks start together and when a start is over: every rule alone."""

import dataclasses

import pytest

from tfglm.supervisor.attempts import Attempts
from tfglm.supervisor.beats import Beat
from tfglm.supervisor.cluster import Limits
from tfglm.supervisor.decide import End, Seen, declared, leaving, next_generation, over, waits_for

OWN = Beat(rank=0, boot=100, sequence=1, digest="d", release="1", phase="waiting")
PEER = dataclasses.replace(OWN, rank=1, boot=101)
BOOTS = (100, 101)


def seen(silent_s: float = 0.1, **changes: object) -> list[Seen]:
    return [Seen(1, "spark1", dataclasses.replace(PEER, **changes), silent_s)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (seen(), ""),
        ([Seen(1, "spark1", None, 1e9)], "rank 1 (spark1), which has not been heard of"),
        (seen(silent_s=9.0), "rank 1 (spark1), silent for 9 s"),
        (seen(phase="gone", code="E_MEMORY", reason="too little"), "which has stopped: E_MEMORY: too little"),
        (seen(phase="preparing", reason="waiting for carrier"), "which is preparing: waiting for carrier"),
        (seen(digest="e"), "to get the same cluster.json: it has another one"),
        (seen(release="2"), "it has tfglm 2, this rank 1"),
        (seen(lost="rail a: nothing comes"), "which has lost rail a: nothing comes"),
        (seen(phase="stopping"), "which is stopping"),
    ],
)
def test_rank_0_waits_until_every_rank_waits(peers: list[Seen], words: str) -> None:
    found = waits_for(peers, OWN, dead_s=5.0)
    assert (words in found) if words else (found == "")


def test_own_rails_hold_a_start_too() -> None:
    assert waits_for(seen(), dataclasses.replace(OWN, lost="carrier on x"), 5.0) == "carrier on x"


def test_a_generation_is_newer_than_all_that_anybody_knows() -> None:
    assert next_generation(seen(), OWN) == 1
    assert next_generation(seen(generation=7, ended=7), OWN) == 8
    assert next_generation(seen(ended=9), dataclasses.replace(OWN, generation=3)) == 10


def leader(silent_s: float = 0.1, **changes: object) -> Seen:
    values = {"phase": "starting", "generation": 4, "ended": 3, "boots": (100, 101)} | changes
    return Seen(0, "spark0", dataclasses.replace(OWN, **values), silent_s)  # type: ignore[arg-type]


def test_a_follower_joins_what_rank_0_declares_and_nothing_else() -> None:
    own = dataclasses.replace(PEER, ended=3, generation=3)
    assert declared(leader(), own, 5.0) == 4
    assert declared(leader(phase="serving"), own, 5.0) == 4
    assert declared(leader(phase="waiting"), own, 5.0) == 0
    assert declared(leader(phase="stopping", ended=4), own, 5.0) == 0
    assert declared(leader(ended=4), own, 5.0) == 0  # over already
    assert declared(leader(), dataclasses.replace(own, ended=4), 5.0) == 0  # this rank knows it to be over
    assert declared(leader(silent_s=6), own, 5.0) == 0
    assert declared(leader(digest="other"), own, 5.0) == 0
    assert declared(leader(boots=(100, 99)), own, 5.0) == 0  # meant the supervisor before this one
    assert declared(leader(boots=()), own, 5.0) == 0
    assert declared(Seen(0, "spark0", None, 1e9), own, 5.0) == 0


RUNNING = dataclasses.replace(OWN, phase="serving", generation=4, ended=3, boots=BOOTS)


@pytest.mark.parametrize(
    ("peers", "end"),
    [
        (seen(phase="serving", generation=4, ended=3), None),
        (seen(phase="waiting", generation=3, ended=3), None),  # has not had the time to join
        (seen(silent_s=5.1, generation=4), End("E_RANKS", "rank 1 (spark1) has been silent for more than 5 s")),
        (seen(generation=4, boot=102), End("E_RANKS", "the supervisor of rank 1 (spark1) was started again")),
        (seen(generation=4, ended=4, code="E_X", reason="bad"), End("E_X", "rank 1 (spark1): bad")),
        (seen(generation=4, ended=4, code="E_X", reason="rank 2 (c): bad"), End("E_X", "rank 2 (c): bad")),
        (seen(phase="gone", generation=4, ended=4), End("", "rank 1 (spark1) has stopped", in_order=True)),
        (seen(phase="stopping", generation=4, ended=4, reason="all done"), End("", "rank 1 (spark1): all done", True)),
    ],
)
def test_a_start_is_over_for_all_when_it_is_for_one(peers: list[Seen], end: End | None) -> None:
    assert over(peers, RUNNING, BOOTS, age_s=1.0, dead_s=5.0, join_s=10.0) == end


def test_a_rank_that_does_not_join_ends_the_start() -> None:
    late = over(seen(phase="waiting", generation=3), RUNNING, BOOTS, age_s=10.5, dead_s=5.0, join_s=10.0)
    assert late is not None
    assert "has not started its engine within 10 s: it is waiting" in late.reason


def test_a_lost_rail_ends_the_start() -> None:
    own = dataclasses.replace(RUNNING, lost="carrier on enp1s0f0np0 (rail to rank 1)")
    found = over(seen(generation=4), own, BOOTS, 1.0, 5.0, 10.0)
    assert found == End("E_FABRIC", "lost carrier on enp1s0f0np0 (rail to rank 1)")


def test_a_rank_that_leaves_is_seen() -> None:
    assert leaving(seen(phase="serving")) is None
    found = leaving(seen(phase="leaving"))
    assert found is not None
    assert str(found) == "rank 1 (spark1)"


def test_waits_double_up_to_a_limit_and_end() -> None:
    attempts = Attempts(Limits(attempts=5, backoff=5.0, backoff_most=30.0, stable=600.0))
    waits = []
    for _ in range(5):
        waits.append(attempts.wait_s)
        assert not attempts.exhausted
        attempts.record(served_s=3.0, in_order=False)
    assert waits == [0.0, 5.0, 10.0, 20.0, 30.0]
    assert attempts.exhausted
    attempts.record(served_s=700.0, in_order=False)  # after long service it is a first failure again
    assert (attempts.failed, attempts.exhausted) == (1, False)
    attempts.record(served_s=1.0, in_order=True)
    assert (attempts.failed, attempts.wait_s) == (0, 0.0)
