"""How ranks find each other: mismatches, ranks that never come, strangers at the door."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from rank_processes import free_port

from tfglm.errors import PortError, RankMismatch, RankNeverCame, RanksError
from tfglm.ranks.bootstrap import differences, join, lead, listen
from tfglm.ranks.control import Control, Timing
from tfglm.ranks.messages import PROTOCOL, Frame, encode

FACTS = {
    "version": "1.0",
    "code": "c0de",
    "settings": {"context": 4096, "kv": "fp4"},
    "checkpoint": "glm@1",
    "kernels": "cafe",
    "layout": "layer",
}
TIMING = Timing(beat_s=0.2, lost_s=5.0)


class Meeting:
    """Ranks that meet in threads of this process; what became of each."""

    def __init__(self, ranks: int, **lead_options: object) -> None:
        self.ranks = ranks
        self.listener = listen(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.results: dict[object, Control | Exception] = {}
        self.lines: list[str] = []
        self._threads: list[threading.Thread] = []
        self._lead_options = {"limit_s": 20.0, "timing": TIMING, "progress": self.lines.append, **lead_options}

    def start(self, name: object, call: Callable[[], Control]) -> None:
        def run() -> None:
            try:
                self.results[name] = call()
            except Exception as error:
                self.results[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def lead(self, facts: dict = FACTS) -> None:
        self.start(0, lambda: lead(self.listener, self.ranks, facts, **self._lead_options))

    def join(
        self, rank: int, facts: dict = FACTS, name: object = None, ranks: int | None = None, **more: object
    ) -> None:
        name = rank if name is None else name
        options = {"limit_s": 20.0, "timing": TIMING, "progress": self.lines.append, **more}
        self.start(name, lambda: join(self.address, rank, ranks or self.ranks, facts, **options))

    def wait_until_joined(self) -> None:
        """A follower says that it waits for the others with its first line of progress."""
        deadline = time.monotonic() + 10
        while not any("the other ranks have not come" in line for line in self.lines) and time.monotonic() < deadline:
            time.sleep(0.02)

    def wait_for(self, *names: object) -> Control | Exception:
        """The first result of one of these."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for name in names:
                if name in self.results:
                    return self.results[name]
            time.sleep(0.02)
        raise AssertionError(f"nothing came of {names}: {self.results}")

    def finish(self) -> dict[object, Control | Exception]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.results

    def close(self) -> None:
        for result in self.results.values():
            if isinstance(result, Control):
                result.close()


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    made: list[Meeting] = []

    def make(ranks: int = 3, **options: object) -> Meeting:
        made.append(Meeting(ranks, **options))
        return made[-1]

    yield make
    for meeting in made:
        meeting.close()


def all_met(meeting: Meeting) -> bool:
    return all(isinstance(result, Control) for result in meeting.finish().values())


def test_three_ranks_meet_in_any_order_and_can_talk(meet: Callable[..., Meeting]) -> None:
    meeting = meet()
    meeting.join(2)
    meeting.lead()
    meeting.join(1)
    assert all_met(meeting), meeting.results
    controls = [meeting.results[rank] for rank in range(3)]
    controls[1].post("from 1", b"hello")
    assert controls[0].read("from 1", 5) == controls[2].read("from 1", 5) == b"hello"
    controls[0].announce(1, "x", encode(Frame("work", {"number": 1})))
    assert controls[1].receive().facts == controls[2].receive().facts == {"number": 1}
    controls[0].close()
    assert controls[1].receive() is None and controls[2].receive() is None


