"""A drafter that fails in a step of all ranks, on one of them or on all: drafting is off, and every reply is the serial
one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_drafted_exact import FREE, Outcomes, real_outcomes, real_requests
from test_drafted_ranks import KINDS, chosen, drafts, flat_models, following
from threaded_ranks import ThreadGroup, spread

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.block import BlockModel
from tfglm.drafts.choose import load_drafter, sound_costs
from tfglm.drafts.costs import PROMPT
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import RanksError
from tfglm.models.mtp_rows import MtpRows
from tfglm.models.taps import Taps
from tfglm.ops.steps import Exchange, Steps
from tfglm.settings import Settings

REQUESTS = 24
SOUND = 12
"""Steps of a drafter before it fails."""
MEETINGS = {"mtp": 4, "dspark": 6, "dflash2": 6}
"""Of one step: the embedding, two a layer, the logits."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("drafter_faults")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=16, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def serial(tiny: Checkpoint) -> Outcomes:
    with flat_models(tiny, "none", Settings(), cp=False) as model:
        return real_outcomes(model, Tokenizer.from_folder(tiny.path), real_requests(REQUESTS), None, 8)[0]


def served(tiny: Checkpoint, kind: str, settings: Settings, cp: bool = False) -> tuple[Outcomes, Engine, Speculator]:
    tokenizer = Tokenizer.from_folder(tiny.path)
    with flat_models(tiny, kind, settings, cp) as model:
        drafter = load_drafter(kind, tiny, model, settings)
        speculator = Speculator(drafter, Policy(FREE), copy=False, vocab_size=tokenizer.vocab_size)
        outcomes, engine = real_outcomes(model, tokenizer, real_requests(REQUESTS), Drafting(speculator), 5)
    return outcomes, engine, speculator


