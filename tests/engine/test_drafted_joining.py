"""1 to 8 streams that join and leave a drafting model at any time: each reply is the one it has alone, undrafted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from harness import LIMIT, Arrivals
from test_drafted_exact import FREE, Outcomes, real_outcomes, real_requests
from test_drafted_ranks import chosen, flat_models

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.settings import Settings

REQUESTS = 32


class Clock:
    """A model whose forwards tell when it is time for the next request. windows: streams of each."""

    def __init__(self, model: Glm53, arrivals: Arrivals) -> None:
        self.windows: list[int] = []
        self._model = model
        self._arrivals = arrivals
        self.tokens_total, self.page_tokens = model.tokens_total, model.page_tokens
        self.open_stream = model.open_stream

    def forward(self, window: Sequence[Rows]) -> object:
        return self.forward_tapped(window, Taps()).logits

    def forward_tapped(self, window: Sequence[Rows], taps: Taps) -> Passed:
        self._arrivals.arrive(None)
        self.windows.append(len(window))
        return self._model.forward_tapped(window, taps)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("drafted_joining")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=16, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def wanted() -> list[GenerationRequest]:
    """Every third with log-probabilities, every fifth ended by a token in the middle."""
    found = []
    for number, one in enumerate(real_requests(REQUESTS)):
        one = replace(one, max_tokens=one.max_tokens + 6)
        if number % 3 == 0:
            one = replace(one, logprobs=number % 4)
        if number % 5 == 0:
            one = replace(one, stop_token_ids=tuple(range(0, 250, 9)))
        found.append(one)
    return found


def alone(model: Glm53, tokenizer: Tokenizer) -> Outcomes:
    return [real_outcomes(model, tokenizer, [one], None, 1)[0][0] for one in wanted()]


def joining(
    model: Glm53, tiny: Checkpoint, kind: str, settings: Settings, parallel: int
) -> tuple[Outcomes, Engine, list[int]]:
    tokenizer, dice = Tokenizer.from_folder(tiny.path), random.Random(parallel)
    arrivals = Arrivals([(dice.randrange(60), one) for one in wanted()])
    clock = Clock(model, arrivals)
    drafter = load_drafter(kind, tiny, model, settings)
    drafting = Drafting(Speculator(drafter, Policy(FREE), copy=True, vocab_size=tokenizer.vocab_size))
    served = Settings(context=256, parallel=parallel, prefill_rows=16, max_queued=REQUESTS)
    engine = Engine(clock, tokenizer, served, [0], drafting)  # type: ignore[arg-type]
    engine.start()
    arrivals.run(engine)
    outcomes = [arrivals.receivers[one.id].outcome() for one in wanted()]
    assert engine.wait_idle(LIMIT) and engine.stop(LIMIT)
    return outcomes, engine, clock.windows


def check(found: tuple[Outcomes, Engine, list[int]], expected: Outcomes, kind: str, parallel: int) -> None:
    outcomes, engine, windows = found
    assert outcomes == expected
    assert max(windows) == parallel and (parallel == 1 or len(set(windows)) > 1), "they came and went"
    counts = engine.snapshot().drafts
    assert kind in {count.source for count in counts}
    assert sum(count.accepted for count in counts) > 3


@pytest.fixture(scope="module")
def model(tiny: Checkpoint) -> Glm53:
    loaded = load_model(tiny, tokens=8192)
    loaded.weights.head.mul_(0.3)
    return loaded


@pytest.fixture(scope="module")
def expected(tiny: Checkpoint, model: Glm53) -> Outcomes:
    return alone(model, Tokenizer.from_folder(tiny.path))


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [("mtp", 1), ("dspark", 2), ("dflash2", 3), ("mtp", 4), ("dspark", 5), ("dflash2", 6), ("mtp", 7), ("dspark", 8)],
)
def test_streams_that_join_and_leave_are_alone(
    kind: str, parallel: int, tiny: Checkpoint, model: Glm53, expected: Outcomes, tmp_path: Path
) -> None:
    settings = replace(chosen(kind, tmp_path, tiny), kv="bf16")
    check(joining(model, tiny, kind, settings, parallel), expected, kind, parallel)


@pytest.mark.parametrize(("kind", "parallel"), [("dspark", 3), ("mtp", 8)])
def test_streams_that_join_and_leave_three_ranks_are_alone(
    kind: str, parallel: int, tiny: Checkpoint, tmp_path: Path
) -> None:
    settings = chosen(kind, tmp_path, tiny)
    with flat_models(tiny, kind, settings, cp=False) as model:
        expected = alone(model, Tokenizer.from_folder(tiny.path))
        check(joining(model, tiny, kind, settings, parallel), expected, kind, parallel)
