"""Tiny random GLM-5.3 models of transformers, and the same weights in this program's model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from tfglm.checkpoint.config import ModelConfig
from tfglm.models.glm53 import Glm53
from tfglm.models.weights import load_weights
from tfglm.models.window import Rows
from tfglm.ops.base import Ops

TOLERANCE = 2e-5

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 16,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 4096,
    "eos_token_id": [1],
    "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}
GROUPED = {"n_group": 4, "topk_group": 2}
"""Fields that ModelConfig refuses in a file but the model can honour."""


@dataclass(frozen=True)
class Pair:
    """The same random model twice: theirs is transformers' (float32, eager), ours made by `build`."""

    theirs: GlmMoeDsaForCausalLM
    config: ModelConfig
    state: Mapping[str, torch.Tensor]
    """Float32 tensors by their names in a checkpoint."""

    def build(self, ops: Ops | None = None, change: Callable[[ModelConfig], ModelConfig] | None = None) -> Glm53:
        config = change(self.config) if change else self.config
        return Glm53(config, load_weights(config, self.state.__getitem__), tokens=1024, kv="fp32", ops=ops)

    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]

    def expected_steps(self, prompt: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """Logits of transformers' own cached decoding: one forward for the prompt, one for each step."""
        cache = DynamicCache(config=self.theirs.config)
        rows = []
        with torch.no_grad():
            for window in (prompt, *([token] for token in steps)):
                rows.append(self.theirs(torch.tensor([window]), past_key_values=cache, use_cache=True).logits[0])
        return torch.cat(rows)


def make_pair(seed: int, **changes: Any) -> Pair:
    fields = BASE | changes
    torch.manual_seed(seed)
    reference_config = GlmMoeDsaConfig(**fields, attn_implementation="eager")
    theirs = GlmMoeDsaForCausalLM(reference_config).eval().float()
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.3)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.5)
            elif "norm" in name:
                tensor.normal_(1, 0.2)
            elif "embed_tokens" in name:
                tensor.normal_(0, 1)
            elif tensor.dim() >= 2:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    in_file = {name: value for name, value in fields.items() if name not in GROUPED}
    config = ModelConfig.from_dict({"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 0, **in_file})
    # transformers builds the two latent norms with its class default, whatever rms_norm_eps says.
    groups = {name: fields[name] for name in GROUPED}
    return Pair(theirs, dataclasses.replace(config, latent_norm_eps=1e-6, **groups), unfused(theirs.state_dict()))


def unfused(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' in-memory names and shapes as those of a checkpoint: one tensor an expert and matrix."""
    flat = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                prefix = name.replace("gate_up_proj", str(expert))
                flat |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            flat |= {f"{name.replace('down_proj', str(e))}.down_proj.weight": m for e, m in enumerate(tensor)}
        else:
            flat[name] = tensor
    return flat


def token_ids(seed: int, count: int, vocab: int = 320) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_in_chunks(model: Glm53, tokens: Sequence[int], size: int) -> torch.Tensor:
    """Logits of every row, the tokens fed in windows of `size`."""
    stream = model.open_stream()
    windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    logits = torch.cat([model.forward([Rows(stream, window, len(window))]) for window in windows])
    stream.close()
    return logits


@functools.cache
def default_pair() -> Pair:
    return make_pair(0)
