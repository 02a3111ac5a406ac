"""GLM-5.3 in plain torch, for training: expanded attention, stacked experts, the indexer's loss.

Parameters keep float32; a forward computes in the dtype it is asked for. Shapes: B sequences of T tokens, N = B * T.
The indexer is trained as DeepSeek-V3.2 describes it: its scores follow, by KL divergence, the attention of the layers
that use its selection; its inputs are detached, so that nothing else is moved by that loss. Some rows of every sequence
are enough for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfglm.checkpoint.config import INDEXER_LAYER_NORM_EPS, ModelConfig
from training.dispatch import gather_rows, slots_of

_SCORED_ROWS = 512


@dataclass
class Step:
    """What one layer tells besides its output: how many rows chose each expert (None for a dense layer), the attention
    [B, Q, T] of the probed rows, averaged over heads, and the indexer's scores of them (None for a shared layer)."""

    load: Tensor | None
    attention: Tensor | None
    scores: Tensor | None


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., T, H, D], its first 2 * cos.shape[-1] values rotated: pairs in, halves out, as the engine caches them."""
    rotary = 2 * cos.shape[-1]
    even, odd = x[..., 0:rotary:2].float(), x[..., 1:rotary:2].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., rotary:]], dim=-1)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Indexer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=INDEXER_LAYER_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def forward(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, heads, width], keys [B, T, width] and head weights [B, T, heads]."""
        queries = rotate(linear(q_latent, self.wq_b).unflatten(-1, (self.heads, self.width)), cos, sin)
        keys = F.layer_norm(
            linear(x, self.wk).float(), (self.width,), self.k_norm.weight, self.k_norm.bias, self.k_norm.eps
        ).to(x.dtype)
        keys = rotate(keys[..., None, :], cos, sin)[..., 0, :]
        return queries, keys, linear(x, self.weights_proj).float() * self.heads**-0.5


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores float32 [B, Q, T] of queries [B, Q, heads, width] against keys [B, T, width]."""
    similarity = torch.einsum("bqhd,btd->bqht", queries, keys).float() * keys.shape[-1] ** -0.5
    return torch.einsum("bqht,bqh->bqt", torch.relu(similarity), weights)


def selected(queries: Tensor, keys: Tensor, weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """Of some rows of a sequence, at positions `rows`: an additive mask [B, Q, T], 0 where a row may look."""
    scores = index_scores(queries, keys, weights)
    past = torch.arange(scores.shape[2], device=scores.device) <= rows[:, None]
    scores = scores.masked_fill(~past, float("-inf"))
    least = scores.topk(min(count, scores.shape[2]), dim=-1).values[..., -1:]
    return torch.zeros_like(scores, dtype=queries.dtype).masked_fill_(~past | (scores < least), float("-inf"))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, *, full: bool) -> None:
        super().__init__()
        self.config = config
        hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = Norm(latent, config.latent_norm_eps)
        self.kv_b_proj = nn.Linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)
        self.indexer = Indexer(config) if full else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, probe: Tensor, bias: Tensor | None, sparse: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The branch, the probed rows' attention and index scores, and the mask that was used (None: dense)."""
        config, heads = self.config, self.config.num_attention_heads
        nope, rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        q_latent = self.q_a_layernorm(linear(x, self.q_a_proj))
        q = linear(q_latent, self.q_b_proj).unflatten(-1, (heads, -1))
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], cos, sin)], dim=-1)
        latent, shared_key = linear(x, self.kv_a_proj_with_mqa).split([config.kv_lora_rank, rotary], dim=-1)
        kv = linear(self.kv_a_layernorm(latent), self.kv_b_proj).unflatten(-1, (heads, -1))
        shared_key = rotate(shared_key[..., None, :], cos, sin).expand(-1, -1, heads, -1)
        k = torch.cat([kv[..., :nope], shared_key], dim=-1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, kv[..., nope:]))  # [B, heads, T, width]

        scores = None
        if self.indexer is not None:
            detached, latent_in = x.detach(), q_latent.detach()
            queries, keys, weights = self.indexer(detached, latent_in, cos, sin)
            if len(probe):
                scores = index_scores(queries[:, probe], keys, weights[:, probe])
            if sparse:
                bias = select_all(queries.detach(), keys.detach(), weights.detach(), config.index_topk)
        attention = self._probed(q, k, probe) if len(probe) else None
        out = attend(q, k, v, bias if sparse else None, config.attention_scale)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj), attention, scores, bias

    def _probed(self, q: Tensor, k: Tensor, probe: Tensor) -> Tensor:
        with torch.no_grad():
            raw = (q[:, :, probe] @ k.transpose(2, 3)).float() * self.config.attention_scale
            future = torch.arange(k.shape[2], device=k.device) > probe[:, None]
            return raw.masked_fill(future, float("-inf")).softmax(-1).mean(1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Values are padded to the width of keys, which the fast kernels ask for."""
    wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    if bias is None:
        out = F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k, wide, attn_mask=bias[:, None], scale=scale)
    return out[..., : v.shape[-1]]


@torch._dynamo.disable  # a loop that would be unrolled
@torch.no_grad()
def select_all(queries: Tensor, keys: Tensor, weights: Tensor, count: int) -> Tensor:
    """The additive mask [B, T, T] of a layer's own selection, made in pieces of rows."""
    piece = _selected_on_gpu if keys.is_cuda else selected
    parts = [
        piece(queries[:, rows], keys, weights[:, rows], rows, count)
        for rows in torch.arange(keys.shape[1], device=keys.device).split(_SCORED_ROWS)
    ]
    return torch.cat(parts, dim=1)


_selected_on_gpu = torch.compile(selected, dynamic=False)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Experts(nn.Module):
    """Routed experts stacked: gate and up [E, inner, hidden], down [E, hidden, inner]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        """x [E, C, hidden]: each expert its own rows."""
        gate, up, down = (w.to(x.dtype).transpose(1, 2) for w in (self.gate_proj, self.up_proj, self.down_proj))
        return torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down)


class Moe(nn.Module):
    """Routing without an auxiliary loss: a correction bias, moved from outside by load, decides choices but no weights.

    room: rows an expert may take, as a multiple of an equal share. What exceeds it is dropped in training; None takes
    everything.
    """

    def __init__(self, config: ModelConfig, room: float | None) -> None:
        super().__init__()
        self.config, self.room = config, room
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.experts = Experts(config)
        self.shared_experts = Mlp(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden]: the branch and how often each expert was chosen."""
        config, flat = self.config, x.flatten(0, 1)
        count, picks = config.n_routed_experts, config.num_experts_per_tok
        scores = torch.sigmoid(flat.float() @ self.gate.weight.t())
        chosen = (scores + self.gate.e_score_correction_bias).topk(picks, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        total = chosen.numel()
        room = total if self.room is None else min(total, math.ceil(self.room * total / count / 8) * 8)
        slots = slots_of(chosen, count, room)
        routed = self.experts(gather_rows(flat, slots.row_of_slot, slots.slot_of_pick).unflatten(0, (count, room)))
        picked = gather_rows(routed.flatten(0, 1), slots.slot_of_pick.flatten(), slots.pick_of_slot[:, None])
        weights = (weights * slots.fits).to(x.dtype)
        out = (picked.unflatten(0, (-1, picks)) * weights[..., None]).sum(1)
        return out.view_as(x) + self.shared_experts(x), slots.load


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, full: bool, sparse: bool, room: float | None) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, full=full)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Mlp | Moe = Moe(config, room) if sparse else Mlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, probe: Tensor, bias: Tensor | None = None, sparse: bool = False
    ) -> tuple[Tensor, Tensor | None, Step]:
        branch, attention, scores, bias = self.self_attn(self.input_layernorm(x), cos, sin, probe, bias, sparse)
        x = x + branch
        normed = self.post_attention_layernorm(x)
        load = None
        if isinstance(self.mlp, Moe):
            branch, load = self.mlp(normed)
        else:
            branch = self.mlp(normed)
        return x + branch, bias, Step(load, attention, scores)


