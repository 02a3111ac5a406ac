"""Drafters on the GPU: near their reference on a CPU, and replies that are the serial ones token for token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts import choose
from tfglm.drafts.base import Ask, Kept
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_drafter import BlockDrafter
from tfglm.drafts.block_files import expected_shapes
from tfglm.drafts.choose import load_drafter, measured_costs, prepare
from tfglm.drafts.costs import Costs
from tfglm.drafts.mtp import MtpDrafter
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.formats.groups import GROUP, dequantise, quantise
from tfglm.models import glm53_cuda
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.source import CheckpointSource
from tfglm.models.window import Rows
from tfglm.settings import Settings

pytestmark = pytest.mark.gpu

KINDS = ["mtp", "dspark", "dflash2"]
TEXT = torch.randint(0, 280, (60,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, "tiny", seed=3, num_hidden_layers=4, vocab_size=320)
    with Checkpoint.open(path) as opened:
        yield opened


def block_folder(folder: Path, kind: str, config: Any) -> Settings:
    """A random block drafter of the model, and the settings that choose it."""
    qwen = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention"] * 2, "sliding_window": 16,
    }  # fmt: skip
    raw: dict[str, Any] = {
        "speculators_model_type": kind, "transformer_layer_config": qwen, "draft_vocab_size": config.vocab_size,
        "mask_token_id": 300, "aux_hidden_state_layer_ids": [1, 4], "markov_rank": 16, "selector_rank": 16,
        "selector_top_k": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    values = torch.Generator().manual_seed(5)
    tensors = {
        name: (torch.randn(shape, generator=values) * shape[-1] ** -0.5 + (len(shape) == 1)).bfloat16()
        for name, shape in expected_shapes(BlockConfig.from_dict(raw), 2).items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return Settings(drafter=kind, drafter_path=str(folder))


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """BF16 tensors one after the other behind their JSON header."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def settings_for(kind: str, folder: Path, checkpoint: Checkpoint) -> Settings:
    return Settings() if kind == "mtp" else block_folder(folder, kind, checkpoint.config)


def first_rows(drafter: Any, model: Glm53) -> torch.Tensor:
    """What a drafter makes of the text: the MTP layer's logits after it, or a block's rows."""
    stream = model.open_stream()
    context = drafter.open(stream)
    passed = model.forward_tapped([Rows(stream, TEXT[:40], 1)], drafter.taps)
    drafter.read([Kept(context, TEXT[:40], 0)], passed)
    if isinstance(drafter, MtpDrafter):
        return drafter.rows.absorb([Rows(context.stream, [TEXT[40]], 1)], [context.number]).logits.cpu()
    assert isinstance(drafter, BlockDrafter)
    return drafter._fill([context.number], [TEXT[40]])[0][0].float().cpu()


