"""Tests here need an NVIDIA GPU and are skipped without one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "ranks"))  # the threads that stand for ranks


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU")
    return torch.device("cuda")
