"""Resumed prompts over the real model, with its MTP layer drafting: the replies of a fresh engine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LIMIT, Receiver, ask

from tfglm.cache.kept import KeptStates
from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.costs import Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.keep import prompt_states
from tfglm.engine.states import PromptStates
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import ConfigError
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.settings import Settings

TEXT = "A system prompt is read once and kept; whoever begins alike goes on from there. 日本語も同じ。 " * 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("kept") / "tiny"
    write_checkpoint(path, "tiny", 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with Checkpoint.open(path) as opened:
        yield opened
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Glm53:
    return load_model(checkpoint, tokens=20 * PAGE)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint.path)


def engine_over(
    model: Glm53, tokenizer: Tokenizer, kept: KeptStates | None, drafting: Drafting | None = None
) -> Engine:
    states = PromptStates(kept) if kept else None
    engine = Engine(model, tokenizer, Settings(context=4 * PAGE, parallel=2), [0], drafting, states)
    engine.start()
    return engine


def reply(engine: Engine, wanted: GenerationRequest) -> Receiver:
    receiver = ask(engine, wanted)
    assert receiver.finished
    return receiver


def end(engine: Engine) -> None:
    assert engine.wait_idle(LIMIT) and engine.stop(LIMIT)


def outcome(receiver: Receiver) -> tuple[object, ...]:
    *rest, usage = receiver.outcome()
    return *rest, replace(usage, cached_tokens=0)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_resumed_prompt_gives_the_reply_of_a_fresh_one(
    drafted: bool, checkpoint: Checkpoint, model: Glm53, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    system = ids[: PAGE + 40]
    wanted = [
        GenerationRequest("a", ids[: 2 * PAGE + 1], SamplingParams(seed=1), max_tokens=12, logprobs=2),
        GenerationRequest("b", [*system, *ids[7:90]], SamplingParams(temperature=0.0), max_tokens=12, logprobs=2),
        GenerationRequest("c", [*system, *ids[100:130]], SamplingParams(seed=2), max_tokens=12, logprobs=2),
        GenerationRequest("d", ids[: 2 * PAGE], SamplingParams(temperature=0.0), max_tokens=12, logprobs=2),
    ]
    alone = []
    for one in wanted:
        engine = engine_over(model, tokenizer, None)
        alone.append(reply(engine, one))
        end(engine)
    drafting = None
    if drafted:
        drafter = load_drafter("mtp", checkpoint, model, Settings())
        policy = Policy(Costs((1.0,) * 16))
        drafting = Drafting(Speculator(drafter, policy, copy=True, vocab_size=tokenizer.vocab_size))
    kept = KeptStates(model.cache.pool, 8)
    engine = engine_over(model, tokenizer, kept, drafting)
    resumed = [reply(engine, one) for one in wanted]
    assert drafting is None or sum(one.finished.usage.drafted_tokens for one in resumed) > 0
    end(engine)
    assert [one.finished.usage.cached_tokens for one in resumed] == [0, PAGE, PAGE, PAGE]
    assert [outcome(one) for one in resumed] == [outcome(one) for one in alone]
    kept.drop(8)
    assert model.tokens_free == model.tokens_total


def test_the_disk_has_its_states_from_memory(checkpoint: Checkpoint, model: Glm53, tmp_path: Path) -> None:
    settings = Settings(disk_cache=str(tmp_path), kept_gib=0.0, disk_keep_free_gib=0.0)
    with pytest.raises(ConfigError, match=r"--kept-gib 0\.0, which holds no page of 0\.3 MiB"):
        prompt_states(checkpoint.path, model, 0, settings)
    assert prompt_states(checkpoint.path, model, 0, Settings(kept_gib=0.0)).pages == 0


def test_other_settings_do_not_find_each_others_pages(checkpoint: Checkpoint, model: Glm53, tmp_path: Path) -> None:
    """The same folder under another number of threads: nothing resumes. Under the same one everything does."""
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    wanted = GenerationRequest("a", tokenizer.encode(TEXT)[: PAGE + 9], SamplingParams(seed=1), max_tokens=2)
    settings = Settings(context=4 * PAGE, disk_cache=str(tmp_path), disk_keep_free_gib=0.0)
    cached = []
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        states = prompt_states(checkpoint.path, model, 4, settings)
        torch.set_num_threads(2)
        engine = Engine(model, tokenizer, settings, [0], states=states)
        engine.start()
        cached.append(reply(engine, wanted).finished.usage.cached_tokens)
        end(engine)
        states.drop(4)
    assert cached == [0, 0, PAGE]


@pytest.mark.parametrize("alike", [True, False])
def test_rows_of_replies_are_kept_where_they_have_the_bits_of_a_prompt_s(
    checkpoint: Checkpoint, model: Glm53, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    monkeypatch.setattr(Glm53, "decodes_alike", alike)
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    states = prompt_states(checkpoint.path, model, 4, Settings())
    engine = Engine(model, tokenizer, Settings(context=4 * PAGE), [0], states=states)
    engine.start()
    prompt = tokenizer.encode(TEXT)[: 2 * PAGE - 9]
    reply(engine, GenerationRequest("a", prompt, SamplingParams(seed=1), max_tokens=12, ignore_eos=True))
    end(engine)
    assert states.pages == 1 + alike
    states.drop(4)


@pytest.mark.parametrize("first", [{"max_tokens": 1}, {"max_tokens": 4, "draft": False}])
def test_pages_from_a_disk_bring_the_mtp_layer_s_rows_whoever_had_them_read(
    first: dict[str, Any], checkpoint: Checkpoint, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Also a request that drafts nothing, such as one that only warms the cache up: the next one's drafts are those of
    a prompt that was read."""
    prompt = tokenizer.encode(TEXT)[: 2 * PAGE + 9]
    again = GenerationRequest("b", prompt, SamplingParams(temperature=0.0), max_tokens=12, ignore_eos=True)
    settings = Settings(context=4 * PAGE, disk_cache=str(tmp_path), disk_keep_free_gib=0.0)
    drafted: list[list[tuple[int, ...]]] = []
    cached = []
    for wanted, states_on in ((again, False), (replace(again, **first), True), (again, True)):
        model = load_model(checkpoint, tokens=8 * PAGE)
        drafter = load_drafter("mtp", checkpoint, model, settings)
        assert drafter is not None
        propose, seen = drafter.propose, []
        drafter.propose = lambda asks, propose=propose, seen=seen: [  # type: ignore[method-assign]
            seen.append(draft.tokens) or draft for draft in propose(asks)
        ]
        speculator = Speculator(drafter, Policy(Costs((1.0,) * 16)), copy=False, vocab_size=tokenizer.vocab_size)
        drafting = Drafting(speculator)
        states = prompt_states(checkpoint.path, model, 4, settings, drafting.planes) if states_on else None
        engine = Engine(model, tokenizer, settings, [0], drafting, states)
        engine.start()
        cached.append(reply(engine, wanted).finished.usage.cached_tokens)
        end(engine)
        drafted.append(seen)
    assert cached == [0, 0, 2 * PAGE]
    assert drafted[1] == []
    assert drafted[2] == drafted[0] != []


