"""Synthetic checkpoints and transformers: each side opens what the other wrote."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM, PreTrainedTokenizerFast

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import CheckpointError

PROMPT = "The river is easier to read from a bridge, and 12345 people know what they have learned. "


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> GlmMoeDsaForCausalLM:
    return GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(model: GlmMoeDsaForCausalLM, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def test_every_tensor_but_the_mtp_layer_is_taken(folder: Path) -> None:
    _, info = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {re.match(r"model\.layers\.(\d+)\.", key).group(1) for key in info["unexpected_keys"]} == {"8"}


def test_tokenizer_and_template_load(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == config["vocab_size"] - 24
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == config["eos_token_id"][0]
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert tokenizer.convert_tokens_to_ids(names) == config["eos_token_id"]
    text = "Grüße, 你好 🚀: def f(x): return 12345"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    shown = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert shown.startswith("[gMASK]<sop><|system|>Reasoning Effort: Max<|system|>\n# Tools")
    assert '\n{"name": "f", "description": "<ü>"}\n' in shown
    assert shown.endswith("</tool_call><|user|>hi<|assistant|><think>")


def test_logits_are_alive(folder: Path, model: GlmMoeDsaForCausalLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT * 3).input_ids
    assert len(ids) > 2 * model.config.index_topk
    first = logits(model, ids)
    spread = first.std(-1)
    assert 2 < spread.min() < spread.max() < 4
    assert first.argmax(-1).unique().numel() > 0.5 * len(ids)
    other = logits(model, list(reversed(ids)))
    assert (first[-1] - other[-1]).abs().max() > 1
    # The last position feels the first token, through selections of less than half the prompt.
    changed = logits(model, [(ids[0] + 1) % 1000, *ids[1:]])
    assert (first[-1] - changed[-1]).abs().max() > 0.01


def test_every_kind_of_tensor_shows_in_the_logits(model: GlmMoeDsaForCausalLM) -> None:
    """Comparing logits finds a forgotten, swapped or misplaced tensor. Layer 6 has every kind but a dense MLP."""
    ids = torch.arange(70).mul(37).remainder(1400).tolist()
    before = logits(model, ids)
    unseen = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or not re.search(r"layers\.6\.|layers\.0\.mlp|embed_tokens|model\.norm|lm_head", name):
            continue
        kept = tensor.data
        tensor.data = torch.full_like(kept, kept.mean().item()) if kept.dim() == 1 else kept.flip(0)
        if not (logits(model, ids) - before).abs().max() > 0.1:
            unseen.append(name)
        tensor.data = kept
    assert not unseen


def test_what_transformers_saves_is_read_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="5MB")
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1 but no tensor"):
        Checkpoint.open(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with Checkpoint.open(folder) as written, Checkpoint.open(tmp_path) as saved:
        assert len({entry.file for entry in saved.entries.values()}) > 1
        assert set(saved.entries) == {name for name in written.entries if not name.startswith("model.layers.8.")}
        for name in saved.entries:
            assert saved.read(name).equal(written.read(name)), name
        assert saved.config.indexer_types == written.config.indexer_types
        fused = model.model.layers[4].mlp.experts.gate_up_proj[5]
        gate = saved.read("model.layers.4.mlp.experts.5.gate_proj.weight")
        up = saved.read("model.layers.4.mlp.experts.5.up_proj.weight")
        assert fused.equal(torch.cat([gate, up]))
