"""Tests here need an NVIDIA GPU and are skipped without one."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU")
    return torch.device("cuda")