def in_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """What a GPU holds of a block drafter's matrix."""
    return dequantise(quantise(weight, 4)) if weight.shape[1] % GROUP == 0 else weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_near_its_reference(
    kind: str, checkpoint: Checkpoint, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(kind, tmp_path, checkpoint)
    rows = []
    for name in ("cpu", "cuda"):
        model = load_model(checkpoint, tokens=512, device=name)
        with monkeypatch.context() as patched:
            if name == "cpu":
                patched.setattr(choose, "_hold", lambda model: in_four_bits)
            drafter = load_drafter(kind, checkpoint, model, settings)
        rows.append(first_rows(drafter, model))
    want, got = rows
    assert float(((got - want).norm(dim=1) / want.norm(dim=1)).median()) < 0.06


def replies(model: Glm53, tokenizer: Tokenizer, drafting: Drafting | None, parallel: int) -> list[list[int]]:
    engine = Engine(model, tokenizer, Settings(parallel=parallel, prefill_rows=32), [0], drafting)
    tokens: list[list[int]] = []
    ended = threading.Semaphore(0)
    engine.start()
    for number in range(24):
        sampling = SamplingParams(temperature=[0.0, 1.0, 3.0][number % 3], top_p=[1.0, 0.9][number % 2], seed=number)
        prompt = [(number * 31 + i * i) % 250 for i in range(4 + number)]
        own: list[int] = []
        tokens.append(own)

        def on_event(event: Event, own: list[int] = own) -> None:
            if isinstance(event, Delta):
                own.extend(event.token_ids)
            elif isinstance(event, Finished | Failed):
                assert isinstance(event, Finished), event
                ended.release()

        engine.submit(GenerationRequest(f"r{number}", prompt, sampling, 24, ignore_eos=True), on_event)
    for _ in tokens:
        assert ended.acquire(timeout=200)
    assert engine.stop(60)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_replies_are_the_serial_ones(
    kind: str, checkpoint: Checkpoint, device: torch.device, tmp_path: Path
) -> None:
    model = load_model(checkpoint, tokens=8192, device="cuda")
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    drafter = load_drafter(kind, checkpoint, model, settings_for(kind, tmp_path, checkpoint))
    speculator = Speculator(drafter, Policy(Costs((1.0,) * 16)), copy=True, vocab_size=tokenizer.vocab_size)
    drafting = Drafting(speculator)
    assert replies(model, tokenizer, drafting, 4) == replies(model, tokenizer, None, 1)
    assert speculator.on and any(source == kind for source, _ in speculator.slots)


def test_steps_of_the_mtp_layer_from_graphs_are_its_launches(checkpoint: Checkpoint, device: torch.device) -> None:
    """Also when all of them were captured beforehand, and no capture is left to be made later."""
    found = []
    for graphs in (True, False):
        source = CheckpointSource(checkpoint)
        model = glm53_cuda.load(
            checkpoint.config, source, tokens=4096, kv="fp8", dense="bf16", head="bf16", graphs=graphs
        )
        drafter = load_drafter("mtp", checkpoint, model, Settings(kv="fp8"))
        assert drafter is not None
        prepare(model, drafter, 4096)
        if model.graphs is not None:
            assert len(model.graphs) == 2 * 16
        contexts, drafts = [], []
        for number in range(3):
            stream = model.open_stream()
            contexts.append(drafter.open(stream))
            passed = model.forward_tapped([Rows(stream, TEXT[number : number + 30], 1, prompt=True)], drafter.taps)
            drafter.read([Kept(contexts[-1], TEXT[number : number + 30], 0)], passed)
        for some in ([0], [0, 1, 2], [2, 1], [1]):
            asks = [Ask(contexts[n], TEXT[40 + n], 5 - n, best, lambda sure: True, sampled=False) for n in some]
            drafts += [draft.tokens for draft in drafter.propose(asks)]
            window = [Rows(contexts[n].trunk, [TEXT[40 + n], 7], 2) for n in some]
            passed = model.forward_tapped(window, drafter.taps)
            drafter.read([Kept(contexts[n], [TEXT[40 + n], 7], 2 * i) for i, n in enumerate(some)], passed)
        found.append(drafts)
        if model.graphs is not None:
            assert len(model.graphs) == 2 * 16
    assert found[0] == found[1] and all(len(tokens) > 1 for tokens in found[0])


def best(ids: Any, values: Any, ahead: int) -> tuple[int, float]:
    return int(ids[values.argmax()]), 0.5


def test_costs_are_measured(checkpoint: Checkpoint, device: torch.device) -> None:
    model = load_model(checkpoint, tokens=1024, device="cuda")
    drafter = load_drafter("mtp", checkpoint, model, Settings())
    costs = measured_costs(model, drafter, TEXT)
    assert len(costs.verify_ms) == 16 and costs.verify_ms[0] > 0 and costs.first_ms > 0
    print({"verify_ms": costs.verify_ms, "first_ms": costs.first_ms, "next_ms": costs.next_ms})
