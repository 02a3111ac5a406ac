"""Queue, cancellation, failures, drain and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from fake_model import FakeModel
from harness import EOS, LIMIT, TOKENIZER, Receiver, alone, ask, in_order, request, running

from tfglm.cache.pages import PAGE
from tfglm.engine.api import Delta, Event, Failed, Finished, NotServingError, Progress, QueueFullError, Started
from tfglm.engine.engine import Engine
from tfglm.errors import MemoryShortError
from tfglm.models.window import Rows
from tfglm.settings import Settings

COLUMNS = TOKENIZER.vocab_size + 12


class Gate:
    """Holds the model before each forward until `open`; `step` lets it do one and waits for the next."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.free = False

    def __call__(self, window: Sequence[Rows]) -> None:
        if not self.free:
            self.arrived.release()
            assert self.allowed.acquire(timeout=LIMIT)

    def wait(self) -> None:
        """Until the model is held before a forward."""
        assert self.arrived.acquire(timeout=LIMIT)

    def step(self) -> None:
        self.allowed.release()
        self.wait()

    def open(self) -> None:
        self.free = True
        self.allowed.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def gated(gate: Gate, **fields: int) -> FakeModel:
    return FakeModel(COLUMNS, before=gate, **fields)


def long(id: str, **fields: object) -> object:
    return request(id, max_tokens=200, ignore_eos=True, **fields)


def test_the_state_is_loading_until_started() -> None:
    engine = Engine(FakeModel(COLUMNS), TOKENIZER, Settings(), EOS)
    assert engine.snapshot().state == "loading"
    with pytest.raises(NotServingError, match="its state is loading"):
        engine.submit(request(), print)
    engine.start()
    assert engine.snapshot().state == "ready"
    assert ask(engine, request()).finished
    assert engine.stop(LIMIT)


def test_a_cancelled_queued_request_never_starts(gate: Gate) -> None:
    model = gated(gate)
    with running(model, parallel=1) as engine:
        first, second = ask(engine, long("a")), ask(engine, request("b"))
        gate.wait()
        assert engine.snapshot().waiting == 1
        engine.cancel("b")
        assert engine.snapshot().waiting == 0, "its place in the queue is free at once"
        gate.step()
        assert second.finished.reason == "cancelled" and second.kinds() == ["Finished"]
        assert second.finished.usage.completion_tokens == 0
        engine.cancel("a")
        gate.open()
        assert first.finished.reason == "cancelled"
        assert len(model.windows) == 2


def test_a_prompt_is_cancelled_between_chunks(gate: Gate) -> None:
    model = gated(gate)
    with running(model, prefill_rows=16) as engine:
        receiver = ask(engine, long("a", prompt=[1] * 200))
        gate.wait()
        gate.step()
        engine.cancel("a")
        gate.open()
        assert receiver.finished.reason == "cancelled"
        assert receiver.kinds() == ["Started", "Progress", "Progress", "Finished"]
        assert engine.wait_idle(LIMIT) and model.empty and len(model.windows) == 2


def test_a_reply_is_cancelled_between_rounds_and_keeps_its_text(gate: Gate) -> None:
    model = gated(gate)
    with running(model) as engine:
        receiver = ask(engine, long("a"))
        gate.wait()
        for _ in range(4):
            gate.step()
        engine.cancel("a")
        gate.open()
        end = receiver.finished
        assert (end.reason, end.stop_reason, end.usage.completion_tokens) == ("cancelled", None, 5)
        assert receiver.ids == alone(long("a")).ids[:5] and in_order(receiver.events)
        assert engine.wait_idle(LIMIT) and len(model.windows) == 5


def test_cancelling_one_leaves_the_others_exact(gate: Gate) -> None:
    with running(gated(gate), parallel=4) as engine:
        receivers = [ask(engine, request(f"r{n}", [n + 1], max_tokens=30, ignore_eos=True)) for n in range(3)]
        gate.wait()
        for _ in range(8):
            gate.step()
        engine.cancel("r1")
        engine.cancel("no such request")
        gate.open()
        assert [receiver.finished.reason for receiver in receivers] == ["length", "cancelled", "length"]
        for n in (0, 2):
            assert receivers[n].ids == alone(request("x", [n + 1], max_tokens=30, ignore_eos=True)).ids


def test_the_queue_is_bounded(gate: Gate) -> None:
    with running(gated(gate), parallel=2, max_queued=3) as engine:
        receivers = [ask(engine, request(f"r{n}")) for n in range(2)]
        gate.wait()
        receivers += [ask(engine, request(f"r{n}")) for n in range(2, 5)]
        # The second may have come when the engine was already at work for the first: it then waits for a lane.
        with pytest.raises(QueueFullError, match=r"\d requests are running and \d waiting; the queue holds 3") as full:
            ask(engine, request("r5"))
        assert full.value.retry_after > 0
        assert engine.snapshot().running + engine.snapshot().waiting == 5
        gate.open()
        assert all(receiver.finished for receiver in receivers)
        assert ask(engine, request("r5")).finished


