"""Synthetic checkpoints: the same bytes every time, the published layout, and no half-written folders."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tfglm.checkpoint import synth
from tfglm.checkpoint.config import GenerationDefaults
from tfglm.checkpoint.names import TensorSpec
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import PRESETS, write_checkpoint
from tfglm.checkpoint.weights import _bfloat16, _normal_table, tensor_blocks
from tfglm.cli.main import main
from tfglm.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
SMALL = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    write_checkpoint(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_another_process_writes_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    code = f"from tfglm.checkpoint.synth import write_checkpoint; write_checkpoint({str(tmp_path / 'again')!r})"
    env = {**os.environ, "PYTHONHASHSEED": "12345", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT, timeout=120)
    assert digests(tmp_path / "again") == digests(tiny)


def test_weights_have_the_bytes_they_always_had(tiny: Path) -> None:
    """Numbers in other tests and benchmarks are of these weights; a change here must be meant."""
    with Checkpoint.open(tiny) as checkpoint:
        lm_head = checkpoint.read("lm_head.weight", rows=slice(0, 1)).view(torch.int16).numpy().tobytes()
        bias = checkpoint.read("model.layers.3.mlp.gate.e_score_correction_bias").numpy().tobytes()
    assert hashlib.sha256(lm_head).hexdigest()[:16] == "21d982da69fa4e4a"
    assert hashlib.sha256(bias).hexdigest()[:16] == "fae38ecb15385eca"


def test_seed_and_name_decide_the_values(tmp_path: Path) -> None:
    spec = TensorSpec((64, 64))
    values = {
        (name, seed): b"".join(tensor_blocks(name, spec, seed)) for name in ("a.weight", "b.weight") for seed in (0, 1)
    }
    assert len(set(values.values())) == 4


def test_layout(tiny: Path) -> None:
    shards = sorted(file.name for file in tiny.glob("*.safetensors"))
    assert {file.name for file in tiny.iterdir()} == FILES | set(shards)
    assert 3 <= len(shards) <= 4
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert sum((tiny / name).stat().st_size for name in shards) < 25_000_000
    with Checkpoint.open(tiny) as checkpoint:
        assert index["metadata"]["total_size"] == checkpoint.nbytes
        for entry in checkpoint.entries.values():
            assert entry.offset % (4 if entry.dtype == "F32" else 2) == 0


def test_tiny_has_what_the_tests_need(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        config = checkpoint.config
    assert config.num_attention_heads % 3 != 0
    assert config.moe_intermediate_size % 128 == 0
    assert config.moe_intermediate_size >= 3 * 128
    assert config.hidden_size % 128 == 0
    assert config.index_topk <= 64 < config.max_position_embeddings
    assert config.indexer_types.count("full") >= 3
    assert config.indexer_types.count("shared") >= 3
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.num_nextn_predict_layers == 1
    assert config.vocab_size % 64 == 0
    defaults = GenerationDefaults.from_file(tiny / "generation_config.json")
    assert defaults == GenerationDefaults(temperature=1.0, top_p=0.95, eos_token_ids=config.eos_token_ids)


def test_full_layers_has_the_real_widths() -> None:
    from tfglm.checkpoint.presets import preset_config

    raw = preset_config("full-layers", {"num_hidden_layers": 7, "n_routed_experts": 256})
    assert raw["vocab_size"] == 154880
    assert raw["eos_token_id"] == [154820, 154827, 154829]
    assert raw["indexer_types"] == ["full"] * 3 + ["shared"] * 3 + ["full"]
    assert (raw["hidden_size"], raw["num_attention_heads"], raw["index_topk"]) == (6144, 64, 2048)


def test_values_are_distributed_as_meant(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        read = {name: checkpoint.read(name).double().numpy() for name in checkpoint.entries}
    hidden = 128
    for name, mean, std in [
        ("model.embed_tokens.weight", 0, 1),
        ("lm_head.weight", 0, 2.5 * hidden**-0.5),
        ("model.layers.5.mlp.experts.2.gate_proj.weight", 0, hidden**-0.5),
        ("model.layers.5.mlp.experts.2.down_proj.weight", 0, 0.5 * 384**-0.5),
        ("model.layers.8.eh_proj.weight", 0, (2 * hidden) ** -0.5),
        ("model.norm.weight", 1, 0.1),
    ]:
        tensor = read[name]
        error = 5 * std / tensor.size**0.5
        assert abs(tensor.mean() - mean) < error, name
        assert abs(tensor.std() - std) < error, name
    for name, tensor in read.items():
        if name.endswith(("e_score_correction_bias", "k_norm.bias")):
            assert 0.01 < tensor.std() < 0.4, name
        assert np.isfinite(tensor).all(), name


def test_normal_table_against_the_normal_distribution() -> None:
    from statistics import NormalDist

    table = _normal_table().astype(np.float64)
    assert len(table) == 65536
    assert (np.diff(table) >= 0).all()
    assert np.allclose(table, -table[::-1])
    exact = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(0, 65536, 64)])
    assert np.abs(table[::64] - exact)[16:-16].max() < 0.02


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.concatenate(
        [np.random.default_rng(0).normal(size=10_000), [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 2**-140]]
    )
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (_bfloat16(values) == expected).all()


def test_shard_size(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x", shard_bytes=100_000, **SMALL)
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        sizes: dict[Path, list[int]] = {}
        for entry in checkpoint.entries.values():
            sizes.setdefault(entry.file, []).append(entry.nbytes)
    assert len(sizes) > 10
    assert all(sum(parts) <= 100_000 or len(parts) == 1 for parts in sizes.values())
    with pytest.raises(ConfigError, match="shard size is 0"):
        write_checkpoint(tmp_path / "y", shard_bytes=0)


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("huge", {}, "preset is 'huge'; there are tiny, small, full-layers"),
        ("tiny", {"num_layers": 4}, "num_layers is no field of config.json .* did you mean num_hidden_layers"),
        ("tiny", {"zzz": 4}, "zzz is no field .* fields: architectures"),
        ("tiny", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; supported: at most n_routed_experts"),
        ("tiny", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("tiny", {"vocab_size": 300}, "vocab_size is 300; at least 316"),
        ("tiny", {"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_presets_and_fields_are_checked_first(
    tmp_path: Path, preset: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(tmp_path / "x", preset, **overrides)
    assert not (tmp_path / "x").exists()


def test_overrides(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "x", num_nextn_predict_layers=0, index_topk=8, vocab_size=384, **SMALL)
    assert (config.num_hidden_layers, config.index_topk, config.vocab_size) == (2, 8, 384)
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert checkpoint.config == config
    types = ["full", "shared", "shared"]
    config = write_checkpoint(tmp_path / "y", indexer_types=types, **{**SMALL, "num_hidden_layers": 3})
    assert list(config.indexer_types) == types


def test_a_full_folder_is_refused_and_forced(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    write_checkpoint(folder, shard_bytes=100_000, **SMALL)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty.*--force"):
        write_checkpoint(folder, **SMALL)
    write_checkpoint(folder, seed=1, force=True, **SMALL)
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.glob("*.safetensors"))) <= 4  # the many shards of the first are gone
    Checkpoint.open(folder).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(tmp_path / "file", force=True)


def test_only_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no checkpoint to replace"):
        write_checkpoint(tmp_path / "home", force=True, **SMALL)
    assert [file.name for file in (tmp_path / "home").iterdir()] == ["notes.txt"]
    # What a killed run leaves does not stop the next one.
    (tmp_path / "killed" / ".synth-x").mkdir(parents=True)
    write_checkpoint(tmp_path / "killed", force=True, **SMALL)
    Checkpoint.open(tmp_path / "killed").close()


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    write_checkpoint(folder, **SMALL)
    before = digests(folder)

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(folder, seed=1, force=True, progress=fail, **SMALL)
    assert digests(folder) == before


def test_no_room_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = synth.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GiB; 0\.0 GiB are free"):
        write_checkpoint(tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "x", progress=lambda done, total: calls.append((done, total)), **SMALL)
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert done == sorted(done)
    assert totals == {done[-1]}


def test_command(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", str(tmp_path / "a")]) == 0
    assert digests(tmp_path / "a") == digests(tiny)
    flags = ["--layers", "2", "--experts", "6", "--set", "first_k_dense_replace=1", "--set", "vocab_size=384"]
    assert main(["synth", str(tmp_path / "b"), *flags, "--seed", "3", "--shard-mib", "1"]) == 0
    with Checkpoint.open(tmp_path / "b") as checkpoint:
        assert (checkpoint.config.num_hidden_layers, checkpoint.config.n_routed_experts) == (2, 6)
    assert "2 layers, 6 experts" in capsys.readouterr().err
    assert main(["synth", str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err.startswith("tfglm: E_CHECKPOINT:")
    assert main(["synth", str(tmp_path / "c"), "--set", "index_topk"]) == 1
    assert "FIELD=VALUE" in capsys.readouterr().err
    assert main(["synth", str(tmp_path / "c"), "--set", "hidden_act=gelu"]) == 1
    assert "hidden_act is 'gelu'" in capsys.readouterr().err


def test_every_preset_is_valid() -> None:
    from tfglm.checkpoint.presets import preset_config

    for preset in PRESETS:
        preset_config(preset, {})


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synth, "_write_small_files", full)
    with pytest.raises(CheckpointError, match="writing the checkpoint failed: No space left on device"):
        write_checkpoint(tmp_path / "x", **SMALL)
    assert list((tmp_path / "x").iterdir()) == []
