"""Drafting over ranks: every rank does its part of the drafter, and every reply is still the serial one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_drafted_exact import FREE, Outcomes, Scripted, block_folder, real_outcomes, real_requests
from threaded_ranks import spread

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.ops.group import Message
from tfglm.settings import Settings

REQUESTS = 300
KINDS = ["mtp", "dspark", "dflash2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("drafted_ranks")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=16, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def chosen(kind: str, folder: Path, checkpoint: Checkpoint) -> Settings:
    if kind == "mtp":
        return Settings(kv="fp32")
    own = folder / kind
    own.mkdir(exist_ok=True)
    model = load_model(checkpoint, tokens=256)
    return Settings(drafter=kind, drafter_path=block_folder(own, kind, model).drafter_path, kv="fp32")


def following(kind: str, settings: Settings) -> Callable[[Checkpoint, Glm53], Mapping[str, Callable[[Message], None]]]:
    def handlers(checkpoint: Checkpoint, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        drafter = load_drafter(kind, checkpoint, model, settings)
        assert drafter is not None
        return drafter.handlers(model)

    return handlers


def drafts(kind: str, checkpoint: Checkpoint, model: Glm53, settings: Settings) -> list[Draft]:
    """Of two streams of different lengths in one window, after a prompt in chunks, and again after a round."""
    drafter = load_drafter(kind, checkpoint, model, settings)
    assert drafter is not None
    texts = [torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 23)]
    streams = [model.open_stream() for _ in texts]
    contexts = [drafter.open(stream) for stream in streams]
    found = []

    def greedy(ids: object, values: torch.Tensor, ahead: int) -> tuple[int, float]:
        return int(ids[values.argmax()]), 0.5  # type: ignore[index]

    def propose() -> list[Draft]:
        return drafter.propose(
            [Ask(c, 9 + n, 4, greedy, lambda confidence: True, sampled=False) for n, c in enumerate(contexts)]
        )

    for stream, context, text in zip(streams, contexts, texts, strict=True):
        for start in range(0, len(text), 40):
            part = text[start : start + 40]
            passed = model.forward_tapped([Rows(stream, part, 1)], drafter.taps)
            drafter.read([Kept(context, part, 0)], passed)
    found += propose()
    passed = model.forward_tapped([Rows(stream, [9 + n, 5, 6], 3) for n, stream in enumerate(streams)], drafter.taps)
    for stream in streams:
        stream.truncate(stream.length - 1)
    drafter.read([Kept(context, [9 + n, 5], 3 * n) for n, context in enumerate(contexts)], passed)
    found += propose()
    for stream, context in zip(streams, contexts, strict=True):
        drafter.close(context)
        stream.close()
    return found


@pytest.mark.parametrize("cp", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_ranks_are_those_of_one(kind: str, ranks: int, cp: bool, tiny: Checkpoint, tmp_path: Path) -> None:
    """Sums differ in their last bits; the best tokens of these models lie further apart than that."""
    settings = chosen(kind, tmp_path, tiny)
    expected = drafts(kind, tiny, load_model(tiny, tokens=2048, kv="fp32"), settings)
    options = {"tokens": 2048, "kv": "fp32", "cp": cp}
    with spread(tiny, ranks, handlers=following(kind, settings), **options) as [model, *_]:
        found = drafts(kind, tiny, model, settings)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.confidence == pytest.approx(other.confidence, abs=1e-5)
    assert len({draft.tokens for draft in expected}) > 1


@contextmanager
def flat_models(tiny: Checkpoint, kind: str, settings: Settings, cp: bool, device: str = "cpu") -> Iterator[Glm53]:
    """Rank 0's of three, with flat logits: noise decides much, and random drafters are often right."""
    handlers = following(kind, settings) if kind != "none" else None
    with spread(tiny, 3, handlers=handlers, tokens=8192, cp=cp, device=device) as models:
        for model in models:
            model.weights.head.mul_(0.3)
        yield models[0]


@pytest.fixture(scope="module")
def serial(tiny: Checkpoint, device: str) -> Outcomes:
    """The replies of three ranks to REQUESTS requests without drafts."""
    with flat_models(tiny, "none", Settings(), False, device) as model:
        return real_outcomes(model, Tokenizer.from_folder(tiny.path), real_requests(REQUESTS), None, 8)[0]


