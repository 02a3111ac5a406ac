"""Block drafters after a prompt that resumed: they draft as if they had read it, because they keep their own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LIMIT, ask
from test_drafted_exact import FREE, block_folder
from test_drafted_ranks import following
from threaded_ranks import spread

from tfglm.cache.kept import KeptStates
from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Ask, Draft, Drafter, Kept
from tfglm.drafts.block_drafter import BlockDrafter
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.states import PromptStates
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.settings import Settings

TEXT = torch.randint(0, 290, (4 * PAGE,), generator=torch.Generator().manual_seed(3)).tolist()
LONG = 2 * PAGE + 40
"""Tokens of the prompt; it resumes after two pages."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("resumed")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=16, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def chosen(kind: str, window: int, folder: Path, checkpoint: Checkpoint) -> Settings:
    model = load_model(checkpoint, tokens=PAGE)
    return Settings(
        drafter=kind, drafter_path=block_folder(folder, kind, model, window=window).drafter_path, kv="fp32", parallel=2
    )


class Streams:
    """Streams of one model with a drafter beside it, prompt by prompt."""

    def __init__(self, model: Glm53, drafter: Drafter) -> None:
        self.model, self.drafter = model, drafter

    def draft(
        self, skipped: int, *, prompt: int = LONG, more: int = 0, chunk: int = 200, text: list[int] = TEXT
    ) -> Draft:
        """After a prompt of which the drafter sees all but the first `skipped` rows; then rounds keep `more`."""
        stream, passed = self.model.open_stream(), None
        context = self.drafter.open(stream)
        if skipped:
            self.model.forward([Rows(stream, text[:skipped], 0)])
            for start in range(0, skipped, PAGE):
                self.drafter.skip(context, text[start : start + PAGE])
        for start in range(skipped, prompt, chunk):
            part = text[start : min(start + chunk, prompt)]
            passed = self.model.forward_tapped([Rows(stream, part, 1)], self.drafter.taps)
            self.drafter.read([Kept(context, part, 0)], passed)
        [draft] = self._propose(context, text[prompt])
        for start in range(prompt, prompt + more, 64):
            part = text[start : min(start + 64, prompt + more)]
            passed = self.model.forward_tapped([Rows(stream, part, 1)], self.drafter.taps)
            self.drafter.read([Kept(context, part, 0)], passed)
        self.drafter.close(context)
        stream.close()
        return draft

    def _propose(self, context: Any, pending: int) -> list[Draft]:
        def greedy(ids: Any, values: Any, ahead: int) -> tuple[int, float]:
            return int(ids[values.argmax()]), float(values.max())

        return self.drafter.propose([Ask(context, pending, 9, greedy, lambda confidence: True, sampled=False)])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("kind", "window"), [("dspark", 8), ("dspark", 300), ("dflash2", 2 * PAGE)])
def test_a_resumed_prompt_is_drafted_for_as_one_that_was_read(
    kind: str, window: int, ranks: int, tiny: Checkpoint, tmp_path: Path
) -> None:
    settings = chosen(kind, window, tmp_path, tiny)
    options = {"tokens": 8 * PAGE, "kv": "fp32"}
    with (
        spread(tiny, ranks, handlers=following(kind, settings), **options)
        if ranks > 1
        else nullcontext([load_model(tiny, **options)])
    ) as [model, *_]:
        drafter = load_drafter(kind, tiny, model, settings)
        assert isinstance(drafter, BlockDrafter)
        streams = Streams(model, drafter)
        blind = streams.draft(2 * PAGE)
        read = streams.draft(0, more=2)
        assert streams.draft(2 * PAGE, chunk=30, more=PAGE + 64) == read
        further = 3 * PAGE + 20
        assert streams.draft(3 * PAGE, prompt=further) == streams.draft(0, prompt=further), "a page of the reply's"
        if window > 40:
            assert blind != read, "what was skipped is seen by the block"


def test_rings_of_a_prompt_that_others_pushed_out_are_simply_unknown(tiny: Checkpoint, tmp_path: Path) -> None:
    settings = chosen("dspark", 300, tmp_path, tiny)
    model = load_model(tiny, tokens=8 * PAGE, kv="fp32")
    drafter = load_drafter("dspark", tiny, model, settings)
    assert drafter is not None
    streams = Streams(model, drafter)
    blind = streams.draft(2 * PAGE)
    read = streams.draft(0, more=1)
    assert streams.draft(2 * PAGE) == read != blind
    for first in range(4):  # two streams' rings have as many pages
        streams.draft(0, more=1, text=[first, *TEXT[1:]])
    assert streams.draft(2 * PAGE) == blind


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_replies_after_resumed_prompts_are_the_serial_ones(kind: str, tiny: Checkpoint, tmp_path: Path) -> None:
    settings = chosen(kind, 300, tmp_path, tiny)
    model = load_model(tiny, tokens=12 * PAGE, kv="fp32")
    tokenizer = Tokenizer.from_folder(tiny.path)
    wanted = [
        GenerationRequest(str(n), TEXT[:length], SamplingParams(temperature=n % 2 * 1.0, seed=n), 20, ignore_eos=True)
        for n, length in enumerate([LONG, LONG, 2 * PAGE + 1, LONG + 9, PAGE + 3])
    ]

    def replies(drafting: Drafting | None, kept: KeptStates | None) -> tuple[list[Any], list[int]]:
        engine = Engine(model, tokenizer, settings, [0], drafting, PromptStates(kept) if kept else None)
        engine.start()
        outcomes, cached = [], []
        for one in wanted:
            receiver = ask(engine, one)
            outcomes.append(receiver.outcome()[:-1])
            cached.append(receiver.finished.usage.cached_tokens)
        assert engine.wait_idle(LIMIT) and engine.stop(LIMIT)
        return outcomes, cached

    serial, _ = replies(None, None)
    speculator = Speculator(
        load_drafter(kind, tiny, model, settings), Policy(FREE), copy=True, vocab_size=tokenizer.vocab_size
    )
    drafted, cached = replies(Drafting(speculator), KeptStates(model.cache.pool, 6))
    assert drafted == serial and speculator.on
    assert cached == [0, 2 * PAGE, 2 * PAGE, 2 * PAGE, PAGE]
    assert any(source == kind for source, _ in speculator.slots)