class MtpLayer(Layer):
    """The layer after the last: joins the trunk's row with the next token's embedding."""

    def __init__(self, config: ModelConfig, room: float | None) -> None:
        super().__init__(config, full=True, sparse=True, room=room)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = Norm(hidden, eps)

    def joined(self, normed: Tensor, following: Tensor) -> Tensor:
        """Trunk rows after their last norm with the embeddings of the tokens that follow them; position 0's is zero."""
        following = torch.cat([torch.zeros_like(following[:, :1]), following[:, 1:]], dim=1)
        return linear(torch.cat([self.enorm(following), self.hnorm(normed)], dim=-1), self.eh_proj)


@dataclass
class Output:
    """normed [B, T, hidden] after the last norm and after shared_head.norm; streams: what enters each layer and, last,
    what leaves the last one; steps: of every layer, the MTP layer's last."""

    normed: Tensor
    mtp: Tensor | None
    streams: list[Tensor]
    steps: list[Step]


class Trained(nn.Module):
    """The trunk and its MTP layer. Names are those of the checkpoint but for stacked experts (export.py)."""

    def __init__(self, config: ModelConfig, room: float | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = zip(config.indexer_types, config.mlp_layer_types, strict=True)
        self.layers = nn.ModuleList(
            [Layer(config, full=indexer == "full", sparse=mlp == "sparse", room=room) for indexer, mlp in kinds]
        )
        self.layers.append(MtpLayer(config, room))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        probe: Tensor | None = None,
        *,
        sparse: bool = False,
        mtp: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> Output:
        """tokens [B, T]. probe: rows whose attention and index scores are wanted. sparse: attend to the selection."""
        probe = tokens.new_empty(0) if probe is None else probe
        cos, sin = self.angles(tokens.shape[1], tokens.device)
        embedded = F.embedding(tokens, self.embed_tokens.weight).to(dtype)
        x, bias = embedded, None
        streams, steps = [], []
        for layer in self.layers[:-1]:
            streams.append(x)
            x, bias, step = layer(x, cos, sin, probe, bias, sparse)
            steps.append(step)
        streams.append(x)
        normed = self.norm(x)
        if not mtp:
            return Output(normed, None, streams, steps)
        last = self.layers[-1]
        following = torch.cat([embedded[:, 1:], embedded[:, -1:]], dim=1)
        x, _, step = last(last.joined(normed, following), cos, sin, probe, None, False)
        return Output(normed, last.shared_head.norm(x), streams, [*steps, step])

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        width = self.config.qk_rope_head_dim
        half = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        angles = torch.arange(length, device=device).float()[:, None] / self.config.rope_theta**half
        return angles.cos(), angles.sin()

    def groups(self) -> list[list[int]]:
        """Layers by the indexer they use, its own layer first."""
        result: list[list[int]] = []
        for number, kind in enumerate(self.config.indexer_types):
            if kind == "full":
                result.append([])
            result[-1].append(number)
        return [*result, [len(self.layers) - 1]]

    def indexer_loss(self, steps: list[Step], probe: Tensor) -> Tensor:
        """Mean over groups and rows of KL(mean attention of the group's layers || softmax of the indexer's scores)."""
        losses = []
        for group in self.groups():
            if group[0] >= len(steps):
                continue
            target = torch.stack([steps[number].attention for number in group]).mean(0)
            scores = steps[group[0]].scores
            future = torch.arange(scores.shape[2], device=scores.device) > probe[:, None]
            guess = scores.masked_fill(future, -1e9).log_softmax(-1)
            losses.append((target * (target.clamp_min(1e-9).log() - guess)).sum(-1).mean())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Branch outputs and the head start at zero: the first model is its embedding."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("norm.weight", "norm.bias")):
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "lm_head.weight")):
                parameter.zero_()
            else:
                std = 0.7 if name == "embed_tokens.weight" else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
