"""A receiver that keeps events, and engines over the fake model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fake_model import FakeModel

from tfglm.checkpoint.vocabulary import build_tokenizer
from tfglm.engine.api import (
    Delta,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Progress,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenLogprob,
)
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.reply import Reply
from tfglm.engine.tokenizer import Tokenizer
from tfglm.settings import Settings

TOKENIZER = Tokenizer(build_tokenizer(300))
EOS = tuple(TOKENIZER.encode("<|endoftext|><|user|><|observation|>"))
LIMIT = 60.0
"""Seconds any wait in these tests may take on a loaded machine; none is expected to."""


class Receiver:
    """Keeps a request's events and the names of the threads they came from."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, event: Event) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.ended.set()

    @property
    def last(self) -> Finished | Failed:
        assert self.ended.wait(LIMIT), "the request did not end"
        event = self.events[-1]
        assert isinstance(event, Finished | Failed)
        return event

    @property
    def finished(self) -> Finished:
        assert isinstance(self.last, Finished), self.last
        return self.last

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    def text(self, channel: str = "answer") -> str:
        return "".join(delta.text for delta in self.deltas if delta.channel == channel)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def outcome(self) -> tuple[Any, ...]:
        """All of a reply that must not depend on what ran beside it."""
        end = self.finished
        usage = replace(end.usage, drafted_tokens=0, accepted_tokens=0, drafts=())
        prompt = [event.entries for event in self.events if isinstance(event, PromptLogprobs)]
        texts = (self.text("reasoning"), self.text("answer"))
        return self.ids, texts, self.logprobs, prompt, end.reason, end.stop_reason, usage


ORDER = {Started: 0, Progress: 1, PromptLogprobs: 2, Delta: 3, Finished: 4, Failed: 4}


def in_order(events: Sequence[Event]) -> bool:
    """Whether events are a whole request's, as engine/api.py promises them."""
    ranks = [ORDER[type(event)] for event in events]
    return ranks == sorted(ranks) and ranks.count(4) == 1 and ranks.count(0) <= 1 and ranks.count(2) <= 1


def request(
    id: str = "a", prompt: Sequence[int] | str = "hello", max_tokens: int = 8, **fields: Any
) -> GenerationRequest:
    """A request with the sampling parameters and the other fields mixed in `fields`."""
    names = SamplingParams.__dataclass_fields__
    sampling = SamplingParams(**{name: fields.pop(name) for name in list(fields) if name in names})
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return GenerationRequest(id=id, prompt=ids, sampling=sampling, max_tokens=max_tokens, **fields)


class Proposing(Drafting):
    """Drafts by a function of reply and limit, all of them verified."""

    def __init__(self, propose: Callable[[Reply, int], Sequence[int]]) -> None:
        super().__init__()
        self._guesses = propose

    def propose(self, replies: Sequence[Reply]) -> list[Sequence[int]]:
        return [
            list(self._guesses(reply, reply.room - 1))[: reply.room - 1]
            if reply.request.draft and reply.room > 1
            else []
            for reply in replies
        ]


@contextmanager
def running(
    model: FakeModel | None = None,
    *,
    drafting: Drafting | None = None,
    eos: Sequence[int] = EOS,
    **settings: Any,
) -> Iterator[Engine]:
    """A started engine; after the test it must be idle, with its thread gone and every page given back."""
    model = model or FakeModel(TOKENIZER.vocab_size + 12)
    engine = Engine(model, TOKENIZER, Settings(**settings), eos, drafting)
    engine.start()
    try:
        yield engine
        assert engine.wait_idle(LIMIT), engine.snapshot()
        assert engine.snapshot().running == engine.snapshot().waiting == engine.snapshot().kv_tokens_used == 0
        assert model.empty
    finally:
        assert engine.stop(LIMIT)


def ask(engine: Engine, wanted: GenerationRequest) -> Receiver:
    receiver = Receiver()
    engine.submit(wanted, receiver)
    return receiver


def alone(wanted: GenerationRequest, **settings: Any) -> Receiver:
    """The reply of an engine that does nothing else, one token a round."""
    with running(**settings) as engine:
        receiver = ask(engine, wanted)
        assert receiver.finished
    return receiver


class Arrivals:
    """Requests that reach the engine at given numbers of forwards: the model's own windows are the clock, so that every
    run of a test is the same. Hand `arrive` to the model as `before`."""

    def __init__(self, due: Sequence[tuple[int, GenerationRequest]]) -> None:
        self._waiting = sorted(due, key=lambda pair: pair[0])
        self._windows = 0
        self._engine: Engine | None = None
        self.receivers: dict[str, Receiver] = {}

    def arrive(self, _: object) -> None:
        while self._waiting and self._waiting[0][0] <= self._windows:
            self._submit_next()
        self._windows += 1

    def run(self, engine: Engine) -> None:
        """Until every request has come and ended."""
        self._engine = engine
        while self._waiting:  # the first request, and after any pause in which nothing ran
            self._submit_next()
            assert engine.wait_idle(LIMIT)

    def _submit_next(self) -> None:
        assert self._engine is not None
        _, wanted = self._waiting.pop(0)
        self.receivers[wanted.id] = ask(self._engine, wanted)