def fail_at(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[int], meeting: int, sound: int = SOUND) -> None:
    """Have these ranks fail on their way to the given meeting of every step that has it, after `sound` of them."""
    steps: dict[int, int] = {}

    def failing(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(self: Steps, *args: Any) -> torch.Tensor:
            if self._met == meeting and self.rank in ranks:
                steps[self.rank] = steps.get(self.rank, 0) + 1
                if steps[self.rank] > sound:
                    raise RuntimeError(f"rank {self.rank} fell over")
            return own(self, *args)

        return call

    monkeypatch.setattr(Steps, "sum", failing(Steps.sum))
    monkeypatch.setattr(Steps, "concat", failing(Steps.concat))


def check_off(outcome: tuple[Outcomes, Engine, Speculator], serial: Outcomes, records: Sequence[str], own: int) -> None:
    """own: how many of the other ranks failed, each of which says so once."""
    outcomes, engine, speculator = outcome
    assert outcomes == serial
    assert engine.snapshot().drafted_tokens > 0, "it was asked before"
    assert not speculator.on and speculator.taps != Taps(), "windows were captured with them"
    warnings = [record for record in records if record.startswith("W_DRAFTER")]
    assert len([warning for warning in warnings if "drafting is off" in warning]) == 1
    assert len(warnings) == 1 + own, warnings


@pytest.fixture
def served_serially(
    tiny: Checkpoint, serial: Outcomes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Callable[[str, Sequence[int]], None]:
    """Serves with a drafter of a kind that fails on some ranks, and checks that nothing comes of it but the end of
    drafting."""

    def check(kind: str, failing: Sequence[int]) -> None:
        with caplog.at_level(logging.WARNING):
            outcome = served(tiny, kind, chosen(kind, tmp_path, tiny))
        check_off(outcome, serial, [record.getMessage() for record in caplog.records], len(set(failing) - {0}))

    return check


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,), (0, 1, 2)], ids=["leader", "middle", "last", "all"])
@pytest.mark.parametrize(
    ("kind", "meeting"),
    [("mtp", 0), ("mtp", 1), ("mtp", 3), ("dspark", 0), ("dspark", 3), ("dflash2", 4), ("dflash2", 5)],
)
def test_a_failure_on_the_way_to_a_meeting_ends_drafting_alone(
    kind: str,
    meeting: int,
    ranks: tuple[int, ...],
    served_serially: Callable[[str, Sequence[int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_at(monkeypatch, ranks, meeting)
    served_serially(kind, ranks)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("kind", "where"), [("mtp", (MtpRows, "_keep")), ("dspark", (BlockModel, "extend"))])
def test_a_failure_where_nobody_waits_ends_drafting_alone(
    kind: str,
    where: tuple[type, str],
    rank: int,
    served_serially: Callable[[str, Sequence[int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name = where
    own, calls = getattr(owner, name), []

    def failing(self: Any, *args: Any) -> Any:
        steps: Steps = self._steps if isinstance(self, MtpRows) else self.steps
        if steps.rank == rank:
            calls.append(1)
            if len(calls) > SOUND + REQUESTS:
                raise RuntimeError("it fell over")
        return own(self, *args)

    monkeypatch.setattr(owner, name, failing)
    served_serially(kind, [rank])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_drafter_that_fails_while_it_is_timed_is_started_without(
    rank: int, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, (rank,), 2, sound=3)
    with flat_models(tiny, "mtp", Settings(), cp=False) as model:
        drafter, free = load_drafter("mtp", tiny, model, Settings()), model.tokens_free
        prepared: list[tuple[int, Taps]] = []
        monkeypatch.setattr(model, "prepare", lambda rows, window, taps: prepared.append((window, taps)))
        with caplog.at_level(logging.WARNING):
            left, costs = sound_costs(model, drafter, list(range(PROMPT + 20)), 512)
        assert left is None and prepared == [(512, Taps())]
        assert len(costs.verify_ms) == 16 and costs.first_ms == costs.next_ms == 0
        assert model.tokens_free == free
    own = [record.getMessage() for record in caplog.records if "starts without it" in record.getMessage()]
    assert len(own) == 1 and own[0].startswith("W_DRAFTER: mtp failed at its first drafts")


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_meetings_are_those_that_were_foretold(
    kind: str, ranks: int, tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank that fails would give for a whole step has the shapes of what the step itself gives."""
    met: list[list[tuple[int, ...]]] = []
    foretold: list[list[tuple[int, ...]]] = []
    gather, lead, inside = ThreadGroup.gather, Steps.lead, threading.local()

    def shape(exchange: Exchange) -> tuple[int, ...]:
        return exchange.rows, max(exchange.widths) if exchange.widths else exchange.width

    def noting(self: ThreadGroup, part: torch.Tensor) -> torch.Tensor:
        if getattr(inside, "step", False):
            assert part.dtype == torch.float32
            met[-1].append(tuple(part.shape))
        return gather(self, part)

    @contextmanager
    def leading(self: Steps, message: Any, exchanges: Callable[[], Sequence[Exchange]]) -> Iterator[None]:
        met.append([])
        foretold.append([shape(exchange) for exchange in exchanges()])
        with lead(self, message, exchanges):
            inside.step = True
            yield
        inside.step = False

    monkeypatch.setattr(ThreadGroup, "gather", noting)
    monkeypatch.setattr(Steps, "lead", leading)
    settings = chosen(kind, tmp_path, tiny)
    with spread(tiny, ranks, handlers=following(kind, settings), tokens=2048, kv="fp32") as [model, *_]:
        drafts(kind, tiny, model, settings)
    assert met == foretold
    assert any(len(step) == MEETINGS[kind] for step in met)


def test_where_meetings_are_not_foretold_all_ranks_end(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With caches dealt out: at once, and with a line that names rank, step and drafter."""
    fail_at(monkeypatch, (0,), 1)
    told = pytest.raises(RanksError, match=r"rank 0 failed at 'mtp_\w+' of mtp: RuntimeError: rank 0 fell over")
    with flat_models(tiny, "mtp", Settings(), cp=True) as model, told:
        for _ in range(SOUND):
            drafts("mtp", tiny, model, Settings())
