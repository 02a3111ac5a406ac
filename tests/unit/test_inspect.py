"""`tfglm inspect`: every tensor counted once, widths by layer, and ranks that add up to the whole."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from tfglm.checkpoint.synth import write_checkpoint
from tfglm.cli.main import main

FIELDS = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
SIZES = {"BF16": 2, "F32": 4, "I16": 2, "F16": 2, "I32": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("inspect")
    write_checkpoint(out / "plain", "tiny", 0, **FIELDS)
    write_checkpoint(out / "exl3", "tiny", 0, expert_bits=2.75, **FIELDS)
    return {"plain": out / "plain", "exl3": out / "exl3"}


def facts(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["inspect", str(path), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def headers(path: Path) -> dict[str, tuple[str, int]]:
    """Name -> dtype and bytes, read by the safetensors library."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as shard:
            for name in shard.keys():  # noqa: SIM118
                part = shard.get_slice(name)
                count = 1
                for size in part.get_shape():
                    count *= size
                found[name] = part.get_dtype(), count * SIZES[part.get_dtype()]
    return found


@pytest.mark.parametrize("which", ["plain", "exl3"])
def test_every_byte_belongs_to_one_kind(
    which: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found, stored = facts(folders[which], capsys), headers(folders[which])
    assert sum(kind["nbytes"] for kind in found["kinds"]) == sum(size for _, size in stored.values())
    assert sum(kind["tensors"] for kind in found["kinds"]) == len(stored)
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    routed = sum(size for name, (_, size) in stored.items() if ".mlp.experts." in name and ".layers.4." not in name)
    assert kinds["routed experts"]["nbytes"] == routed
    assert kinds["routed experts"]["parameters"] == 3 * 8 * 3 * 128 * 384
    assert set(kinds["attention"]["stored"]) == {"BF16"}
    assert set(kinds["router"]["stored"]) == {"BF16", "F32"}
    assert set(kinds["routed experts"]["stored"]) == {"BF16" if which == "plain" else "EXL3"}


def test_quantised_and_plain_hold_the_same_parameters(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, exl3 = (facts(folders[name], capsys) for name in ("plain", "exl3"))
    assert plain["model"]["parameters"] == exl3["model"]["parameters"]
    assert plain["layers"] == []
    assert [layer["layer"] for layer in exl3["layers"]] == [1, 2, 3, 4]
    for layer in exl3["layers"]:
        assert layer["mean"] == 2.75 and layer["paired"] and layer["codebooks"] == ["mcg"]
        assert sum(layer["widths"].values()) == 24
        assert sum(float(width) * count for width, count in layer["widths"].items()) == 2.75 * 24


def test_ranks_add_up(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    [whole] = facts(folders["exl3"], capsys, "--ranks", "1")["ranks"]
    parts = facts(folders["exl3"], capsys, "--ranks", "3")["ranks"]
    assert len(parts) == 3
    for kind in ("experts", "vocabulary"):
        held = sum(part[kind] for part in parts)
        assert whole[kind] <= held < 1.15 * whole[kind]  # vectors that every rank needs are held by each
        assert max(part[kind] for part in parts) < 0.5 * whole[kind]


def test_tables(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folders["exl3"])]) == 0
    shown = capsys.readouterr().out
    for text in ("Bytes by kind", "routed experts", "EXL3 experts", "2.750", "mcg", "Weights of each rank"):
        assert text in shown
    [row] = [line for line in shown.splitlines() if "│ norms" in line]
    assert re.fullmatch(r"│ norms +│ +\d+ │ +[\d,]+ │ +[\d.]+ k?B │ +16\.000 │ BF16 [\d.]+ k?B +│", row), row
    assert main(["inspect", str(folders["plain"] / "nowhere")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert main(["inspect", str(folders["plain"]), "--ranks", "9"]) == 1
    assert "1 to 8 ranks; 9 were asked for" in capsys.readouterr().err