def test_max_queued_0_takes_what_the_lanes_hold(gate: Gate) -> None:
    with running(gated(gate), parallel=2, max_queued=0) as engine:
        receivers = [ask(engine, request("a")), ask(engine, request("b"))]
        with pytest.raises(QueueFullError):
            ask(engine, request("c"))
        gate.open()
        assert all(receiver.finished for receiver in receivers)


def test_an_id_in_use_is_refused(gate: Gate) -> None:
    with running(gated(gate)) as engine:
        receiver = ask(engine, request("a"))
        with pytest.raises(ValueError, match="'a' is in use"):
            ask(engine, request("a"))
        gate.open()
        assert receiver.finished
        assert ask(engine, request("a")).finished


def test_a_request_waits_until_the_pages_of_its_whole_reply_are_free(gate: Gate) -> None:
    """Two pages: one long request takes both although it has cached five tokens; the others wait in order."""
    model = gated(gate, tokens=2 * PAGE)
    order: list[str] = []

    def told(id: str) -> Callable[[Event], None]:
        return lambda event: order.append(id) if isinstance(event, Started) else None

    with running(model, parallel=4) as engine:
        big = ask(engine, request("big", max_tokens=PAGE + 1, ignore_eos=True))
        gate.wait()
        for _ in range(3):
            gate.step()
        for id, tokens in (("small", 2), ("large", 2 * PAGE - 10), ("tiny", 1)):
            engine.submit(request(id, max_tokens=tokens), told(id))
        gate.step()
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_tokens_total) == (1, 3, 2 * PAGE)
        assert snapshot.kv_tokens_used == len(request().prompt) + 3
        gate.open()
        assert big.finished.reason == "length"
    assert order == ["small", "large", "tiny"]


def test_prompt_chunks_and_rounds_take_turns() -> None:
    model = FakeModel(COLUMNS)
    with running(model, parallel=4, prefill_rows=16, prefill_share=1.0) as engine:
        ready = threading.Event()
        talking = Receiver()

        def on_event(event: Event) -> None:
            talking(event)
            if isinstance(event, Delta) and len(talking.ids) == 3:
                start = len(model.windows)
                for id in ("p", "q"):
                    receivers.append(ask(engine, request(id, [1] * 96, max_tokens=1)))
                marks.append(start)
                ready.set()

        receivers: list[Receiver] = []
        marks: list[int] = []
        engine.submit(request("talk", max_tokens=40, ignore_eos=True), on_event)
        assert ready.wait(LIMIT) and all(receiver.finished for receiver in receivers) and talking.finished
    steps = model.windows[marks[0] :][:25]
    kinds = ["chunk" if window[0][0] == 16 else "round" for window in steps]
    assert kinds[:24] in (["chunk", "round"] * 12, ["round", "chunk"] * 12)
    ends = [receiver.events for receiver in receivers]
    assert all([e.processed for e in events if isinstance(e, Progress)] == list(range(16, 97, 16)) for events in ends)


def test_two_prompts_are_read_in_turns(gate: Gate) -> None:
    """A short prompt behind a long one is answered while the long one is still being read."""
    slow, read = Receiver(), []
    with running(gated(gate), prefill_rows=16) as engine:
        engine.submit(request("slow", [1] * 1000, max_tokens=1), slow)
        gate.wait()
        engine.submit(request("quick", [2] * 20, max_tokens=1), lambda event: read.append(len(slow.events)))
        gate.open()
        assert slow.finished and len(slow.events) == 1 + 63 + 2
    assert 1 <= max(read) <= 6


def test_a_receiver_that_raises_ends_its_request_alone() -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Delta):
            raise RuntimeError("the client is gone")

    model = FakeModel(COLUMNS)
    with running(model) as engine:
        good = ask(engine, long("good"))
        engine.submit(long("bad"), broken)
        assert good.outcome() == alone(long("good")).outcome()
        assert ask(engine, request("next")).finished
    assert [type(event).__name__ for event in seen] == ["Started", "Progress", "Delta"]
    assert not any(len(window) > 1 for window in model.windows), "it ended after its first token"


@pytest.mark.parametrize("kind", [Started, Progress, Finished])
def test_a_receiver_may_raise_at_any_event(kind: type) -> None:
    def broken(event: Event) -> None:
        if isinstance(event, kind):
            raise RuntimeError("the client is gone")

    with running() as engine:
        engine.submit(request("bad"), broken)
        assert engine.wait_idle(LIMIT)
        assert engine.snapshot().state == "ready" and ask(engine, request("next")).finished


def failing(times: int, error: Exception, poison: int = 1) -> FakeModel:
    """Fails the first `times` forwards of a window with a one-token row `poison` generations in."""
    left = [times]

    def before(window: Sequence[Rows]) -> None:
        if left[0] and any(len(rows.tokens) == 1 and rows.stream.length > poison for rows in window):
            left[0] -= 1
            raise error

    return FakeModel(COLUMNS, before=before)


