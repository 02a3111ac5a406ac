"""A DSpark drafter for a trained model, taught by the model's own streams and distributions.

Paper: arXiv 2607.05147. Blocks begin at tokens of replies; slot k sees the true tokens before it (teacher forcing) and
learns the model's distribution of the next one, its confidence how near it came (1 - total variation).

`python -m training.dspark RUN OUT --seconds 60` takes the checkpoint in RUN/checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfglm.checkpoint.store import Checkpoint
from tfglm.drafts.block_config import BlockConfig
from tfglm.models.source import CheckpointSource
from training.data.pack import REPLY, Weights
from training.export import load_tensors, write_safetensors
from training.feed import Feed
from training.model import Norm, Trained, linear
from training.optim import optimisers, set_lr

_LENGTH, _ROWS, _ANCHORS = 2048, 16, 64
_SCORED = 0.9
"""Weight of the total variation in the loss; the rest is cross entropy."""
_LOG_EVERY = 50


def drafter_config(vocab_size: int, hidden: int, taps: list[int], **fields: Any) -> dict[str, Any]:
    """config.json in the form of the speculators package."""
    decoder = {
        "hidden_size": hidden,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 512,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "vocab_size": vocab_size,
    } | fields
    decoder["layer_types"] = ["sliding_attention"] * decoder["num_hidden_layers"]
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": 8,
        "aux_hidden_state_layer_ids": taps,
        "mask_token_id": vocab_size - 1,
        "draft_vocab_size": vocab_size,
        "target_hidden_size": hidden,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "transformer_layer_config": decoder,
    }


class DrafterLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(hidden, queries, bias=False)
        self.self_attn.k_proj = nn.Linear(hidden, keys, bias=False)
        self.self_attn.v_proj = nn.Linear(hidden, keys, bias=False)
        self.self_attn.o_proj = nn.Linear(queries, hidden, bias=False)
        self.self_attn.q_norm = Norm(width, config.rms_norm_eps)
        self.self_attn.k_norm = Norm(width, config.rms_norm_eps)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, inner, bias=False)
        self.mlp.down_proj = nn.Linear(inner, hidden, bias=False)


class Drafter(nn.Module):
    """Names are those of the published files. As many key heads as query heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        assert config.num_attention_heads == config.num_key_value_heads and config.causal and config.from_anchor
        self.config = config
        hidden, rank = config.hidden_size, config.markov_rank
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden, config.rms_norm_eps), Norm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(config) for _ in range(config.num_hidden_layers)])
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = nn.Linear(rank, config.vocab_size, bias=False)
        self.markov_head.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.confidence_head = nn.Module()
        self.confidence_head.proj = nn.Linear(hidden + rank, 1)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight", ".bias")):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)

    def forward(self, streams: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Final rows [B, A, block, hidden] of the blocks at anchors [B, A].

        streams [B, T, taps * hidden]: of every row; a block sees those before its anchor. embedded [B, A, block,
        hidden]: the pending token's embedding and the mask's.
        """
        config, size = self.config, self.config.block_size
        length = streams.shape[1]
        context = self.hidden_norm(linear(streams, self.fc))
        rows = torch.arange(length, device=streams.device)
        positions = anchors[..., None] + torch.arange(size, device=streams.device)  # [B, A, block]
        unseen = (rows >= anchors[..., None]) | (rows < anchors[..., None] - config.window)  # [B, A, T]
        later = torch.ones(size, size, dtype=torch.bool, device=streams.device).triu(1)
        x = embedded
        for layer in self.layers:
            attention = layer.self_attn
            n = layer.input_layernorm(x)
            q = self._rotate(attention.q_norm(self._heads(n, attention.q_proj)), positions)
            k = self._rotate(attention.k_norm(self._heads(n, attention.k_proj)), positions)
            v = self._heads(n, attention.v_proj)
            known = self._rotate(attention.k_norm(self._heads(context, attention.k_proj)), rows)
            values = self._heads(context, attention.v_proj)
            far = torch.einsum("bashd,bthd->bahst", q, known).float()
            near = torch.einsum("bashd,bauhd->bahsu", q, k).float().masked_fill(later, float("-inf"))
            scores = torch.cat([far.masked_fill(unseen[:, :, None, None], float("-inf")), near], dim=-1)
            p = (scores * config.head_dim**-0.5).softmax(-1).to(x.dtype)
            out = torch.einsum("bahst,bthd->bashd", p[..., :length], values)
            out = out + torch.einsum("bahsu,bauhd->bashd", p[..., length:], v)
            x = x + linear(out.flatten(3), attention.o_proj)
            n = layer.post_attention_layernorm(x)
            x = x + linear(F.silu(linear(n, layer.mlp.gate_proj)) * linear(n, layer.mlp.up_proj), layer.mlp.down_proj)
        return self.norm(x)

    def markov(self, before: Tensor) -> tuple[Tensor, Tensor]:
        """What the token before a slot adds to its logits, and its row of W1."""
        row = F.embedding(before, self.markov_head.markov_w1.weight)
        return row @ self.markov_head.markov_w2.weight.t(), row

    def confidence(self, rows: Tensor, markov_row: Tensor) -> Tensor:
        """Logits of how sure the slots are."""
        return self.confidence_head.proj(torch.cat([rows.float(), markov_row], dim=-1))[..., 0]

    def _heads(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return linear(x, layer).unflatten(-1, (-1, self.config.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, head_dim], halves rotated."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=x.device) / self.config.head_dim
        angles = positions[..., None, None].float() / self.config.rope_theta**half
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@torch.no_grad()
def target_rows(model: Trained, ids: Tensor, taps: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tapped streams [B, T, taps * hidden] and rows after the last norm [B, T, hidden], sparse as when served."""
    cos, sin = model.angles(ids.shape[1], ids.device)
    x, bias, streams = F.embedding(ids, model.embed_tokens.weight).to(dtype), None, []
    none = ids.new_empty(0)
    for layer in model.layers[:-1]:
        streams.append(x)
        x, bias, _ = layer(x, cos, sin, none, bias, True)
    streams.append(x)
    return torch.cat([streams[tap] for tap in taps], dim=-1), model.norm(x)


def anchors_of(weights: Tensor, count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors [B, count] whose next token belongs to a reply, and their slots up to which all do [B, count, size]."""
    reply = weights == REPLY
    good = reply.roll(-1, 1).float()
    good[:, -size - 1 :] = 0
    good[:, 0] = 0
    good += 1e-9  # a row without replies has anchors without slots
    good[:, -size - 1 :] = 0
    anchors = torch.multinomial(good.cpu(), count, generator=generator).to(weights.device)
    slots = anchors[..., None] + 1 + torch.arange(size, device=weights.device)
    inside = reply.gather(1, slots.flatten(1)).view(slots.shape)
    return anchors, inside.cumprod(-1).bool()


def losses(
    drafter: Drafter, model: Trained, ids: Tensor, weights: Tensor, anchors: Tensor, counted: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Figures of one batch; `accepted`: mean length of the prefix of a block that a greedy model would keep."""
    config, size = drafter.config, drafter.config.block_size
    streams, normed = target_rows(model, ids, config.layers, dtype)
    slots = anchors[..., None] + torch.arange(size, device=ids.device)
    before = ids.gather(1, slots.flatten(1)).view(slots.shape)
    table = model.embed_tokens.weight
    embedded = table[config.mask_token_id].to(dtype).expand(*slots.shape, -1).clone()
    embedded[..., 0, :] = table[before[..., 0]].to(dtype)
    head = model.lm_head.weight
    wanted = normed.gather(1, slots.flatten(1)[..., None].expand(-1, -1, normed.shape[-1])).view(*slots.shape, -1)
    target = (wanted.float() @ head.t()).softmax(-1)
    rows = drafter(streams, embedded, anchors)
    bias, markov_row = drafter.markov(before)
    guess = (rows.float() @ head.t() + bias).log_softmax(-1)
    cross = -(target * guess).sum(-1)
    variation = 0.5 * (target - guess.exp()).abs().sum(-1)
    sure = F.binary_cross_entropy_with_logits(
        drafter.confidence(rows.detach(), markov_row.detach()), 1 - variation.detach(), reduction="none"
    )
    worth = counted.float()
    total = worth.sum().clamp_min(1)
    same = (target.argmax(-1) == guess.argmax(-1)) & counted
    return {
        "loss": (((1 - _SCORED) * cross + _SCORED * variation + sure) * worth).sum() / total,
        "variation": (variation * worth).sum() / total,
        "accepted": same.int().cumprod(-1).sum(-1).float().mean(),
    }


def load_target(folder: Path, device: torch.device) -> Trained:
    with Checkpoint.open(folder) as checkpoint:
        model = Trained(checkpoint.config)
        source = CheckpointSource(checkpoint)
        load_tensors(model, {name: source.tensor(name).float() for name in checkpoint.entries})
    return model.requires_grad_(False).to(device)


def train(run: Path, out: Path, seconds: float, device: torch.device, seed: int, workers: int) -> None:
    model = load_target(run / "checkpoint", device)
    vocab, hidden, layers = model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers
    raw = drafter_config(vocab, hidden, [1, (layers + 1) // 2, layers])
    drafter = Drafter(BlockConfig.from_dict(raw))
    drafter.initialise(seed)
    drafter.to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    moved = optimisers(drafter, muon_lr=0.02, adam_lr=0.003, decay=0.01)
    feed = Feed((run / "tokenizer.json").read_text(encoding="utf-8"), seed + 1, workers)
    generator = torch.Generator().manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (out / "log.jsonl").open("w", encoding="utf-8") as log:
            _loop(drafter, model, feed, moved, generator, dtype, seconds, log)
    finally:
        feed.close()
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in drafter.state_dict().items()}
    write_safetensors(out / "model.safetensors", tensors)


def _loop(
    drafter: Drafter, model: Trained, feed: Feed, moved: list[torch.optim.Optimizer], generator: torch.Generator,
    dtype: torch.dtype, seconds: float, log: Any,
) -> None:  # fmt: skip
    device = model.lm_head.weight.device
    began, step = time.monotonic(), 0
    figures: dict[str, Tensor] = {}
    while (spent := time.monotonic() - began) < seconds:
        progress = spent / seconds
        set_lr(moved, min(1.0, (step + 1) / 20) * min(1.0, (1 - progress) / 0.6 + 0.02))
        ids, weights = _batch(feed, device)
        anchors, counted = anchors_of(weights, _ANCHORS, drafter.config.block_size, generator)
        figures = losses(drafter, model, ids, weights, anchors, counted, dtype)
        figures["loss"].backward()
        for optimiser in moved:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % _LOG_EVERY == 0 or step == 1:
            entry = {"step": step, "seconds": round(spent, 1), **{k: round(float(v), 4) for k, v in figures.items()}}
            log.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), flush=True)


def _batch(feed: Feed, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, weights = feed.take("short", _LENGTH, _ROWS if device.type == "cuda" else 1)
    return torch.from_numpy(tokens.astype(np.int64)).to(device), _tensor(weights, device)


def _tensor(weights: Weights, device: torch.device) -> Tensor:
    return torch.from_numpy(weights).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished training run")
    parser.add_argument("out", type=Path, help="folder of the drafter")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train(args.run, args.out, args.seconds, torch.device(args.device), args.seed, args.workers)


if __name__ == "__main__":
    main()
