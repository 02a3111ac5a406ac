"""Writes block_drafters.npz: what the classes of the speculators package compute on tiny random configs.

    pip install speculators==0.9.0 datasets hs-connectors --no-deps
    python tests/vectors/make_block_drafters.py

Of each drafter: `config`, the text of its config.json; `tensor:NAME`, as save_pretrained writes it; `embed` and `head`,
the target's; `ids` [T] and `streams` [T, taps * hidden], a text and its tapped streams; `anchors` [A], positions of
pending tokens; `hidden` [A, block, hidden] and `logits` [A, block, vocab], before any head. DSpark: `bias` [A, block,
vocab] and `confidence` [A, block] (logits) after the true tokens. DFlash2: `edges` [A, block, vocab], the selector's
score of every token after the true tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from transformers import Qwen3Config

VOCAB, HIDDEN, LENGTH, WINDOW, BLOCK = 96, 32, 40, 12, 4
ANCHORS = [1, 9, 12, 13, 31]


def qwen(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 8000000.0, "rope_type": "default"},
        layer_types=["sliding_attention"] * layers,
        sliding_window=WINDOW,
        use_sliding_window=True,
        attn_implementation="eager",
    )


def common(**fields: Any) -> dict[str, Any]:
    return {
        "draft_vocab_size": VOCAB,
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "aux_hidden_state_layer_ids": [2, 3, 6],
    } | fields


def randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.normal_(0 if name.endswith("bias") else 1, 0.2)
            elif "codebook" in name or "markov_w" in name:
                tensor.normal_(0, 0.5)
            elif "embed" in name:
                tensor.normal_(0, 1)
            elif "base_kernel" in name:
                tensor.normal_(0.5, 0.3)
            else:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)


def vectors(model: Any, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    model = model.eval().float()
    randomise(model)
    ids = torch.randint(0, VOCAB - 1, (1, LENGTH))
    streams = torch.randn(1, LENGTH, len(model.target_layer_ids) * HIDDEN)
    mask = torch.zeros(1, LENGTH)
    mask[:, ANCHORS] = 1
    with torch.no_grad():
        hidden, logits, _, _, places = model._backbone_forward(
            streams, ids, mask, torch.randn(1, LENGTH, HIDDEN), torch.zeros(1, LENGTH).long(), max_anchors=len(ANCHORS)
        )
        blocks = ids[0, places].view(-1, BLOCK)
        hidden = hidden.view(len(ANCHORS), BLOCK, -1)
        found = {"hidden": hidden, "logits": logits.view(len(ANCHORS), BLOCK, -1)}
        if isinstance(model, DSparkDraftModel):
            before = model.markov_head.prev_embeddings(blocks)
            found["bias"] = model.markov_head.block_bias(prev_token_ids=blocks, hidden_states=hidden, prev_emb=before)
            found["confidence"] = model.confidence_head(torch.cat([hidden, before], dim=-1))
        else:
            before = torch.cat([blocks[:, :1], blocks[:, :-1]], dim=1)
            every = torch.arange(VOCAB).expand(len(ANCHORS), BLOCK, -1)
            found["edges"] = model.candidate_selector.transition_scores(hidden, before, every)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
        text = (Path(folder) / "config.json").read_text()
    found |= {f"tensor:{name}": tensor for name, tensor in saved.items()}
    found |= {"embed": model.embed_tokens.weight, "head": model.lm_head.weight, "ids": ids[0], "streams": streams[0]}
    arrays = {name: tensor.detach().numpy() for name, tensor in found.items()}
    return arrays | {"anchors": np.array(ANCHORS), "config": np.array(text)}


def main() -> None:
    drafters = {
        f"dspark-{kind}": DSparkDraftModel(
            DSparkSpeculatorConfig(transformer_layer_config=qwen(2), markov_rank=8, markov_head_type=kind, **common())
        )
        for kind in ("vanilla", "gated", "rnn")
    }
    drafters["dflash2"] = DFlash2DraftModel(
        DFlash2SpeculatorConfig(
            transformer_layer_config=qwen(2), selector_rank=8, selector_top_k=6, conv_group_size=8, **common()
        )
    )
    out = {
        f"{drafter}/{name}": array
        for seed, (drafter, model) in enumerate(drafters.items())
        for name, array in vectors(model, seed).items()
    }
    path = Path(__file__).with_name("block_drafters.npz")
    np.savez_compressed(path, **out)
    print(f"{path}: {path.stat().st_size} bytes, {len(out)} arrays")


if __name__ == "__main__":
    main()
