"""The control: beats, the end of all ranks, the board, orderly stops; in threads of this process."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tfglm.errors import RankMismatch, RanksError
from tfglm.ranks.control import Control, Timing, controls_in_process
from tfglm.ranks.link import Link
from tfglm.ranks.messages import RANK, Array, Frame, Reader, encode

QUICK = Timing(beat_s=0.05, lost_s=0.5, step_s=0.6, gather_s=0.4)


@pytest.fixture
def three() -> Iterator[list[Control]]:
    controls = controls_in_process(3, QUICK)
    yield controls
    for control in controls:
        control.close()


class Peer:
    """The other end of rank 0's only connection, played by hand: reads frames, sends bytes."""

    def __init__(self, timing: Timing = QUICK) -> None:
        mine, self.sock = socket.socketpair()
        self.sock.settimeout(10)
        self.control = Control(0, 2, {1: Link(mine)}, timing)
        self._reader = Reader(RANK)
        self._frames: list[Frame] = []

    def next(self, kind: str) -> Frame:
        while True:
            for frame in self._frames:
                if frame.kind == kind:
                    self._frames.remove(frame)
                    return frame
            data = self.sock.recv(1 << 16)
            assert data, f"the connection ended before a {kind!r} came"
            self._frames += self._reader.feed(data)

    def close(self) -> None:
        self.control.close()
        self.sock.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def failure_of(control: Control, within_s: float = 10.0) -> RanksError:
    error = control.failure(within_s)
    assert error is not None, "the ranks have not ended"
    with pytest.raises(type(error), match=re.escape(error.message)):
        control.check()
    return error


def test_beats_keep_idle_ranks_together(three: list[Control]) -> None:
    time.sleep(3 * QUICK.lost_s)
    for control in three:
        control.check()


def test_a_silent_rank_is_lost(peer: Peer) -> None:
    peer.sock.sendall(encode(Frame("beat", {"done": 0})))
    began = time.monotonic()
    error = failure_of(peer.control)
    assert 0.8 * QUICK.lost_s < time.monotonic() - began
    assert re.fullmatch(r"rank 1 \(this process\) has not been heard of for \d+\.\d s", error.message)
    assert peer.next("failed").facts == {"reason": error.message, "error": "RanksError"}


def test_a_slow_trickle_counts_as_being_heard(peer: Peer) -> None:
    for byte in encode(Frame("beat", {"done": 0})):
        peer.sock.sendall(bytes([byte]))
        time.sleep(0.02)
    peer.control.check()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent not a frame of tfglm"),
        (b"TFR1" + b"\xff" * 12, "a frame's header of 4294967295 bytes; at most"),
        (encode(Frame("dance")), "sent a message of the unknown kind 'dance'"),
        (encode(Frame("work")), "sent a message of the unknown kind 'work'"),
        (encode(Frame("stop")), "sent a message of the unknown kind 'stop'"),
        (encode(Frame("beat", {"done": "x"})), "cannot watch the others: ValueError"),
        (encode(Frame("posted", {})), "cannot watch the others: KeyError"),
    ],
)
def test_nonsense_of_a_rank_ends_all(peer: Peer, data: bytes, said: str) -> None:
    peer.sock.sendall(data)
    assert said in failure_of(peer.control).message


def test_a_closed_connection_ends_all(peer: Peer) -> None:
    peer.sock.close()
    assert failure_of(peer.control).message == "rank 1 (this process) closed its connection"


@pytest.mark.parametrize("noticed_by", [0, 1, 2])
def test_one_error_ends_all_ranks_alike(three: list[Control], noticed_by: int) -> None:
    told: list[str] = []
    for control in three:
        control.on_failure(lambda error: told.append(error.message))
    three[noticed_by].fail(RankMismatch("rank 2 has other kernels"))
    three[noticed_by].fail(RanksError("something that follows from it"))
    for control in three:
        error = failure_of(control)
        assert type(error) is RankMismatch and error.message == "rank 2 has other kernels"
    late: list[str] = []
    three[0].on_failure(lambda error: late.append(error.message))
    deadline = time.monotonic() + 5
    while len(told) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == 3 * ["rank 2 has other kernels"] and late == ["rank 2 has other kernels"]


