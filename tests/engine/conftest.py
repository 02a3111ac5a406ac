"""Tests of the engine over ranks use the threads that stand for ranks in tests/ranks."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "ranks"))

_no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _no_gpu])])
def device(request: pytest.FixtureRequest) -> str:
    """Where the model of a module's tests is."""
    return str(request.param)
