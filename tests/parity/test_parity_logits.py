"""Logits against transformers' GlmMoeDsaForCausalLM: float32, tiny random models, contexts many times index_topk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import BASE, TOLERANCE, Pair, default_pair, make_pair, run_in_chunks, token_ids
from transformers import GlmMoeDsaForCausalLM

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.weights import load_weights
from tfglm.models.window import Rows

LENGTH = 128

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "odd widths": (1, {}),
    "other weights": (2, {}),
    "groups of experts": (3, {"n_group": 4, "topk_group": 2}),
    "groups, one kept": (4, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}),
    "nothing left out": (5, {"index_topk": 2 * LENGTH}),
    "every layer full": (6, {"index_topk_freq": 1, "index_skip_topk_offset": 2}),
    "one full layer": (7, {"indexer_types": ["full"] + ["shared"] * 7, "index_topk": 24}),
    "even widths, two shared experts": (
        8,
        {
            "hidden_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "index_head_dim": 32,
            "n_shared_experts": 2,
            "index_topk": 32,
        },
    ),
    "dense only, one head": (
        9,
        {
            "mlp_layer_types": ["dense"] * 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "index_topk": 8,
        },
    ),
    "weights not normalised": (10, {"norm_topk_prob": False, "routed_scaling_factor": 1.25}),
}


@pytest.fixture(scope="module", params=MODELS)
def model_pair(request: pytest.FixtureRequest) -> Pair:
    seed, changes = MODELS[request.param]
    return make_pair(seed, **changes)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max())


def test_whole_prompt(model_pair: Pair) -> None:
    tokens = token_ids(1, LENGTH)
    expected = model_pair.expected(tokens)
    assert expected.std() > 0.3, "logits too flat to compare anything"
    assert difference(run_in_chunks(model_pair.build(), tokens, LENGTH), expected) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prompt_in_chunks(size: int) -> None:
    pair, tokens = default_pair(), token_ids(2, LENGTH)
    assert difference(run_in_chunks(pair.build(), tokens, size), pair.expected(tokens)) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prompt_in_chunks_with_groups(size: int) -> None:
    pair, tokens = make_pair(11, n_group=4, topk_group=2), token_ids(2, 96)
    assert difference(run_in_chunks(pair.build(), tokens, size), pair.expected(tokens)) <= TOLERANCE


def test_forty_cached_steps(model_pair: Pair) -> None:
    prompt, steps = token_ids(3, LENGTH - 40), token_ids(4, 40)
    model = model_pair.build()
    stream = model.open_stream()
    logits = [model.forward([Rows(stream, prompt, len(prompt))])]
    logits += [model.forward([Rows(stream, [token], 1)]) for token in steps]
    assert difference(torch.cat(logits), model_pair.expected_steps(prompt, steps)) <= TOLERANCE


def test_a_long_context() -> None:
    """Several pages, far past index_topk, at positions where float32 angles are no longer small."""
    pair, tokens = make_pair(12, index_topk=24, num_hidden_layers=5), token_ids(5, 700)
    assert difference(run_in_chunks(pair.build(), tokens, 256), pair.expected(tokens)) <= TOLERANCE


def test_two_streams_in_one_window() -> None:
    pair = default_pair()
    first, second = token_ids(6, 90), token_ids(7, 70)
    model = pair.build()
    a, b = model.open_stream(), model.open_stream()
    model.forward([Rows(a, first[:50], 0)])
    logits = model.forward([Rows(a, first[50:], 40), Rows(b, second, 70)])
    assert difference(logits, torch.cat([pair.expected(first)[50:], pair.expected(second)])) <= TOLERANCE


def test_checkpoint_on_disk(tmp_path: Path) -> None:
    """Reader, loader and forward together, on a synthetic checkpoint that transformers reads by itself."""
    write_checkpoint(tmp_path / "tiny", preset="tiny", seed=3)
    # Weights are BF16 in the file; both sides compute with them in float32.
    theirs = GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path / "tiny", dtype=torch.float32, attn_implementation="eager", ignore_mismatched_sizes=False
    ).eval()
    for name, module in theirs.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = theirs.config.rms_norm_eps  # as published; transformers' default differs
    with Checkpoint.open(tmp_path / "tiny") as checkpoint:
        model = load_model(checkpoint, tokens=256, kv="fp32")
    tokens = token_ids(8, 160, model.config.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    assert difference(run_in_chunks(model, tokens, 48), expected) <= TOLERANCE


def test_bf16_cache_stays_close() -> None:
    """A bf16 cache rounds what is remembered: near the float32 logits, and not equal to them."""
    pair = default_pair()
    tokens = token_ids(9, 14)  # below index_topk, where rounding cannot change which tokens are attended
    assert len(tokens) < BASE["index_topk"]
    model = Glm53(pair.config, load_weights(pair.config, pair.state.__getitem__), tokens=64, kv="bf16")
    logits, expected = run_in_chunks(model, tokens, 5), pair.expected(tokens)
    assert TOLERANCE < difference(logits, expected) < 0.1
