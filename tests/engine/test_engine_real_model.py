"""The engine over the real model: a tiny synthetic checkpoint, end to end, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LIMIT, Proposing, Receiver, ask, in_order

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.reply import Reply
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.settings import Settings

CONTEXT = 2 * PAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny"
    write_checkpoint(path, "tiny", 3)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Glm53]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with Checkpoint.open(folder) as checkpoint:
        yield load_model(checkpoint, tokens=4 * CONTEXT)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


TEXT = "The engine reads a prompt in chunks and writes the reply token by token. 日本語も読む。 " * 6


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Long and short prompts, some far past the indexer's top-k; greedy and sampled."""
    ids = tokenizer.encode(TEXT)
    kinds = [
        (ids[:250], SamplingParams(temperature=0.0)),
        (ids[:1], SamplingParams(seed=5)),
        (ids[3:120], SamplingParams(top_p=0.9, temperature=0.7)),
        (ids[:37], SamplingParams(seed=9, top_k=40, repetition_penalty=1.2, presence_penalty=0.1)),
    ]
    return [
        GenerationRequest(f"r{n}", prompt, sampling, max_tokens=16, ignore_eos=True, logprobs=2)
        for n, (prompt, sampling) in enumerate(kinds)
    ]


def replies(
    model: Glm53,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    drafting: Drafting | None = None,
    **settings: int,
) -> list[tuple[Any, ...]]:
    """Everything about the replies of requests that are submitted at once. Logprobs are compared bit for bit."""
    free = model.tokens_free
    engine = Engine(model, tokenizer, Settings(context=CONTEXT, **settings), [0], drafting)
    engine.start()
    receivers: list[Receiver] = [ask(engine, one) for one in requests]
    outcomes = [receiver.outcome() for receiver in receivers]
    assert engine.wait_idle(LIMIT) and engine.stop(LIMIT)
    assert model.tokens_free == free and all(in_order(receiver.events) for receiver in receivers)
    return outcomes


@pytest.fixture(scope="module")
def alone(model: Glm53, tokenizer: Tokenizer, requests: list[GenerationRequest]) -> list[tuple[Any, ...]]:
    return [replies(model, tokenizer, [one])[0] for one in requests]


def test_replies_are_text_and_differ(alone: list[tuple[Any, ...]]) -> None:
    assert len({tuple(outcome[0]) for outcome in alone}) == len(alone)
    assert all(outcome[4] == "length" for outcome in alone)


@pytest.mark.parametrize("rows", [16, 100])
def test_the_chunks_of_the_prompt_change_no_bit(
    rows: int, model: Glm53, tokenizer: Tokenizer, requests: list[GenerationRequest], alone: list[tuple[Any, ...]]
) -> None:
    for n in (0, 2):
        assert replies(model, tokenizer, [requests[n]], prefill_rows=rows) == [alone[n]]


@pytest.mark.parametrize(("parallel", "rows"), [(2, 100), (4, 16)])
def test_together_is_alone(
    parallel: int,
    rows: int,
    model: Glm53,
    tokenizer: Tokenizer,
    requests: list[GenerationRequest],
    alone: list[tuple[Any, ...]],
) -> None:
    assert replies(model, tokenizer, requests, parallel=parallel, prefill_rows=rows) == alone


def test_drafts_right_and_wrong_change_no_bit(
    model: Glm53, tokenizer: Tokenizer, requests: list[GenerationRequest], alone: list[tuple[Any, ...]]
) -> None:
    ids = {one.id: outcome[0] for one, outcome in zip(requests, alone, strict=True)}

    def mostly_right(reply: Reply, limit: int) -> Sequence[int]:
        drafts = ids[reply.request.id][len(reply.tokens) :][: min(limit, 5)]
        if len(drafts) > 2:
            drafts[len(reply.tokens) % len(drafts)] = 1
        return drafts

    assert replies(model, tokenizer, requests, drafting=Proposing(mostly_right)) == alone


def test_a_repeated_prompt_reads_the_same_probabilities(model: Glm53, tokenizer: Tokenizer) -> None:
    """prompt_logprobs of a greedy reply put into the prompt are the reply's own logprobs, to the last bit."""
    prompt = tokenizer.encode(TEXT)[:90]
    greedy = SamplingParams(temperature=0.0)
    asked = GenerationRequest("a", prompt, greedy, max_tokens=20, ignore_eos=True, logprobs=3)
    [said] = replies(model, tokenizer, [asked])
    again = GenerationRequest("b", [*prompt, *said[0]], greedy, max_tokens=0, prompt_logprobs=3)
    [read] = replies(model, tokenizer, [again])
    assert list(read[3][0][len(prompt) :]) == said[2]
