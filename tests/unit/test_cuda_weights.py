"""What the GPU's operations know of a weight that they hold. Nothing is launched: the weights are in host memory."""

from __future__ import annotations

import pytest
import torch

from tfglm.ops import cuda_linear
from tfglm.ops.cuda import CudaOps, Precision


def test_a_weight_at_the_address_of_one_that_is_gone_is_its_own() -> None:
    """As when layers come and go one by one: what was known of the old weight must not rule the new one."""
    ops, no_rows = CudaOps(Precision(), torch.device("cpu")), torch.empty(0, 64, dtype=torch.bfloat16)

    def held(float_out: bool) -> torch.Tensor:
        return ops.hold(torch.randn(48, 64).bfloat16(), "bf16", float_out=float_out)

    sums = held(float_out=True)
    address = sums.data_ptr()
    assert ops.linear(no_rows, sums).dtype == torch.float32
    del sums
    kept = []
    while not kept or kept[-1].data_ptr() != address:
        assert len(kept) < 1000, "the allocator never gives an address again"
        kept.append(held(float_out=False))
    assert ops.linear(no_rows, kept[-1]).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["q4", "q6", "q8", "fp8"])
def test_a_weight_converted_in_slabs_is_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(85, 192)
    whole = cuda_linear.pack(weight, kind)
    monkeypatch.setattr(cuda_linear, "_SLAB", 192 * 40)
    parts = cuda_linear.pack(weight, kind)
    assert torch.equal(parts.data, whole.data)
    assert parts.scales is not None and whole.scales is not None and torch.equal(parts.scales, whole.scales)