def test_every_wait_ends_with_the_ranks(three: list[Control]) -> None:
    ended: list[str] = []

    def run(call) -> None:
        try:
            call()
        except RanksError as error:
            ended.append(error.message)

    waits = [three[1].receive, lambda: three[0].read("never", 60), lambda: three[2].meet("never", 60)]
    threads = [threading.Thread(target=run, args=(wait,), daemon=True) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    three[2].fail(RanksError("rank 2 has had enough"))
    for thread in threads:
        thread.join(10)
    assert ended == 3 * ["rank 2 has had enough"]


def test_the_board_is_read_by_all_and_has_a_limit(three: list[Control]) -> None:
    three[2].post("key", bytes(range(256)))
    for control in three:
        assert control.read("key", 5) == bytes(range(256))
        assert control.has(["key"]) and not control.has(["key", "other"])
    with pytest.raises(RanksError, match=r"nobody has posted 'other' within 0\.1 s"):
        three[1].read("other", 0.1)


def test_who_does_not_come_to_a_meeting_is_named(three: list[Control], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfglm.ranks.control._PROGRESS_S", 0.1)
    lines: list[str] = []
    other = threading.Thread(target=lambda: three[1].failure(10), daemon=True)
    other.start()
    three[2].post("meet/loading/2", b"")
    with pytest.raises(RanksError, match="rank 1 was not ready with loading after"):
        three[0].meet("loading", 0.5, lines.append)
    assert lines and lines[0].startswith("rank 1 is not ready with loading after")
    assert "rank 1 was not ready" in failure_of(three[1]).message


def test_a_rank_that_beats_but_does_not_finish(three: list[Control]) -> None:
    three[0].announce(1, "forward", encode(Frame("work", {"number": 1})))
    three[1].receive()
    three[2].receive()
    three[1].done(1)
    assert failure_of(three[0]).message.startswith("rank 2 is alive, but has not finished message 1 (forward) after")


def test_finished_messages_are_not_held_against_anybody(three: list[Control]) -> None:
    for number in (1, 2, 3):
        three[0].announce(number, "forward", encode(Frame("work", {"number": number})))
        for control in three[1:]:
            assert control.receive().facts == {"number": number}
            control.done(number)
    time.sleep(2 * QUICK.step_s)
    three[0].check()


def test_a_gather_all_have_come_to_must_end(three: list[Control]) -> None:
    for control in three:
        control.came(1000)
    three[1].left(1)
    message = failure_of(three[0]).message
    assert message.startswith("ranks 0, 2 still wait in gather 1 ")
    assert message.endswith("after all ranks have come to it: what carries it between them is broken")


def test_a_gather_that_one_has_not_come_to_may_last(three: list[Control]) -> None:
    three[0].came(1000)
    three[1].came(1000)
    time.sleep(3 * QUICK.gather_s)
    three[0].check()
    three[2].came(1000)
    for control in three:
        control.left(1)
    time.sleep(3 * QUICK.gather_s)
    three[0].check()


def test_a_beat_tells_the_largest_gather_that_a_rank_has_not_left() -> None:
    """A device may still be in a prompt's when the host has launched a window, whose bytes nobody counts, behind it."""
    peer = Peer(Timing(beat_s=0.02, lost_s=60.0))

    def told(left: int) -> int:
        while (facts := peer.next("beat").facts)["came"] < 3 or facts["left"] != left:
            pass
        return int(facts["bytes"])

    try:
        for size in (1000, 10, 0):
            peer.control.came(size)
        assert told(left=0) == 1000
        peer.control.left(1)
        assert told(left=1) == 10
        peer.control.left(3)
        assert told(left=3) == 0
    finally:
        peer.close()


def test_a_rank_that_stood_still_in_a_gather_may_go_on_with_it() -> None:
    """For less than lost_s, which is a setting, but longer than a gather may take. Then that time counts again."""
    peer = Peer(Timing(beat_s=0.05, lost_s=60.0, gather_s=1.0))
    beat = encode(Frame("beat", {"came": 1, "left": 0, "bytes": 1000}))
    try:
        peer.control.came(1000)
        peer.sock.sendall(beat)
        time.sleep(2.5)
        for _ in range(6):
            peer.sock.sendall(beat)
            time.sleep(0.05)
        peer.control.check()
        limit = time.monotonic() + 30
        while peer.control.failure(0.05) is None and time.monotonic() < limit:
            peer.sock.sendall(beat)
        assert "still wait in gather 1" in failure_of(peer.control).message
    finally:
        peer.close()


def test_a_follower_that_falls_far_behind_ends_all(three: list[Control], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfglm.ranks.control._MAX_WAITING", 10)
    with pytest.raises(RanksError):
        for number in range(1, 1000):
            three[0].announce(number, "x", encode(Frame("work", {"number": number})))
            time.sleep(0.002)
    assert "is 11 messages behind rank 0" in failure_of(three[0]).message


def test_a_rank_that_takes_nothing_does_not_hold_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats, but does not read; as a rank does whose control thread is stuck."""
    monkeypatch.setattr("tfglm.ranks.link._STALLED_S", 1)
    peer = Peer(Timing(beat_s=0.05, lost_s=60.0))
    try:
        with pytest.raises(RanksError, match=r"rank 1 \(this process\) cannot be reached"):
            for number in range(1, 100):
                data = Array("x", "uint8", (1 << 20,), bytes(1 << 20))
                peer.control.announce(number, "x", encode(Frame("work", {"number": number}, (data,))))
    finally:
        peer.close()


def test_a_failing_callback_keeps_nobody_from_ending(three: list[Control]) -> None:
    told: list[str] = []

    def broken(error: RanksError) -> None:
        raise ValueError("no")

    three[0].on_failure(broken)
    three[0].on_failure(lambda error: told.append(error.message))
    three[0].fail(RanksError("enough"))
    assert told == ["enough"]
    assert failure_of(three[1]).message == failure_of(three[2]).message == "enough"


def test_an_orderly_stop_is_no_error(three: list[Control]) -> None:
    three[0].announce(1, "x", encode(Frame("work", {"number": 1})))
    three[0].close()
    for control in three[1:]:
        assert control.receive().facts == {"number": 1}
        assert control.receive() is None
        control.close()
        control.close()
    for control in three:
        assert control.failure(0.1) is None


def test_nothing_is_left_open() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before, threads = open_files(), threading.active_count()
    for ending in ("stop", "fail", "lost"):
        controls = controls_in_process(3, QUICK)
        controls[0].post("key", b"1")
        if ending == "fail":
            controls[1].fail(RanksError("enough"))
        if ending == "lost":
            controls[2].close()
        for control in controls:
            control.close()
    deadline = time.monotonic() + 5
    while (open_files() > before or threading.active_count() > threads) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert open_files() <= before and threading.active_count() <= threads