def test_differences_are_named_leaf_by_leaf() -> None:
    theirs = {**FACTS, "settings": {"context": 8192, "kv": "fp4", "extra": 1}}
    assert differences(FACTS, theirs) == [("settings.context", 4096, 8192), ("settings.extra", "nothing", 1)]
    assert differences(FACTS, FACTS) == []
    assert differences({"a": {"b": 1}}, {"a": 2}) == [("a", {"b": 1}, 2)]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", "1.1", "field 'version' is '1.0' on rank 0 and '1.1' on rank 2"),
        ("code", "d00d", "field 'code' is 'c0de' on rank 0 and 'd00d' on rank 2"),
        ("settings", {"context": 4096, "kv": "fp8"}, "field 'settings.kv' is 'fp4' on rank 0 and 'fp8' on rank 2"),
        ("checkpoint", "glm@2", "field 'checkpoint' is 'glm@1' on rank 0 and 'glm@2' on rank 2"),
        ("kernels", "beef", "field 'kernels' is 'cafe' on rank 0 and 'beef' on rank 2"),
        ("layout", "expert", "field 'layout' is 'layer' on rank 0 and 'expert' on rank 2"),
    ],
)
def test_other_facts_end_all_ranks_naming_field_and_values(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch, field: str, value: object, said: str
) -> None:
    monkeypatch.setattr("tfglm.ranks.bootstrap.PROGRESS_S", 0.2)
    meeting = meet()
    meeting.lead()
    meeting.join(1)
    meeting.wait_until_joined()
    meeting.join(2, {**FACTS, field: value})
    for result in meeting.finish().values():
        assert isinstance(result, RankMismatch), result
        assert said in result.message
    assert len(meeting.results) == 3


def test_another_number_of_ranks(meet: Callable[..., Meeting]) -> None:
    meeting = meet(2)
    meeting.lead()
    meeting.join(1, ranks=3)
    for result in meeting.finish().values():
        assert isinstance(result, RankMismatch)
        assert "field 'ranks' is 2 on rank 0 and 3 on rank 1" in result.message


def test_another_protocol(meet: Callable[..., Meeting]) -> None:
    meeting = meet(2)
    meeting.lead()
    with socket.create_connection(meeting.address) as sock:
        sock.sendall(encode(Frame("hello", {"protocol": 99, "rank": 1, "ranks": 2, "facts": {"code": "new"}})))
        answer = sock.recv(4096)
    assert f"field 'protocol' is {PROTOCOL} on rank 0 and 99 on rank 1".encode() in answer
    error = meeting.finish()[0]
    assert isinstance(error, RankMismatch) and "field 'protocol'" in error.message


