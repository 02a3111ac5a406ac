"""The quantiser on a GPU against the CPU: the same steps, hence nearly the same errors, and packs that decode."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.formats.exl3 import reconstruct
from tfglm.ops.base import PlainExperts, Routing
from tfglm.quantize.encoder import search_on
from tfglm.quantize.experts import ExpertLayer
from tfglm.quantize.hessian import feedback
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.run import quantise_checkpoint

MIXED = Recipe(2.75, (2.0, 3.0, 4.0))


def layer_on(device: torch.device) -> ExpertLayer:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(600, 256, generator=random) * torch.linspace(0.3, 2, 256)
    routing = Routing(torch.randint(2, (600, 1), generator=random), torch.rand(600, 1, generator=random) + 0.1)
    plain = PlainExperts(
        torch.randn(2, 256, 256, generator=random) / 16, torch.randn(2, 256, 128, generator=random) / 11
    )
    return ExpertLayer(
        "layer",
        x.to(device),
        Routing(routing.experts.to(device), routing.weights.to(device)),
        PlainExperts(plain.gate_up.to(device), plain.down.to(device)),
        MIXED,
        search_on(device),
    )


def test_experts_are_as_good_as_on_the_cpu(device: torch.device) -> None:
    cpu, gpu = layer_on(torch.device("cpu")), layer_on(device)
    widths = gpu.widths(34)
    assert widths == cpu.widths(34)
    for expert, (ours, theirs) in enumerate(zip(gpu.quantised(widths), cpu.quantised(widths), strict=True)):
        for projection, (a, b) in enumerate(zip(ours.matrices, theirs.matrices, strict=True)):
            assert a.proxy_error == pytest.approx(b.proxy_error, rel=0.05)
            assert a.trellis.device.type == "cpu" and a.trellis.shape == b.trellis.shape
            w = gpu._matrix(expert, projection).cpu()
            on_gpu, on_cpu = (
                float((reconstruct(m.trellis, m.suh, m.svh, "mcg") - w).square().sum() / w.square().sum())
                for m in (a, b)
            )
            assert on_gpu == pytest.approx(on_cpu, rel=0.05) and on_gpu < 0.5


@pytest.mark.parametrize("seed", range(8))
def test_a_hessian_that_rounding_made_indefinite(seed: int, device: torch.device) -> None:
    """As of experts with inner columns that hardly ever fire: eigenvalues down to a rounding error of the largest."""
    random = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(512, 512, generator=random, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(-1, -11, 512, dtype=torch.float64) - 2e-10
    h = ((basis * eigenvalues) @ basis.T).float()
    found, expected = feedback(h.to(device)), feedback(h)
    assert found.lower is not None and bool(found.lower.isfinite().all())
    assert found.spread == pytest.approx(expected.spread, rel=0.5)  # one more or less is added to the diagonal


def test_a_whole_model(device: torch.device, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", "tiny", 0, num_hidden_layers=5, n_routed_experts=4, moe_intermediate_size=128)
    tokens = [[(31 * i + 7 * s) % 1400 for i in range(200)] for s in range(2)]
    found = []
    for where in ("cuda", "cpu"):
        recipe = dataclasses.replace(MIXED, bits=3, widths=(3.0,))
        with Checkpoint.open(tmp_path / "source") as checkpoint:
            report = quantise_checkpoint(checkpoint, tmp_path / where, recipe, tokens, device=where)
        found.append([layer.proxy_error for layer in report.layers])
        with Checkpoint.open(tmp_path / where) as checkpoint:
            assert len(checkpoint.linears) == 3 * 4 * 3
    assert found[0] == pytest.approx(found[1], rel=0.05)
