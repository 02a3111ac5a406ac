"""The MTP layer against a float64 forward in numpy that shares no code with it, and the drafts chained from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.base import Ask, Draft, Kept
from tfglm.drafts.mtp import MtpDrafter
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.mtp import Mtp, MtpStep, load_mtp
from tfglm.models.taps import Taps
from tfglm.models.window import Rows

LENGTH = 48
"""Longer than the tiny model's index_topk of 32, so that the layer chooses what it attends to."""

Array = np.ndarray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    write_checkpoint(path, "tiny", num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[tuple[Glm53, Mtp]]:
    with Checkpoint.open(folder) as checkpoint:
        model = load_model(checkpoint, tokens=1024, kv="fp32")
        yield model, Mtp(model, load_mtp(model.weights, model.config, checkpoint.read), kv="fp32")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: tensor.double().numpy() for name, tensor in load_file(file).items()}
    return found


@pytest.fixture(scope="module")
def text() -> list[int]:
    return torch.randint(0, 1500, (LENGTH + 1,), generator=torch.Generator().manual_seed(3)).tolist()


def trunk_rows(model: Glm53, tokens: list[int]) -> torch.Tensor:
    stream = model.open_stream()
    passed = model.forward_tapped([Rows(stream, tokens, 1)], Taps(normed=True))
    stream.close()
    assert passed.normed is not None
    return passed.normed


def absorb(model: Glm53, mtp: Mtp, following: list[int], hidden: torch.Tensor, want: int) -> MtpStep:
    trunk = model.open_stream()
    try:
        return mtp.absorb([Rows(mtp.open_stream(trunk), following, want)], hidden)
    finally:
        trunk.close()


