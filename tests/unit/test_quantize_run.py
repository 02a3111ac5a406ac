"""A whole quantisation: what it writes, what stays as it was, and that a stopped run goes on to the same bytes.

The ring search is replaced by a cheap one where only the machinery is looked at.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.cli.main import main
from tfglm.errors import CheckpointError, ConfigError
from tfglm.formats.exl3 import reconstruct, unpack_tiles
from tfglm.formats.exl3_code import codebook_table
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.quantize import experts, run
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.run import Report, quantise_checkpoint

FIELDS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
UNIFORM = Recipe(3, (3.0,))
MIXED = Recipe(2.75, (2.0, 3.0, 4.0))
SEQUENCES = [[(31 * i + 7 * s) % 1400 for i in range(90)] for s in range(3)]


def few_rings(tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
    """A stand-in for the search: the nearest of 64 random rings."""
    packed = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 64, int(16 * bits)), dtype=np.int16)
    rings = unpack_tiles(packed)[0]
    values = torch.from_numpy(codebook_table(codebook)[rings].astype(np.float32))
    return torch.from_numpy(rings)[torch.cdist(tiles, values).argmin(dim=1)]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "search_on", lambda device: few_rings)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantize") / "source"
    write_checkpoint(out, "tiny", 5, **FIELDS)
    return out


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with the stand-in search."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "search_on", lambda device: few_rings)
        quantise(source, out)
    return out


def digests(folder: Path) -> dict[str, str]:
    """Of everything but the report and the manifest, which tell how long it took."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.name not in ("quantize.json", "quantize-report.json")
    }


def quantise(source: Path, target: Path, recipe: Recipe = MIXED, **more: object) -> Report:
    with Checkpoint.open(source) as checkpoint:
        return quantise_checkpoint(checkpoint, target, recipe, SEQUENCES, **more)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.usefixtures("fast")
