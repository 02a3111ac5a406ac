"""Synthetic checkpoints with EXL3 experts: the published pack's layout, the mean width, the meant sizes of weights."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import expected_tensors
from tfglm.checkpoint.presets import preset_config
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.checkpoint.synth_exl3 import drawn_widths, with_exl3_experts
from tfglm.cli.main import main
from tfglm.errors import ConfigError
from tfglm.formats.exl3 import reconstruct

FIELDS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exl3") / "synth"
    write_checkpoint(out, "tiny", 0, expert_bits=2.75, **FIELDS)
    return out


def test_layout_of_the_published_pack(folder: Path) -> None:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    for layer in (1, 2):  # one sparse layer and the MTP layer
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (tensors[f"{prefix}.{name}_proj.trellis"] for name in ("gate", "up", "down"))
            assert gate.dtype == torch.int16 and gate.shape[:2] == (8, 24) and down.shape[:2] == (24, 8)
            assert gate.shape == up.shape and gate.shape[2] in (32, 48, 64)
            for name in ("gate", "up"):
                assert torch.equal(
                    tensors[f"{prefix}.{name}_proj.suh"], tensors[f"model.layers.{layer}.mlp.experts.0.gate_proj.suh"]
                )
            assert int(tensors[f"{prefix}.up_proj.mcg"]) & 0xFFFFFFFF == 0xCBAC1FED
            assert f"{prefix}.up_proj.weight" not in tensors
    assert not torch.equal(
        tensors["model.layers.1.mlp.experts.0.gate_proj.suh"], tensors["model.layers.2.mlp.experts.0.gate_proj.suh"]
    )
    assert tensors["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.bfloat16
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "exl3",
        "bits": 2.75,
        "codebook": "mcg",
        "head_bits": 16,
        "scope": "glm53_routed_experts_only",
    }


def test_mean_width_and_size_of_the_weights(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        for layer in (1, 2):
            layers = [x for name, x in checkpoint.linears.items() if name.startswith(f"model.layers.{layer}.")]
            assert len(layers) == 12 and sum(x.bits for x in layers) == 2.75 * 12
        name = "model.layers.1.mlp.experts.2.down_proj"
        trellis, suh, svh = (checkpoint.read(f"{name}.{field}") for field in ("trellis", "suh", "svh"))
        weights = reconstruct(trellis, suh, svh, "mcg")
        assert float(weights.std()) == pytest.approx(0.5 * 384**-0.5, rel=0.05)
        assert set(suh.sign().tolist()) == set(svh.sign().tolist()) == {-1.0, 1.0}


def test_same_seed_same_bytes_and_other_seed_other_widths(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "again", "tiny", 0, expert_bits=2.75, **FIELDS)
    digests = [
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in out.iterdir()}
        for out in (folder, tmp_path / "again")
    ]
    assert digests[0] == digests[1]
    assert drawn_widths(64, 2.75, "0/a") != drawn_widths(64, 2.75, "1/a")


@pytest.mark.parametrize(("experts", "bits"), [(256, 2.75), (256, 2.0), (16, 4.0), (8, 3.5), (256, 2.01)])
def test_drawn_widths_have_the_mean(experts: int, bits: float) -> None:
    widths = drawn_widths(experts, bits, "key")
    assert sum(2 * gate_up + down for gate_up, down in widths) == round(bits * 3 * experts)
    assert {width for pair in widths for width in pair} <= {2, 3, 4}


def test_real_size_is_the_published_one() -> None:
    raw = preset_config("full-layers", {"num_hidden_layers": 5, "n_routed_experts": 256, "first_k_dense_replace": 3})
    config = ModelConfig.from_dict(raw)
    specs = with_exl3_experts(expected_tensors(config), config, 2.75, 0)
    sizes = {"I16": 2, "F16": 2, "I32": 4}
    layer = [spec for name, spec in specs.items() if name.startswith("model.layers.3.mlp.experts.")]
    total = sum(torch.Size(spec.shape).numel() * sizes[spec.dtype] for spec in layer)
    assert 75 * total / 2**30 == pytest.approx(232.0 + 0.9, abs=0.2)


@pytest.mark.parametrize(
    ("preset", "bits", "fields", "message"),
    [
        ("tiny", 5.0, {}, "experts of 5 bits were asked for; 2 to 4 can be made"),
        ("tiny", 2.75, {"moe_intermediate_size": 320}, "moe_intermediate_size is 320; EXL3 experts need a multiple"),
    ],
)
def test_impossible_experts_are_refused(
    preset: str, bits: float, fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(tmp_path / "out", preset, expert_bits=bits, **fields)
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    flags = ["--layers", "2", "--set", "first_k_dense_replace=1"]
    assert main(["synth", out, *flags, "--experts", "4", "--experts", "exl3:2.5"]) == 0
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.config.n_routed_experts == 4 and len(checkpoint.linears) == 24
    for text in ("exl2:3", "exl3:many"):
        assert main(["synth", str(tmp_path / "no"), "--experts", text]) == 1
        assert f"--experts {text}: " in capsys.readouterr().err
