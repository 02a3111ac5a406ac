"""A micro model learns on a CPU, and a run that is cut goes on as if it had not been."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from training import feed, run
from training.data.mixture import SHORT
from training.feed import Feed
from training.optim import orthogonalised

STEPS = 16


def arguments(out: Path, **fields: object) -> argparse.Namespace:
    given = {
        "out": out, "plan": "micro", "seconds": None, "steps": STEPS, "stop_after": float("inf"), "stop_at": None,
        "keep_every": 1e9, "checkpoint": None, "from_checkpoint": None, "seed": 0, "workers": 0, "device": "cpu",
    }  # fmt: skip
    return argparse.Namespace(**(given | fields))


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "_BLOCK_TOKENS", 256 * 12)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run.run(arguments(out))
    return out


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls(whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (whole / "checkpoint" / "config.json").is_file()
    monkeypatch.setattr(run, "_LOG_EVERY", 1)
    run.run(arguments(tmp_path, stop_at=STEPS))
    found = losses(tmp_path)
    assert len(found) == STEPS and found[-1] < found[0] - 0.4


def test_a_run_that_was_cut_ends_like_one_that_was_not(whole: Path, tmp_path: Path) -> None:
    run.run(arguments(tmp_path, stop_at=5))
    run.run(arguments(tmp_path, stop_at=13))
    run.run(arguments(tmp_path))
    expected = torch.load(whole / run.STATE, weights_only=True)
    found = torch.load(tmp_path / run.STATE, weights_only=True)
    assert found["step"] == STEPS and found["places"] == expected["places"]
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name


def test_a_checkpoint_can_be_trained_further(whole: Path, tmp_path: Path) -> None:
    trainer = run.run(arguments(tmp_path, from_checkpoint=whole / "checkpoint", stop_at=0))
    state = torch.load(whole / run.STATE, weights_only=True)["model"]
    for name, value in trainer.model.state_dict().items():
        rounded = value if name.endswith("e_score_correction_bias") else state[name].bfloat16().float()
        assert torch.equal(value, rounded if not name.endswith("e_score_correction_bias") else state[name]), name


def test_workers_make_the_same_rows(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_BLOCK_TOKENS", 1 << 19)  # as a worker has it
    tokenizer = (whole / "tokenizer.json").read_text()
    here, there = Feed(tokenizer, 3, 0), Feed(tokenizer, 3, 1, ahead=2)
    try:
        first, second = (one.take(SHORT.name, 2048, 3) for one in (here, there))
    finally:
        there.close()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_muon_makes_singular_values_alike() -> None:
    x = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-3
    values = torch.linalg.svdvals(orthogonalised(x, torch.float32))
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(orthogonalised(x.mT, torch.float32).mT, orthogonalised(x, torch.float32), atol=1e-5)