def test_layout_of_the_output(source: Path, tmp_path: Path) -> None:
    report = quantise(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    kept = {name for name in before if ".mlp.experts." not in name}
    assert kept == {name for name in after if ".mlp.experts." not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for layer in (1, 2, 3):  # two sparse layers and the MTP layer
            experts = f"model.layers.{layer}.mlp.experts"
            shared = after[f"{experts}.0.gate_proj.suh"]
            for expert in range(3):
                gate, up = (checkpoint.linears[f"{experts}.{expert}.{name}_proj"] for name in ("gate", "up"))
                assert gate.bits == up.bits and gate.codebook == "mcg"
                assert torch.equal(after[f"{experts}.{expert}.up_proj.suh"], shared)
        widths = [linear.bits for linear in checkpoint.linears.values()]
        assert sum(widths) / len(widths) == pytest.approx(2.75, abs=0.02) == report.bits
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "exl3"
    assert config == json.loads((source / "config.json").read_text())
    assert [layer.layer for layer in report.layers] == [1, 2, 3]
    assert json.loads((tmp_path / "out" / "quantize-report.json").read_text())["bits"] == report.bits
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("codebook", "width", "markers"), [("mul1", 2.5, 1), ("3inst", 3.0, 0)])
def test_uniform_packs_have_what_exllamav3_asks_of_a_linear(
    source: Path, tmp_path: Path, codebook: str, width: float, markers: int
) -> None:
    """Its LinearEXL3 takes suh and svh of fp16, a 3-D int16 trellis, scalar markers, bits = last dimension / 16."""
    quantise(source, tmp_path / "out", Recipe(width, (width,), codebook, shared_suh=False))
    after = tensors_of(tmp_path / "out")
    for name, (k, n) in {"gate_proj": (128, 128), "down_proj": (128, 128)}.items():
        fields = {key.rpartition(".")[2]: t for key, t in after.items() if f"layers.2.mlp.experts.1.{name}." in key}
        assert fields["trellis"].dtype == torch.int16 and fields["trellis"].shape == (k // 16, n // 16, int(16 * width))
        assert fields["suh"].dtype == fields["svh"].dtype == torch.float16
        assert len(fields) == 3 + markers and all(fields[f].dim() == 0 for f in fields if f in ("mcg", "mul1"))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("stop_after", [1, 3, 4, 9])
def test_a_stopped_run_goes_on_to_the_same_bytes(source: Path, whole: Path, tmp_path: Path, stop_after: int) -> None:
    steps: list[int] = []

    def stop(done: int, total: int) -> None:
        steps.append(done)
        assert total == 9
        if done == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(source, tmp_path / "stopped", progress=stop)
    assert not (tmp_path / "stopped" / "config.json").exists()
    (tmp_path / "stopped" / "model-layer-002.safetensors.part").write_bytes(b"half a file")
    steps.clear()
    quantise(source, tmp_path / "stopped", progress=lambda done, total: steps.append(done))
    assert steps[0] == (3 if stop_after > 3 else 1) and steps[-1] == 9  # whole layers are not done again
    assert digests(tmp_path / "stopped") == digests(whole)


@pytest.mark.usefixtures("fast")
def test_a_damaged_layer_is_done_again(source: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    file = tmp_path / "out" / "model-layer-001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (tmp_path / "out" / "model-rest.safetensors").unlink()
    quantise(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(whole)


def test_killed_while_it_runs(source: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL at several moments; what is left behind always leads to the bytes of an undisturbed run."""
    script = tmp_path / "child.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nimport test_quantize_run as t\nfrom tfglm.quantize import run\n"
        "run.search_on = lambda device: t.few_rings\n"
        "t.quantise(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, str(script), str(source)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    target = tmp_path / "killed"
    for seen in ("model-layer-001.safetensors*", "model-rest*"):
        with subprocess.Popen([*command, str(target)], env=environment) as child:
            deadline = time.monotonic() + 120
            while not list(target.glob(seen)) and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
    assert subprocess.run([*command, str(target)], env=environment, timeout=120).returncode == 0
    assert digests(target) == digests(whole)


@pytest.mark.usefixtures("fast")
def test_what_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the source itself"):
        quantise(source, source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty and holds no quantize\.json"):
        quantise(source, tmp_path / "full")
    quantise(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="another source, recipe, calibration or version"):
        quantise(source, tmp_path / "out", UNIFORM)
    with pytest.raises(CheckpointError, match="is quantised already; a BF16 checkpoint is needed"):
        quantise(tmp_path / "out", tmp_path / "twice")
    write_checkpoint(tmp_path / "narrow", "tiny", 0, **{**FIELDS, "moe_intermediate_size": 192})
    with pytest.raises(ConfigError, match="moe_intermediate_size is 192; EXL3 experts need a multiple of 128"):
        quantise(tmp_path / "narrow", tmp_path / "never")


@pytest.mark.parametrize(
    ("bits", "widths", "codebook", "message"),
    [
        (2.75, (), "mcg", "widths are none"),
        (3, (3.0, 2.0), "mcg", "widths are 3, 2; different widths in ascending order"),
        (2.5, (2.5,), "mcg", r"2\.5 bits does not exist in codebook mcg"),
        (4.5, (2.0, 4.0), "mcg", r"a mean of 4\.5 bits is outside the widths 2, 4"),
    ],
)
def test_recipes_that_cannot_be(bits: float, widths: tuple[float, ...], codebook: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(bits, widths, codebook)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.self_attn.o_proj.weight"])
def test_a_damaged_weight_is_named(name: str, source: Path, tmp_path: Path) -> None:
    """It is found where its layer is reached, by what it makes of the rows."""
    shutil.copytree(source, tmp_path / "source")
    [file] = [file for file in (tmp_path / "source").glob("*.safetensors") if name in load_file(file)]
    tensors = load_file(file)
    tensors[name][:, 4] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has values that are not finite; fetch the file"):
        quantise(tmp_path / "source", tmp_path / "out")


def test_command_with_the_real_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model at 4 bits; the output loads, and its logits stay close to the source's."""
    monkeypatch.setattr(experts, "_SCALE_TILES", 8)
    source, target = str(tmp_path / "source"), tmp_path / "out"
    small = {**FIELDS, "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "n_routed_experts": 2}
    write_checkpoint(source, "tiny", 2, **small)
    flags = ["--bits", "4", "--widths", "4", "--calibration-tokens", "800", "--length", "300"]
    assert main(["quantize", source, str(target), *flags]) == 0
    shown = capsys.readouterr().err
    assert "experts of 4 bits" in shown and "6 x 4" in shown
    assert "quantised 2 of 2 experts" in shown  # no terminal: lines, not a bar
    report = json.loads((target / "quantize-report.json").read_text())
    [layer] = report["layers"]
    assert layer["proxy_error"] < layer["nmse"] and layer["proxy_error"] < 0.0055
    with Checkpoint.open(source) as plain, Checkpoint.open(target) as packed:
        name = "model.layers.1.mlp.experts.1.up_proj"
        w = reconstruct(*(packed.read(f"{name}.{field}") for field in ("trellis", "suh", "svh")), "mcg")
        original = plain.read(f"{name}.weight").float().T
        assert float((w - original).square().sum() / original.square().sum()) < 0.02
        rows = []
        for checkpoint in (plain, packed):
            model = load_model(checkpoint, tokens=256, kv="fp32")
            tokens = [(37 * i + 5) % 1400 for i in range(100)]
            rows.append(torch.log_softmax(model.forward([Rows(model.open_stream(), tokens, 100)]).double(), dim=1))
    divergence = (rows[0].exp() * (rows[0] - rows[1])).sum(dim=1)
    assert 0 < float(divergence.median()) < 0.05
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": {"no": "text"}}]}')
    assert main(["quantize", source, str(tmp_path / "x"), "--calibration", str(tmp_path / "bad.jsonl")]) == 1
    assert "the chat template refuses a conversation of the calibration text" in capsys.readouterr().err
    assert main(["quantize", source, str(target), "--widths", "two"]) == 1
    assert "--widths two: numbers with commas" in capsys.readouterr().err