def test_pages_that_a_failed_drafter_has_not_read_stay_off_the_disk(
    checkpoint: Checkpoint, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had read before is there for the next start, and so is memory for this one."""
    prompt = tokenizer.encode(TEXT)[: 2 * PAGE + 9]
    first, second = (
        GenerationRequest(str(n), tokens, SamplingParams(temperature=0.0), max_tokens=4, ignore_eos=True)
        for n, tokens in enumerate((prompt, prompt[9:]))
    )
    settings = Settings(context=4 * PAGE, disk_cache=str(tmp_path), disk_keep_free_gib=0.0)
    cached = []
    for fails in (True, False):
        model = load_model(checkpoint, tokens=8 * PAGE)
        drafter = load_drafter("mtp", checkpoint, model, settings)
        assert drafter is not None
        speculator = Speculator(drafter, Policy(Costs((1.0,) * 16)), copy=False, vocab_size=tokenizer.vocab_size)
        drafting = Drafting(speculator)
        states = prompt_states(checkpoint.path, model, 6, settings, drafting.planes)
        engine = Engine(model, tokenizer, settings, [0], drafting, states)
        engine.start()
        replies = [reply(engine, first)]
        if fails:
            monkeypatch.setattr(drafter, "read", lambda *_: 1 // 0)
        replies += [reply(engine, second), reply(engine, second)]
        end(engine)
        assert speculator.on is not fails
        cached.append([one.finished.usage.cached_tokens for one in replies])
    assert cached == [[0, 0, PAGE], [2 * PAGE, 0, PAGE]]


def test_a_disk_too_full_to_keep_anything_is_told_at_once(
    checkpoint: Checkpoint, model: Glm53, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt_states(checkpoint.path, model, 4, Settings(disk_cache=str(tmp_path), disk_keep_free_gib=65536.0))
    assert "--disk-keep-free-gib is 65536.0: nothing new is stored there" in caplog.text


def test_what_three_ranks_left_makes_room_for_one(checkpoint: Checkpoint, model: Glm53, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    left = tmp_path / "rank1of3" / f"{'0' * 64}-{'0' * 32}.page"
    left.parent.mkdir()
    with left.open("wb") as file:
        file.truncate(1 << 30)
    settings = Settings(context=4 * PAGE, disk_cache=str(tmp_path), disk_cache_gib=1.0, disk_keep_free_gib=0.0)
    states = prompt_states(checkpoint.path, model, 4, settings)
    engine = Engine(model, tokenizer, settings, [0], states=states)
    engine.start()
    reply(engine, GenerationRequest("a", tokenizer.encode(TEXT)[: PAGE + 9], SamplingParams(seed=1), max_tokens=1))
    end(engine)
    states.drop(4)
    assert not left.exists() and len(list(tmp_path.glob("rank0of1/*.page"))) == 1
