"""Whole replies of an engine on the GPU: after restarts, from graphs and launches, on kept prompts."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.engine import Engine
from tfglm.engine.keep import prompt_states
from tfglm.engine.model import Drawing
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models import glm53_cuda
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.source import CheckpointSource
from tfglm.settings import Settings

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, "tiny", seed=5, expert_bits=2.75)
    with Checkpoint.open(path) as opened:
        yield opened


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 1400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def replies(
    model: Glm53, checkpoint: Checkpoint, asked: Sequence[GenerationRequest], *, kept_pages: int = 0, chunk: int = 100
) -> tuple[list[list[int]], list[int]]:
    """Tokens of each reply, and how many of each prompt were resumed; one after another where pages are kept."""
    settings = Settings(prefill_rows=chunk, device="cuda", max_queued=len(asked))
    states = prompt_states(checkpoint.path, model, kept_pages, settings)
    engine = Engine(model, Tokenizer.from_folder(checkpoint.path), settings, [0], states=states)
    engine.start()
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    cached: dict[str, int] = {}
    ended = threading.Semaphore(0)

    def on_event(event: Event, name: str) -> None:
        if isinstance(event, Delta):
            tokens[name].extend(event.token_ids)
        elif isinstance(event, Finished | Failed):
            assert isinstance(event, Finished), event
            cached[name] = event.usage.cached_tokens
            ended.release()

    for number, request in enumerate(asked, 1):
        engine.submit(request, partial(on_event, name=request.id))
        if kept_pages or number == len(asked):
            for _ in range(1 if kept_pages else len(asked)):
                assert ended.acquire(timeout=120)
    assert engine.stop(60)
    states.drop(kept_pages)
    return [tokens[request.id] for request in asked], [cached[request.id] for request in asked]


def test_a_resumed_prompt_gives_the_reply_of_a_fresh_one(checkpoint: Checkpoint, device: torch.device) -> None:
    """With EXL3 experts, whose prompts and replies sum in different orders: turns of a talk, the same prompt again, a
    prompt that leaves another in a page's middle."""
    model = load_model(checkpoint, tokens=24 * PAGE, device="cuda")
    sampling = SamplingParams(temperature=1.0, seed=4)
    first = GenerationRequest("a", text(2 * PAGE + 40, 1), sampling, 2 * PAGE, ignore_eos=True)
    [[said], _] = replies(model, checkpoint, [first])
    turn = GenerationRequest("b", [*first.prompt, *said, *text(30, 2)], GREEDY, 40, ignore_eos=True)
    side = GenerationRequest("c", [*first.prompt[: PAGE + 9], *text(300, 3)], sampling, 40, ignore_eos=True)
    talk = [first, turn, replace(turn, id="again"), side]
    fresh, cached = replies(model, checkpoint, talk)
    assert cached == [0] * 4
    for chunk in (64, 100, 400):
        resumed, cached = replies(model, checkpoint, talk, kept_pages=12, chunk=chunk)
        assert cached == [0, 2 * PAGE, 4 * PAGE, PAGE]
        assert resumed == fresh, chunk
    assert model.tokens_free == model.tokens_total


def test_graphs_give_the_replies_of_launches(checkpoint: Checkpoint, device: torch.device) -> None:
    asked = [
        GenerationRequest(f"r{n}", text(5 + 30 * n, n), SamplingParams(temperature=n % 2, seed=n), 60, ignore_eos=True)
        for n in range(6)
    ]
    found = []
    for graphs in (True, False):
        model = glm53_cuda.load(
            checkpoint.config,
            CheckpointSource(checkpoint),
            tokens=4096,
            kv="fp8",
            dense="q8",
            head="bf16",
            graphs=graphs,
        )
        found.append(replies(model, checkpoint, asked)[0])
    assert found[0] == found[1]


def test_tokens_drawn_on_the_gpu_are_the_sampler_s(checkpoint: Checkpoint, device: torch.device) -> None:
    """300 requests with all that a Draw says, some that need the sampler among them, beside each other and alone."""
    dice = random.Random(1)
    asked = []
    for number in range(300):
        sampling = SamplingParams(
            temperature=dice.choice([0.0, 0.3, 1.0, 2.5]),
            top_p=dice.choice([1.0, 0.95, 0.5]),
            top_k=dice.choice([0, 1, 40, 1000]),
            min_p=dice.choice([0.0, 0.0, 0.02]),
            presence_penalty=dice.choice([0.0, 0.0, 0.0, 0.5]),
            seed=dice.randrange(1 << 40),
        )
        prompt = text(dice.randrange(1, 60), number)
        asked.append(GenerationRequest(f"r{number}", prompt, sampling, dice.randrange(1, 24), ignore_eos=True))
    model = load_model(checkpoint, tokens=16 * PAGE, device="cuda")
    assert isinstance(model, Drawing)
    got, _ = replies(model, checkpoint, asked)

    class HandsOut:
        """The same model as one that only gives logits."""

        def __getattr__(self, name: str) -> Any:
            if name == "forward_drawn":
                raise AttributeError(name)
            return getattr(model, name)

    assert not isinstance(HandsOut(), Drawing)
    want, _ = replies(HandsOut(), checkpoint, asked)  # type: ignore[arg-type]
    assert got == want
    assert sum(map(len, got)) == sum(request.max_tokens for request in asked)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2]).parent))
from test_cuda_replies import restarted
print("reply", restarted(Path(sys.argv[1])))
"""


def restarted(path: Path) -> str:
    """Digest of greedy replies, and how many kernels were compiled for them."""
    from tfglm.ops import nvrtc

    built = []
    compile_ = nvrtc._nvrtc
    nvrtc._nvrtc = lambda *args: built.append(1) or compile_(*args)  # type: ignore[func-returns-value]
    with Checkpoint.open(path) as opened:
        model = load_model(opened, tokens=4096, device="cuda")
        asked = [GenerationRequest(f"r{n}", text(20 + 90 * n, n), GREEDY, 100, ignore_eos=True) for n in range(3)]
        tokens, _ = replies(model, opened, asked)
    return f"{hashlib.sha256(repr(tokens).encode()).hexdigest()} {len(built)}"


def test_five_starts_give_one_reply_and_only_the_first_compiles(
    checkpoint: Checkpoint, device: torch.device, tmp_path: Path
) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint.path), __file__]
    found = []
    for _ in range(5):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stdout.splitlines() if line.startswith("reply")]
        found.append(line.split()[1:])
    assert len({digest for digest, _ in found}) == 1
    assert int(found[0][1]) > 5
    assert [built for _, built in found[1:]] == ["0"] * 4