class Numpy:
    """The layer on whole sequences, keys and values expanded, in float64."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array]) -> None:
        self.c, self.prefix, self.tensors = config, f"model.layers.{config.num_hidden_layers}.", tensors

    def w(self, name: str) -> Array:
        return self.tensors[self.prefix + name + ".weight"]

    def norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps) * weight

    def rope(self, x: Array, positions: Array) -> Array:
        """x [T, heads, D]: adjacent pairs are rotated and laid out as halves."""
        width = x.shape[-1]
        angle = positions[:, None, None] * self.c.rope_theta ** (-np.arange(0, width, 2) / width)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * np.cos(angle) - odd * np.sin(angle), odd * np.cos(angle) + even * np.sin(angle))
        return np.concatenate(turned, -1)

    def selections(self, n: Array, q_latent: Array, positions: Array) -> list[list[int]]:
        c, rotary = self.c, self.c.qk_rope_head_dim
        q = (q_latent @ self.w("self_attn.indexer.wq_b").T).reshape(len(n), c.index_n_heads, c.index_head_dim)
        k = n @ self.w("self_attn.indexer.wk").T
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        bias = self.tensors[self.prefix + "self_attn.indexer.k_norm.bias"]
        k = k * self.w("self_attn.indexer.k_norm") + bias
        q = np.concatenate([self.rope(q[..., :rotary], positions), q[..., rotary:]], -1)
        k = np.concatenate([self.rope(k[:, None, :rotary], positions)[:, 0], k[:, rotary:]], -1)
        heads = n @ self.w("self_attn.indexer.weights_proj").T * c.index_n_heads**-0.5
        similar = np.maximum(np.einsum("thd,sd->ths", q, k) * c.index_head_dim**-0.5, 0)
        scores = np.einsum("th,ths->ts", heads, similar)
        return [sorted(sorted(range(t + 1), key=lambda s: (-scores[t, s], s))[: c.index_topk]) for t in range(len(n))]

    def attention(self, n: Array, positions: Array, lists: list[list[int]] | None) -> tuple[Array, list[list[int]]]:
        c, rows, heads = self.c, len(n), self.c.num_attention_heads
        q_latent = self.norm(n @ self.w("self_attn.q_a_proj").T, self.w("self_attn.q_a_layernorm"))
        q = (q_latent @ self.w("self_attn.q_b_proj").T).reshape(rows, heads, -1)
        q = np.concatenate([q[..., : c.qk_nope_head_dim], self.rope(q[..., c.qk_nope_head_dim :], positions)], -1)
        a = n @ self.w("self_attn.kv_a_proj_with_mqa").T
        latent = self.norm(a[:, : c.kv_lora_rank], self.w("self_attn.kv_a_layernorm"))
        shared = self.rope(a[:, None, c.kv_lora_rank :], positions)
        kv = (latent @ self.w("self_attn.kv_b_proj").T).reshape(rows, heads, -1)
        key = np.concatenate([kv[..., : c.qk_nope_head_dim], np.repeat(shared, heads, 1)], -1)
        value = kv[..., c.qk_nope_head_dim :]
        lists = lists or self.selections(n, q_latent, positions)
        out = np.zeros((rows, heads, c.v_head_dim))
        for t, chosen in enumerate(lists):
            score = np.einsum("hd,shd->hs", q[t], key[chosen]) * c.qk_head_dim**-0.5
            p = np.exp(score - score.max(-1, keepdims=True))
            out[t] = np.einsum("hs,shd->hd", p / p.sum(-1, keepdims=True), value[chosen])
        return out.reshape(rows, -1) @ self.w("self_attn.o_proj").T, lists

    def swiglu(self, prefix: str, x: Array) -> Array:
        gate = x @ self.w(f"{prefix}.gate_proj").T
        return (gate / (1 + np.exp(-gate)) * (x @ self.w(f"{prefix}.up_proj").T)) @ self.w(f"{prefix}.down_proj").T

    def moe(self, x: Array) -> Array:
        score = 1 / (1 + np.exp(-(x @ self.w("mlp.gate").T)))
        choice = score + self.tensors[self.prefix + "mlp.gate.e_score_correction_bias"]
        out = self.swiglu("mlp.shared_experts", x)
        for row in range(len(x)):
            picks = np.argsort(-choice[row])[: self.c.num_experts_per_tok]
            weights = score[row, picks] / score[row, picks].sum() * self.c.routed_scaling_factor
            for expert, weight in zip(picks, weights, strict=True):
                out[row] += weight * self.swiglu(f"mlp.experts.{expert}", x[row : row + 1])[0]
        return out

    def layer(
        self, following: list[int], hidden: Array, lists: list[list[int]] | None = None
    ) -> tuple[Array, Array, list[list[int]]]:
        """Logits and chained rows of every row, and what each attended to."""
        positions = np.arange(len(following), dtype=np.float64)
        embedded = self.tensors["model.embed_tokens.weight"][following]
        embedded[0] = 0
        joined = [self.norm(embedded, self.w("enorm")), self.norm(hidden, self.w("hnorm"))]
        x = np.concatenate(joined, -1) @ self.w("eh_proj").T
        branch, lists = self.attention(self.norm(x, self.w("input_layernorm")), positions, lists)
        x = x + branch
        x = x + self.moe(self.norm(x, self.w("post_attention_layernorm")))
        u = self.norm(x, self.w("shared_head.norm"))
        return u @ self.tensors["lm_head.weight"].T, u, lists


def test_every_absorbed_row_matches_the_float64_forward(
    models: tuple[Glm53, Mtp], tensors: dict[str, Array], text: list[int]
) -> None:
    model, mtp = models
    hidden = trunk_rows(model, text[:LENGTH])
    step = absorb(model, mtp, text[1:], hidden, LENGTH)
    logits, rows, _ = Numpy(model.config, tensors).layer(text[1:], hidden.double().numpy())
    assert np.abs(step.logits.numpy() - logits).max() < 2e-4
    assert np.abs(step.rows.numpy() - rows).max() < 2e-4
    assert np.abs(logits).max() > 2


def test_a_chain_matches_the_float64_forward_and_keeps_its_first_steps_list(
    models: tuple[Glm53, Mtp], tensors: dict[str, Array], text: list[int]
) -> None:
    model, mtp = models
    hidden = trunk_rows(model, text[:LENGTH])
    trunk = model.open_stream()
    stream = mtp.open_stream(trunk)
    step = mtp.absorb([Rows(stream, text[1:], 1)], hidden)
    following, known = list(text[1:]), hidden.double().numpy()
    reference = Numpy(model.config, tensors)
    _, rows, lists = reference.layer(following, known)
    for _ in range(3):
        token = int(step.logits[0].argmax())
        step = mtp.chain([Rows(stream, [token], 1)], step)
        following.append(token)
        known = np.concatenate([known, rows[-1:]])
        lists = [*lists, [*lists[-1], len(following) - 1]]
        logits, rows, _ = reference.layer(following, known, lists)
        assert np.abs(step.logits[0].numpy() - logits[-1]).max() < 3e-4
    assert stream.length == LENGTH + 3
    trunk.close()


def test_how_a_text_is_cut_into_absorbs_and_undone_chains_leave_no_trace(
    models: tuple[Glm53, Mtp], text: list[int]
) -> None:
    model, mtp = models
    hidden = trunk_rows(model, text[:LENGTH])
    trunks = [model.open_stream(), model.open_stream()]
    stream, other = (mtp.open_stream(trunk) for trunk in trunks)
    for start, stop in ((0, 31), (31, 33), (33, 40), (40, LENGTH)):
        window = [Rows(other, text[1:4], 1), Rows(stream, text[start + 1 : stop + 1], 1)]
        first = step = mtp.absorb(window, torch.cat([hidden[:3], hidden[start:stop]]))
        for token in (5, 6):
            step = mtp.chain([Rows(other, [token], 1), Rows(stream, [token], 1)], step)
        other.truncate(0)
        stream.truncate(stop)
    assert torch.equal(first.logits[1:], absorb(model, mtp, text[1:], hidden, 1).logits)
    for trunk in trunks:
        trunk.close()
    assert model.cache.pool.free == model.cache.pool.pages


def test_tapping_a_window_leaves_its_logits_bit_for_bit(models: tuple[Glm53, Mtp], text: list[int]) -> None:
    model, _ = models
    plain, tapped = model.open_stream(), model.open_stream()
    expected = model.forward([Rows(plain, text, 5)])
    passed = model.forward_tapped([Rows(tapped, text, 5)], Taps(normed=True, layers=(0, 2, 4)))
    assert torch.equal(passed.logits, expected)
    assert passed.normed is not None and passed.normed.shape == (len(text), model.config.hidden_size)
    assert sorted(passed.streams) == [0, 2, 4]
    assert torch.equal(passed.streams[0], model.weights.embed[text].float())
    plain.close()
    tapped.close()


def drafted(drafter: MtpDrafter, context: object) -> Draft:
    def greedy(ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
        return int(ids[values.argmax()]), float(values.max())

    [draft] = drafter.propose([Ask(context, 9, 4, greedy, lambda confidence: True, sampled=False)])
    return draft


@pytest.mark.parametrize("late", [False, True])
def test_on_kept_pages_a_stream_drafts_as_if_it_had_read_them(models: tuple[Glm53, Mtp], late: bool) -> None:
    """late: the pages are taken over after the context was opened, as when another request reads the same prompt."""
    model, mtp = models
    drafter = MtpDrafter(model, mtp)
    tokens = torch.randint(0, 1500, (PAGE + 40,), generator=torch.Generator().manual_seed(8)).tolist()
    first = model.open_stream()
    context = drafter.open(first)
    for start in (0, 100, PAGE):
        part = tokens[start : {0: 100, 100: PAGE, PAGE: PAGE + 40}[start]]
        passed = model.forward_tapped([Rows(first, part, 1)], drafter.taps)
        drafter.read([Kept(context, part, 0)], passed)
    expected = drafted(drafter, context)

    second = model.open_stream()
    if late:
        other = drafter.open(second)
    second.lend(first.pages[:1])
    second.length = PAGE
    if not late:
        other = drafter.open(second)
    passed = model.forward_tapped([Rows(second, tokens[PAGE:], 1)], drafter.taps)
    drafter.read([Kept(other, tokens[PAGE:], 0)], passed)
    assert drafted(drafter, other) == expected
    assert len(expected.tokens) == 4
    second.close()
    first.close()
    assert model.cache.pool.free == model.cache.pool.pages