def test_a_rank_that_never_comes(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfglm.ranks.bootstrap.PROGRESS_S", 0.5)
    meeting = meet(limit_s=2.0, expected={2: "10.0.23.2"})
    meeting.lead()
    meeting.join(1)
    results = meeting.finish()
    for rank in (0, 1):
        assert isinstance(results[rank], RankNeverCame), results[rank]
        assert results[rank].message == "rank 2 has not joined after 2 s: expected 10.0.23.2"
    assert "rank 2 has not joined after 1 s: expected 10.0.23.2" in meeting.lines
    assert any(line.startswith("connected to rank 0 at 127.0.0.1") for line in meeting.lines)


def test_rank_0_never_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfglm.ranks.bootstrap.PROGRESS_S", 0.5)
    lines: list[str] = []
    port = free_port()
    with pytest.raises(RankNeverCame, match=rf"rank 0 cannot be reached at 127\.0\.0\.1:{port} after .*refused"):
        join(("127.0.0.1", port), 1, 2, FACTS, limit_s=1.2, progress=lines.append)
    assert lines


def test_rank_0_is_busy_behind_its_open_door(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens before it looks at connections; that takes longer than a lost beat does."""
    monkeypatch.setattr("tfglm.ranks.bootstrap.PROGRESS_S", 0.2)
    meeting = meet(2, timing=Timing(beat_s=0.05, lost_s=0.3))
    options = {"limit_s": 20.0, "timing": Timing(beat_s=0.05, lost_s=0.3), "progress": meeting.lines.append}
    meeting.start(1, lambda: join(meeting.address, 1, 2, FACTS, **options))
    time.sleep(1.0)
    assert any("it has not answered after" in line for line in meeting.lines)
    meeting.lead()
    assert all_met(meeting), meeting.results


def test_two_processes_claim_one_rank(meet: Callable[..., Meeting]) -> None:
    """The second is refused; the first, and the meeting, go on."""
    meeting = meet()
    meeting.lead()
    meeting.join(1, name="one")
    meeting.join(1, name="other")
    meeting.wait_for("one", "other")
    meeting.join(2)
    results = meeting.finish()
    refused = [result for result in results.values() if isinstance(result, RankMismatch)]
    assert len(refused) == 1 and "rank 1 has already joined from 127.0.0.1" in refused[0].message
    assert sum(isinstance(result, Control) for result in results.values()) == 3


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_out_of_range_is_refused_and_disturbs_nobody(meet: Callable[..., Meeting], rank: int) -> None:
    meeting = meet()
    meeting.lead()
    meeting.join(rank, name="wrong")
    wrong = meeting.wait_for("wrong")
    meeting.join(1)
    meeting.join(2)
    results = meeting.finish()
    del results["wrong"]
    assert isinstance(wrong, RankMismatch) and "rank 0 waits for ranks 1 to 2" in wrong.message
    assert all_met(meeting)


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 64,
    encode(Frame("hello", {"protocol": 1}))[:-5],
    encode(Frame("hello", {"rank": "1", "facts": {}})),
    encode(Frame("beat")),
    b"TFR1" + b"\xff" * 12,
    b"TFR1\x00\x00\x00\x04" + b"\x00" * 8 + b"{}{}",
]


def test_strangers_are_sent_away_and_stall_nobody(meet: Callable[..., Meeting]) -> None:
    meeting = meet()
    meeting.lead()
    sockets = [socket.create_connection(meeting.address) for _ in range(2 * len(GARBAGE) + 40)]
    for sock, data in zip(sockets, 2 * GARBAGE, strict=False):
        sock.sendall(data)
    sockets[0].close()
    began = time.monotonic()
    meeting.join(1)
    meeting.join(2)
    assert all_met(meeting), meeting.results
    assert time.monotonic() - began < 4.0  # less than a silent connection is given
    for sock in sockets:
        sock.close()


def test_a_silent_connection_is_closed(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfglm.ranks.bootstrap._HELLO_S", 0.3)
    meeting = meet()
    meeting.lead()
    with socket.create_connection(meeting.address) as sock:
        sock.settimeout(10)
        assert sock.recv(1) == b""
    meeting.join(1)
    meeting.join(2)
    assert all_met(meeting)


def test_something_else_answers_at_rank_0s_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RanksError, match="is not rank 0: not a frame of tfglm: it begins with b'HTTP"):
            join(server.getsockname()[:2], 1, 2, FACTS, limit_s=5, timing=TIMING)


def test_rank_0_listens_at_its_address_alone() -> None:
    with listen(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=2)
        with pytest.raises(PortError, match=f"127.0.0.1:{port}.*in use"):
            listen(("127.0.0.1", port))
    with pytest.raises(PortError, match=r"cannot meet at no-such-host\.invalid:1"):
        listen(("no-such-host.invalid", 1))


def test_a_follower_dials_from_the_address_it_is_given(meet: Callable[..., Meeting]) -> None:
    meeting = meet(2)
    meeting.lead()
    follower = join(meeting.address, 1, 2, FACTS, limit_s=20, source="127.0.0.3")
    leader = meeting.finish()[0]
    assert isinstance(leader, Control)
    assert follower.host == "127.0.0.3" and leader.host == "127.0.0.1"
    leader.close()
    follower.close()


def test_meeting_and_beating_need_no_torch() -> None:
    """So that a small process that watches a rank can do both."""
    code = "import sys, tfglm.ranks.bootstrap, tfglm.ranks.control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class Stopped:
    """A rank that is told to end."""

    def __init__(self, rank: int) -> None:
        self.error = RanksError(f"rank {rank} was stopped")
        self.now = False

    def check(self) -> None:
        if self.now:
            raise self.error


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_while_the_others_are_waited_for(meet: Callable[..., Meeting], stopped: int) -> None:
    ends = {rank: Stopped(rank) for rank in (0, 1)}
    meeting = meet(watch=ends[0].check)
    meeting.lead()
    meeting.join(1, watch=ends[1].check)
    meeting.wait_until_joined()
    ends[stopped].now = True
    for error in meeting.finish().values():
        assert isinstance(error, RanksError) and error.message == f"rank {stopped} was stopped"


def test_a_rank_that_is_stopped_while_it_dials(meet: Callable[..., Meeting]) -> None:
    end = Stopped(1)
    meeting = meet()
    meeting.listener.close()
    meeting.join(1, watch=end.check)
    time.sleep(0.5)
    assert not meeting.results
    end.now = True
    assert meeting.finish()[1] is end.error
