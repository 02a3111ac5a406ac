"""The training model is the served model: same logits, same drafts, names that transformers reads."""

from pathlib import Path

import pytest
import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.vocabulary import build_tokenizer
from tfglm.models.load import load_model
from tfglm.models.mtp import Mtp, load_mtp
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.window import Rows
from training.export import checkpoint_tensors, export, load_tensors
from training.model import Trained
from training.shape import MICRO, config_of, raw_config

LENGTH = 60  # index_topk is 16: most rows are sparse


@pytest.fixture(scope="module")
def trained() -> Trained:
    """A random model whose weights are all bf16 numbers, none of them zero."""
    model = Trained(config_of(MICRO))
    model.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "lm_head.weight")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def folder(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("micro")
    raw = raw_config(MICRO)
    tokenizer = build_tokenizer(raw["vocab_size"] - 60)
    export(trained, raw, tokenizer.to_str(), path)
    return path


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 384, (1, LENGTH), generator=torch.Generator().manual_seed(2))


def test_the_engine_gives_the_same_logits(trained: Trained, folder: Path, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        out = trained(tokens, sparse=True)
        expected = out.normed[0] @ trained.lm_head.weight.t()
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as checkpoint:
        served = load_model(checkpoint, tokens=256, kv="fp32")
    passed = served.forward_tapped([Rows(served.open_stream(), tokens[0].tolist(), LENGTH)], Taps(layers=(1, 3)))
    assert torch.allclose(passed.logits, expected, atol=2e-4), (passed.logits - expected).abs().max()
    for layer in (1, 3):
        assert torch.allclose(passed.streams[layer], out.streams[layer][0], atol=2e-4)


def test_dense_attention_would_give_others(trained: Trained, tokens: torch.Tensor) -> None:
    """The test above sees the selection."""
    with torch.no_grad():
        sparse, dense = (trained(tokens, sparse=s).normed for s in (True, False))
    assert (sparse - dense).abs().max() > 0.01


def test_the_engine_gives_the_same_mtp_logits(trained: Trained, folder: Path, tokens: torch.Tensor) -> None:
    short = tokens[:, :17]  # no more than index_topk rows: training leaves the MTP layer dense
    with torch.no_grad():
        expected = trained(short, sparse=True).mtp[0] @ trained.lm_head.weight.t()
    with Checkpoint.open(folder) as checkpoint:
        served = load_model(checkpoint, tokens=256, kv="fp32")
        mtp = Mtp(served, load_mtp(served.weights, checkpoint.config, CheckpointSource(checkpoint)), "fp32")
    stream = served.open_stream()
    follower = mtp.open_stream(stream)
    passed = served.forward_tapped([Rows(stream, short[0].tolist(), 0)], Taps(normed=True))
    assert passed.normed is not None
    step = mtp.absorb([Rows(follower, short[0, 1:].tolist(), 16)], passed.normed[:16])
    assert torch.allclose(step.logits, expected[:16], atol=2e-4), (step.logits - expected[:16]).abs().max()


def test_a_checkpoint_loads_back(trained: Trained) -> None:
    again = Trained(trained.config)
    load_tensors(again, checkpoint_tensors(trained))
    assert all(
        torch.equal(a, b) for a, b in zip(trained.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_transformers_loads_it(trained: Trained, folder: Path, tokens: torch.Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in theirs.model.layers:  # transformers 5.23 builds these two norms with another epsilon
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    with torch.no_grad():
        out = trained(tokens, sparse=True)
        logits = theirs(tokens, use_cache=False).logits[0]
    assert torch.allclose(logits, out.normed[0] @ trained.lm_head.weight.t(), atol=2e-4)


def test_dropless_and_roomy_experts_agree(trained: Trained, tokens: torch.Tensor) -> None:
    """Room for everything by another way: gradients and outputs equal those of picks that all fit."""
    roomy = Trained(trained.config, room=4.0)
    roomy.load_state_dict(trained.state_dict())
    results = []
    for model in (trained, roomy):
        model.zero_grad()
        out = model(tokens)
        (out.normed.square().sum() + out.mtp.sum()).backward()
        results.append((out.normed.detach(), model.layers[1].mlp.experts.up_proj.grad.clone()))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-3)


def test_gradients_of_the_experts(trained: Trained) -> None:
    """Against autograd through every expert over every row."""
    moe = trained.layers[1].mlp
    x = torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    out, load = moe(x)
    assert int(load.sum()) == 20
    out.square().sum().backward()
    given, x.grad = x.grad.clone(), None
    flat = x[0]
    scores = torch.sigmoid(flat @ moe.gate.weight.t())
    chosen = (scores + moe.gate.e_score_correction_bias).topk(2).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * 2.5
    every = moe.experts(flat.expand(4, -1, -1))
    picked = every[chosen.t(), torch.arange(10)]  # [2, rows, hidden]
    expected = (picked * weights.t()[..., None]).sum(0) + moe.shared_experts(flat)
    assert torch.allclose(out[0], expected, atol=1e-4)
    expected.square().sum().backward()
    assert torch.allclose(given, x.grad, atol=1e-3, rtol=1e-3)
