"""What the GPU's operations know of a weight that they hold. Nothing is launched: the weights are in host memory."""

from __future__ import annotations

import pytest
import torch

from tfglm.ops import cuda_linear
from tfglm.ops.cuda import CudaOps, Precision


def test_a_weight_at_the_address_of_one_that_is_gone_is_its_own() -> None:
    """As when layers come and go one by one: what was known of the old weight must not rule the new one."""
    ops, no_rows = CudaOps(Precision(), torch.device("cpu")), torch.empty(0, 64, dtype=torch.bfloat16)
    memory = torch.randn(48, 64).bfloat16()  # what an allocator gives out twice
    for float_out, dtype in ((True, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
        held = ops.hold(memory, "bf16", float_out=float_out)
        assert held.data_ptr() == memory.data_ptr()
        assert ops.linear(no_rows, held).dtype == dtype


@pytest.mark.parametrize("kind", ["q4", "q6", "q8", "fp8"])
def test_a_weight_converted_in_slabs_is_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(85, 192)
    whole = cuda_linear.pack(weight, kind)
    monkeypatch.setattr(cuda_linear, "_SLAB", 192 * 40)
    parts = cuda_linear.pack(weight, kind)
    assert torch.equal(parts.data, whole.data)
    assert parts.scales is not None and whole.scales is not None and torch.equal(parts.scales, whole.scales)
