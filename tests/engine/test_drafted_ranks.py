"""Drafting over ranks: every rank does its part of the drafter, and every reply is still the serial one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from test_drafted_exact import FREE, block_folder, real_outcomes, real_requests
from threaded_ranks import spread

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.drafting import Drafting
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53, load_model
from tfglm.models.window import Rows
from tfglm.ops.group import Message
from tfglm.settings import Settings

REQUESTS = 40
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


@pytest.mark.parametrize(("kind", "cp"), [("mtp", False), ("dspark", False), ("dflash2", False), ("mtp", True)])
def test_random_requests_drafted_on_three_ranks_are_serial(
    kind: str, cp: bool, tiny: Checkpoint, tmp_path: Path
) -> None:
    settings, wanted = chosen(kind, tmp_path, tiny), real_requests(REQUESTS)
    tokenizer = Tokenizer.from_folder(tiny.path)
    with spread(tiny, 3, handlers=following(kind, settings), tokens=8192, cp=cp) as models:
        for model in models:
            model.weights.head.mul_(0.3)  # flatter logits: noise decides much, and random drafters are often right
        serial, _ = real_outcomes(models[0], tokenizer, wanted, None, 8)
        drafter = load_drafter(kind, tiny, models[0], settings)
        drafting = Drafting(Speculator(drafter, Policy(FREE), copy=True, vocab_size=tokenizer.vocab_size))
        drafted, engine = real_outcomes(models[0], tokenizer, wanted, drafting, 5)
    assert drafted == serial
    counts = engine.snapshot().drafts
    assert kind in {count.source for count in counts}
    assert sum(count.accepted for count in counts) > 5
