"""Whatever drafts, and however wrong, slow or broken it is: every reply is the serial one, to the last bit."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import FakeModel
from harness import LIMIT, TOKENIZER, Arrivals, Receiver, ask, request, running
from safetensors.torch import save_file

from tfglm.cache.pages import Stream
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Ask, Draft, Drafter, Kept
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import expected_shapes
from tfglm.drafts.choose import load_drafter, measured_costs
from tfglm.drafts.costs import TEXT, Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.taps import Passed, Taps
from tfglm.settings import Settings

COLUMNS = TOKENIZER.vocab_size + 12
FREE = Costs((1.0,) * 16)
"""Rows cost nothing, so that the policy verifies whatever is proposed."""

REQUESTS = 300
"""Of the real model, for each way of drafting: drafts are kept by the dozen, and many more refused."""

Outcomes = list[tuple[Any, ...]]


def speculation(drafter: Drafter | None, costs: Costs = FREE, *, copy: bool = False, noise: float = 1.0) -> Drafting:
    vocab_size = TOKENIZER.vocab_size
    return Drafting(Speculator(drafter, Policy(costs), copy=copy, vocab_size=vocab_size), noise)


def random_sampling(dice: random.Random) -> dict[str, Any]:
    """Parameters of every kind, off as often as on."""

    def some(value: Any, off: Any) -> Any:
        return value if dice.random() < 0.4 else off

    return {
        "temperature": dice.choice([0.0, 0.7, 1.0, 1.3, 4.0]),
        "top_k": some(dice.randrange(1, 40), 0),
        "top_p": some(dice.choice([0.5, 0.9, 0.95]), 1.0),
        "min_p": some(dice.choice([0.02, 0.2]), 0.0),
        "repetition_penalty": some(dice.choice([0.9, 1.1, 1.4]), 1.0),
        "frequency_penalty": some(dice.choice([-0.3, 0.4]), 0.0),
        "presence_penalty": some(dice.choice([-0.5, 0.6]), 0.0),
        "logit_bias": some({dice.randrange(200): 4.0, dice.randrange(200): -50.0}, {}),
        "seed": some(dice.randrange(1 << 40), None),
    }


# Drafters that know nothing of the model: they draft for the fake one, whose rows are hashes of all that came before.


class Scripted:
    """Drafts what a function of (tokens read so far, pending token, room) says."""

    name, most, taps, planes = "scripted", 15, Taps(), ()

    def __init__(self, says: Callable[[list[int], int], Sequence[int]]) -> None:
        self._says = says
        self.open_contexts = 0

    def open(self, stream: Stream) -> list[int]:
        self.open_contexts += 1
        return []

    def skip(self, context: list[int], tokens: Sequence[int]) -> None:
        context.extend(tokens)

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        for part in kept:
            part.context.extend(part.tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = []
        for one in asks:
            tokens = tuple(self._says([*one.context, one.pending], one.room))
            drafts.append(Draft(tokens, (0.9,) * len(tokens), self.name))
        return drafts

    def close(self, context: list[int]) -> None:
        self.open_contexts -= 1


def fake_requests(count: int) -> list[GenerationRequest]:
    found = []
    for number in range(count):
        dice = random.Random(number)
        prompt = [dice.randrange(40) for _ in range(dice.randrange(1, 40))]
        fields = random_sampling(dice) | {"ignore_eos": dice.random() < 0.5, "logprobs": dice.choice([None, 0, 2])}
        if dice.random() < 0.3:
            fields["stop"] = (dice.choice(["a", "e", "th", "\n"]),)
        if dice.random() < 0.3:
            fields["min_tokens"] = dice.randrange(10)
        found.append(request(f"r{number}", prompt, dice.randrange(1, 24), **fields))
    return found


def fake_outcomes(wanted: Sequence[GenerationRequest], drafting: Drafting | None, parallel: int) -> Outcomes:
    with running(FakeModel(COLUMNS), drafting=drafting, parallel=parallel) as engine:
        receivers = [ask(engine, one) for one in wanted]
        return [receiver.outcome() for receiver in receivers]


@pytest.fixture(scope="module")
def fakes() -> tuple[list[GenerationRequest], Outcomes]:
    wanted = fake_requests(40)
    return wanted, fake_outcomes(wanted, None, 1)


def says(kind: str, wanted: Sequence[GenerationRequest], serial: Outcomes) -> Callable[[list[int], int], Sequence[int]]:
    whole = [[*one.prompt, *outcome[0]] for one, outcome in zip(wanted, serial, strict=True)]
    dice = random.Random(1)

    def oracle(text: list[int], room: int) -> Sequence[int]:
        found = next((one for one in whole if one[: len(text)] == text), [])
        return found[len(text) :][: min(room, 15)]

    def wrong(text: list[int], room: int) -> Sequence[int]:
        return [(token + 1) % 300 for token in oracle(text, room)]

    def mixed(text: list[int], room: int) -> Sequence[int]:
        return [token if dice.random() < 0.8 else 7 for token in oracle(text, room)]

    def noise(text: list[int], room: int) -> Sequence[int]:
        return [dice.randrange(TOKENIZER.vocab_size) for _ in range(dice.randrange(min(room, 15) + 1))]

    def slow(text: list[int], room: int) -> Sequence[int]:
        time.sleep(0.002)
        return mixed(text, room)

    return {"oracle": oracle, "wrong": wrong, "mixed": mixed, "noise": noise, "slow": slow}[kind]


@pytest.mark.parametrize("kind", ["oracle", "wrong", "mixed", "noise", "slow"])
@pytest.mark.parametrize("copy", [False, True])
def test_no_drafter_changes_a_reply(kind: str, copy: bool, fakes: tuple[list[GenerationRequest], Outcomes]) -> None:
    wanted, serial = fakes
    drafter = Scripted(says(kind, wanted, serial))
    assert fake_outcomes(wanted, speculation(drafter, copy=copy), 8) == serial
    assert drafter.open_contexts == 0


@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_drafted_streams_that_join_at_any_time_are_alone(
    parallel: int, fakes: tuple[list[GenerationRequest], Outcomes]
) -> None:
    wanted, serial = fakes
    dice = random.Random(parallel)
    arrivals = Arrivals([(dice.randrange(15), one) for one in wanted])
    model = FakeModel(COLUMNS, before=arrivals.arrive)
    drafting = speculation(Scripted(says("mixed", wanted, serial)), copy=True)
    with running(model, drafting=drafting, parallel=parallel, prefill_rows=16) as engine:
        arrivals.run(engine)
        assert [arrivals.receivers[one.id].outcome() for one in wanted] == serial
    assert max(len(window) for window in model.windows) >= min(parallel, 3)
    assert any(tokens > 1 for window in model.windows for tokens, want in window if want == tokens)


def boom(*_: object) -> Any:
    raise RuntimeError("the drafter fell over")


BROKEN: dict[str, dict[str, Any]] = {
    "opening": {"open": boom},
    "reading": {"read": boom},
    "proposing": {"propose": boom},
    "closing": {"close": boom},
    "too long": {"propose": lambda asks: [Draft((1,) * 99, (0.5,) * 99, "bad")] * len(asks)},
    "no such token": {"propose": lambda asks: [Draft((COLUMNS + 5,), (0.5,), "bad")] * len(asks)},
    "negative": {"propose": lambda asks: [Draft((-1,), (0.5,), "bad")] * len(asks)},
    "too few answers": {"propose": lambda asks: []},
    "unpaired": {"propose": lambda asks: [Draft((1, 2), (0.5,), "bad")] * len(asks)},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_drafter_turns_drafting_off_and_harms_no_reply(
    how: str, fakes: tuple[list[GenerationRequest], Outcomes], caplog: pytest.LogCaptureFixture
) -> None:
    wanted, serial = fakes
    drafter = Scripted(lambda text, room: [1] * min(room, 3))
    for name, value in BROKEN[how].items():
        setattr(drafter, name, value)
    drafting = speculation(drafter)
    with caplog.at_level(logging.WARNING):
        assert fake_outcomes(wanted, drafting, 4) == serial
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().startswith("W_DRAFTER")]
    assert len(warnings) == 1 and "drafting is off" in warnings[0]


def test_confidences_of_any_kind_are_only_confidences(fakes: tuple[list[GenerationRequest], Outcomes]) -> None:
    wanted, serial = fakes
    values = [float("nan"), float("inf"), -3.0, 0.0, 1.0, 0.5]

    class Odd(Scripted):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            return [
                replace(draft, confidence=tuple((values * 3)[: len(draft.tokens)])) for draft in super().propose(asks)
            ]

    assert fake_outcomes(wanted, speculation(Odd(says("mixed", wanted, serial))), 8) == serial


def test_usage_and_snapshot_count_drafts_by_source_and_slot() -> None:
    wanted = request(max_tokens=30, ignore_eos=True)
    with running() as engine:
        ids = ask(engine, wanted)
        assert ids.finished
    text = [*wanted.prompt, *ids.ids]

    def right_then_wrong(read: list[int], room: int) -> Sequence[int]:
        return [*text[len(read) :][:2], 3][: min(room, 3)]

    with running(drafting=speculation(Scripted(right_then_wrong))) as engine:
        receiver = ask(engine, wanted)
        usage, snapshot = receiver.finished.usage, engine.snapshot()
    assert receiver.ids == ids.ids
    [count] = usage.drafts
    assert (count.source, count.drafted, count.accepted) == ("scripted", usage.drafted_tokens, usage.accepted_tokens)
    assert usage.accepted_tokens == 19 and snapshot.rounds == 10
    slots = {(c.source, c.slot): (c.drafted, c.accepted) for c in snapshot.drafts}
    assert slots == {("scripted", 0): (10, 10), ("scripted", 1): (9, 9), ("scripted", 2): (9, 0)}


# The real model, with the drafters of its checkpoint.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("drafted")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=16, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def model(tiny: Checkpoint, device: str) -> Glm53:
    """With flatter logits than its checkpoint's, so that noise decides much and random drafters are often right."""
    torch.set_num_threads(2)
    loaded = load_model(tiny, tokens=8192, device=device)
    loaded.weights.head.mul_(0.3)
    return loaded