def drafted_on_three(
    kind: str, settings: Settings, wanted: Sequence[GenerationRequest], tiny: Checkpoint, cp: bool, device: str
) -> tuple[Outcomes, Engine]:
    """With copies too."""
    tokenizer = Tokenizer.from_folder(tiny.path)
    with flat_models(tiny, kind, settings, cp, device) as model:
        drafter = load_drafter(kind, tiny, model, settings)
        drafting = Drafting(Speculator(drafter, Policy(FREE), copy=True, vocab_size=tokenizer.vocab_size))
        return real_outcomes(model, tokenizer, wanted, drafting, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_drafted_on_three_ranks_are_serial(
    kind: str, tiny: Checkpoint, device: str, tmp_path: Path, serial: Outcomes
) -> None:
    """Each drafter has its third of the requests. Every seventh asks for logprobs, every eleventh has a stop string;
    outcomes hold both, and how many tokens were counted. What was verified and kept adds up over sources and slots."""
    part = slice(KINDS.index(kind), None, len(KINDS))
    settings = chosen(kind, tmp_path, tiny)
    drafted, engine = drafted_on_three(kind, settings, real_requests(REQUESTS)[part], tiny, False, device)
    assert drafted == serial[part]
    snapshot = engine.snapshot()
    counts = {(one.source, one.slot): one for one in snapshot.drafts}
    sources = {source for source, _ in counts}
    assert kind in sources and any(source.startswith("copy") for source in sources)
    assert 5 < snapshot.accepted_tokens == sum(one.accepted for one in counts.values())
    assert snapshot.drafted_tokens == sum(one.drafted for one in counts.values())
    for (source, slot), one in counts.items():
        assert slot == 0 or one.drafted <= counts[source, slot - 1].drafted


def test_random_requests_drafted_with_caches_cut_by_context_are_serial(tiny: Checkpoint, device: str) -> None:
    wanted = real_requests(40)
    with flat_models(tiny, "none", Settings(), True, device) as model:
        serial, _ = real_outcomes(model, Tokenizer.from_folder(tiny.path), wanted, None, 8)
    drafted, engine = drafted_on_three("mtp", Settings(kv="fp32"), wanted, tiny, True, device)
    assert drafted == serial
    assert engine.snapshot().accepted_tokens > 5


def test_an_end_within_a_drafted_round_of_ranks_counts_its_tokens_once(tiny: Checkpoint) -> None:
    """Stop tokens and stop strings in the middle of what an oracle drafts, beside logprobs."""
    tokenizer, dice = Tokenizer.from_folder(tiny.path), random.Random(8)
    prompts = [[dice.randrange(250) for _ in range(9)] for _ in range(8)]
    endless = [
        GenerationRequest(str(n), prompt, SamplingParams(seed=n), 40, ignore_eos=True, logprobs=2)
        for n, prompt in enumerate(prompts)
    ]
    with flat_models(tiny, "none", Settings(), False) as model:
        replies = [outcome[0] for outcome in real_outcomes(model, tokenizer, endless, None, 8)[0]]
        texts = [[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)]
        ended = [
            replace(one, stop_token_ids=(reply[20],)) if n % 2 else replace(one, stop=("e", "a", " "))
            for n, (one, reply) in enumerate(zip(endless, replies, strict=True))
        ]

        def oracle(text: list[int], room: int) -> list[int]:
            whole = next(one for one in texts if one[: len(text)] == text)
            return whole[len(text) :][: min(room, 15)]

        serial, _ = real_outcomes(model, tokenizer, ended, None, 8)
        drafting = Drafting(Speculator(Scripted(oracle), Policy(FREE), copy=False, vocab_size=tokenizer.vocab_size))
        drafted, engine = real_outcomes(model, tokenizer, ended, drafting, 1)
    assert drafted == serial
    lengths = [len(outcome[0]) for outcome in drafted]
    assert [outcome[-1].completion_tokens for outcome in drafted] == lengths
    assert all(len(outcome[2]) == length for outcome, length in zip(drafted, lengths, strict=True)), "logprobs"
    early = [length for length, outcome in zip(lengths, drafted, strict=True) if outcome[4] == "stop"]
    assert len(early) >= 5 and any(length % 16 for length in early)
    assert engine.snapshot().rounds < sum(lengths) / 3
