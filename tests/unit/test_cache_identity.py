"""Pages of one model are never found by another, nor by the same one under other settings."""

import os
from pathlib import Path

import pytest

from tfglm.cache.identity import code_digest, identity

FACTS = {"kv": "bf16", "threads": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(200_000))
        os.utime(tmp_path / name, ns=(5, 5))
    return tmp_path


def rewrite(file: Path, at: int) -> None:
    """Change a byte and put the time of change back."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(5, 5))


def test_the_same_is_the_same(checkpoint: Path) -> None:
    known = identity(checkpoint, FACTS)
    assert len(known) == 32
    (checkpoint / "README.md").write_text("no part of the model")
    assert identity(checkpoint, dict(reversed(FACTS.items()))) == known


@pytest.mark.parametrize("facts", [{}, {"kv": "bf16"}, {"kv": "fp32", "threads": 2}, {"kv": "bf16", "threads": 3}])
def test_other_facts_are_another(facts: dict[str, object], checkpoint: Path) -> None:
    assert identity(checkpoint, facts) != identity(checkpoint, FACTS)


@pytest.mark.parametrize("change", ["config", "first bytes", "last bytes", "time", "size", "name", "gone"])
def test_another_checkpoint_is_another(change: str, checkpoint: Path) -> None:
    known, file = identity(checkpoint, FACTS), checkpoint / "model-2.safetensors"
    match change:
        case "config":
            (checkpoint / "config.json").write_text('{"hidden_size": 9}')
        case "first bytes":
            rewrite(file, 3)
        case "last bytes":
            rewrite(file, 199_999)
        case "time":
            os.utime(file, ns=(5, 6))
        case "size":
            file.write_bytes(bytes(200_001))
            os.utime(file, ns=(5, 5))
        case "name":
            file.rename(checkpoint / "model-3.safetensors")
        case "gone":
            file.unlink()
    assert identity(checkpoint, FACTS) != known


def test_other_sources_are_another_model(tmp_path: Path) -> None:
    for folder in ("kernels", "models", "server"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.cu").write_text("a")
    known = code_digest(tmp_path)
    (tmp_path / "server" / "one.cu").write_text("computes nothing that is cached")
    (tmp_path / "models" / "one.pyc").write_text("made of a source")
    assert code_digest(tmp_path) == known
    (tmp_path / "kernels" / "one.cu").write_text("b")
    assert code_digest(tmp_path) != known
    known = code_digest(tmp_path)
    (tmp_path / "layout.py").write_text("another rank adds first")
    assert code_digest(tmp_path) != known
    assert code_digest() == code_digest() != code_digest(tmp_path)