@pytest.fixture(scope="module")
def tokenizer(tiny: Checkpoint) -> Tokenizer:
    return Tokenizer.from_folder(tiny.path)


def block_folder(folder: Path, kind: str, model: Glm53, window: int = 8) -> Settings:
    """A random block drafter of the model, on disk in its published form, and the settings that choose it."""
    layers, hidden = 2, model.config.hidden_size
    qwen = {
        "vocab_size": model.config.vocab_size, "hidden_size": hidden, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": layers, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention"] * layers, "sliding_window": window, "rope_parameters": {"rope_theta": 1e4},
    }  # fmt: skip
    if kind == "dspark":
        config: dict[str, Any] = {
            "speculators_model_type": "dspark", "transformer_layer_config": qwen, "block_size": 5, "mask_token_id": 300,
            "draft_vocab_size": model.config.vocab_size, "aux_hidden_state_layer_ids": [1, 4], "markov_rank": 8,
            "markov_head_type": "rnn",
        }  # fmt: skip
    else:
        inner = {
            "block_size": 5,
            "mask_token_id": 300,
            "selector_rank": 8,
            "selector_top_k": 64,
            "target_layer_ids": [0, 3],
        }
        config = qwen | {"dflash_config": inner}
    (folder / "config.json").write_text(json.dumps(config))
    random_values = torch.Generator().manual_seed(5)
    tensors = {
        name: (torch.randn(shape, generator=random_values) * shape[-1] ** -0.5 + (len(shape) == 1)).bfloat16()
        for name, shape in expected_shapes(BlockConfig.from_dict(config), 2).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return Settings(drafter=kind, drafter_path=str(folder))


def real_requests(count: int) -> list[GenerationRequest]:
    """Prompts that repeat themselves now and then, so that copies have something to say."""
    found = []
    for number in range(count):
        dice = random.Random(1000 + number)
        phrase = [dice.randrange(250) for _ in range(dice.randrange(2, 12))]
        prompt = (phrase * 4)[: dice.randrange(3, 30)]
        sampling = SamplingParams(**random_sampling(dice))
        fields: dict[str, Any] = {"logprobs": 1} if number % 7 == 0 else {}
        if number % 11 == 0:
            fields["stop"] = ("e",)
        found.append(
            GenerationRequest(
                f"r{number}", prompt, sampling, dice.randrange(1, 14), ignore_eos=dice.random() < 0.5, **fields
            )
        )
    return found


def real_outcomes(
    model: Glm53, tokenizer: Tokenizer, wanted: Sequence[GenerationRequest], drafting: Drafting | None, parallel: int
) -> tuple[Outcomes, Engine]:
    free = model.tokens_free
    settings = Settings(context=256, parallel=parallel, prefill_rows=16, max_queued=len(wanted))
    engine = Engine(model, tokenizer, settings, [0], drafting)
    engine.start()
    receivers: list[Receiver] = [ask(engine, one) for one in wanted]
    outcomes = [receiver.outcome() for receiver in receivers]
    assert engine.wait_idle(LIMIT) and engine.stop(LIMIT)
    assert model.tokens_free == free
    return outcomes, engine


@pytest.fixture(scope="module")
def serial(model: Glm53, tokenizer: Tokenizer) -> Outcomes:
    return real_outcomes(model, tokenizer, real_requests(REQUESTS), None, 8)[0]


def test_the_serial_replies_are_those_of_each_request_alone(
    model: Glm53, tokenizer: Tokenizer, serial: Outcomes
) -> None:
    for number in range(0, REQUESTS, 9):
        assert real_outcomes(model, tokenizer, [real_requests(REQUESTS)[number]], None, 1)[0] == [serial[number]]


@pytest.mark.parametrize(
    ("kind", "copy", "parallel"), [("mtp", False, 8), ("mtp", True, 5), ("dspark", True, 8), ("dflash2", False, 4)]
)
def test_random_requests_drafted_are_serial(
    kind: str,
    copy: bool,
    parallel: int,
    tiny: Checkpoint,
    model: Glm53,
    tokenizer: Tokenizer,
    serial: Outcomes,
    tmp_path: Path,
) -> None:
    settings = Settings() if kind == "mtp" else block_folder(tmp_path, kind, model)
    drafter = load_drafter(kind, tiny, model, settings)
    drafting = Drafting(Speculator(drafter, Policy(FREE), copy=copy, vocab_size=tokenizer.vocab_size))
    outcomes, engine = real_outcomes(model, tokenizer, real_requests(REQUESTS), drafting, parallel)
    assert outcomes == serial
    counts = engine.snapshot().drafts
    assert sum(count.accepted for count in counts) > 15
    assert kind in {count.source for count in counts}
    assert not copy or any(count.source.startswith("copy") and count.accepted for count in counts)


def test_costs_are_measured_on_the_model_and_do_not_fall(tiny: Checkpoint, model: Glm53, tokenizer: Tokenizer) -> None:
    free = model.tokens_free
    drafter = load_drafter("mtp", tiny, model, Settings())
    costs = measured_costs(model, drafter, tokenizer.encode(TEXT))
    assert len(costs.verify_ms) == 16 and list(costs.verify_ms) == sorted(costs.verify_ms)
    assert costs.verify_ms[0] > 0 and costs.first_ms > 0 and costs.next_ms >= 0
    assert model.tokens_free == free
    assert np.isfinite(measured_costs(model, None, [1, 2, 3]).verify_ms).all()