def test_a_failing_forward_fails_its_window_and_the_engine_goes_on() -> None:
    with running(failing(1, RuntimeError("a kernel failed")), parallel=2) as engine:
        ends = [ask(engine, request("a", [1, 2], ignore_eos=True)), ask(engine, request("b", [1], ignore_eos=True))]
        failed = ends[0].last
        assert isinstance(failed, Failed) and failed.code == "E_INTERNAL"
        assert "RuntimeError: a kernel failed" in failed.message and in_order(ends[0].events)
        assert ends[1].last
        assert ask(engine, request("next")).outcome() == alone(request("next")).outcome()
        assert engine.snapshot().state == "ready"


def test_an_error_with_a_code_keeps_it() -> None:
    with running(failing(1, MemoryShortError("the cache is full"))) as engine:
        failed = ask(engine, request("a", [1, 2], ignore_eos=True)).last
        assert failed == Failed("E_MEMORY", "the cache is full")


def test_a_model_that_no_longer_answers_fails_everyone_and_hangs_no_one() -> None:
    """Also those that wait and those of no window; after it nothing is accepted and stop returns."""
    gate, broken = Gate(), threading.Event()

    def before(window: Sequence[Rows]) -> None:
        gate(window)
        if broken.is_set():
            raise RuntimeError("the device is lost")

    engine = Engine(FakeModel(COLUMNS, before=before), TOKENIZER, Settings(parallel=2), EOS)
    engine.start()
    receivers = [ask(engine, request(f"r{n}", [n + 1] * 40, max_tokens=50, ignore_eos=True)) for n in range(5)]
    gate.wait()
    broken.set()
    gate.open()
    assert all(isinstance(receiver.last, Failed) for receiver in receivers)
    assert all("the device is lost" in receiver.last.message for receiver in receivers)
    assert engine.wait_idle(LIMIT) and engine.snapshot().state == "failed"
    with pytest.raises(NotServingError, match="failed"):
        ask(engine, request())
    assert engine.stop(LIMIT) and engine.snapshot().state == "failed"


def test_a_stream_that_cannot_be_opened_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(COLUMNS)
    open_stream, calls = model.open_stream, []

    def once() -> object:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryShortError("no page is free")
        return open_stream()

    monkeypatch.setattr(model, "open_stream", once)
    with running(model) as engine:
        first, second = ask(engine, request("a")), ask(engine, request("b"))
        assert first.last == Failed("E_MEMORY", "no page is free") and first.kinds() == ["Failed"]
        assert second.finished


def test_drain_finishes_what_runs_and_waits_and_refuses_the_rest(gate: Gate) -> None:
    with running(gated(gate), parallel=1) as engine:
        receivers = [ask(engine, request(f"r{n}", [n + 1])) for n in range(3)]
        gate.wait()
        engine.drain()
        assert engine.snapshot().state == "draining" and not engine.wait_idle(0.01)
        with pytest.raises(NotServingError, match="draining"):
            ask(engine, request("late"))
        gate.open()
        assert engine.wait_idle(LIMIT)
        assert [receiver.ids for receiver in receivers] == [alone(request("x", [n + 1])).ids for n in range(3)]


def test_stop_fails_what_is_left_after_the_step(gate: Gate) -> None:
    model = gated(gate)
    engine = Engine(model, TOKENIZER, Settings(parallel=1), EOS)
    engine.start()
    receivers = [ask(engine, long(f"r{n}")) for n in range(3)]
    gate.wait()
    threading.Timer(0.05, gate.open).start()
    assert engine.stop(LIMIT)
    assert [receiver.last.code for receiver in receivers] == ["E_NOT_SERVING"] * 3
    assert all(in_order(receiver.events) for receiver in receivers)
    assert not any(thread.name == "engine" and thread.is_alive() for thread in threading.enumerate())
    assert engine.stop(LIMIT), "stopping twice is harmless"


def test_stop_does_not_wait_for_a_stuck_step_longer_than_asked(gate: Gate) -> None:
    model = gated(gate)
    engine = Engine(model, TOKENIZER, Settings(parallel=2), EOS)
    engine.start()
    receivers = [ask(engine, long(f"r{n}")) for n in range(2)]
    gate.wait()
    time.sleep(0.02)
    assert engine.snapshot().step_age_s >= 0.02
    assert not engine.stop(0.05)
    assert [receiver.last.code for receiver in receivers] == ["E_NOT_SERVING"] * 2
    gate.open()
    assert engine.stop(LIMIT)
    assert all(in_order(receiver.events) for receiver in receivers), "nothing follows the last event"


def test_counters_move_while_tokens_are_made(gate: Gate) -> None:
    with running(gated(gate), prefill_rows=16) as engine:
        receiver = ask(engine, request(prompt=[1] * 24, max_tokens=5, ignore_eos=True))
        gate.wait()
        seen = []
        for _ in range(4):
            gate.step()
            now = engine.snapshot()
            seen.append((now.iteration_tokens, now.prompt_tokens, now.generation_tokens, now.chunks, now.rounds))
        assert seen == [(16, 0, 0, 1, 0), (24, 24, 1, 2, 0), (25, 24, 2, 2, 1), (26, 24, 3, 2, 2)]
        assert engine.snapshot().kv_tokens_used == 26
        gate.open()
        assert receiver.finished
    assert engine.snapshot().step_age_s == 0.0
