"""What the launchers of the EXL3 expert kernels refuse before anything runs; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tfglm.errors import CheckpointError
from tfglm.ops import exl3_experts_cuda as experts_cuda

HIDDEN, WIDTH, EXPERTS = 256, 128, 2


def trellis(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.zeros(rows // 16, columns // 16, 16 * bits, dtype=torch.int16)


def tables(
    width: int = WIDTH, down_columns: int = HIDDEN, gate_bits: int = 3, first_columns: int | None = None
) -> experts_cuda.ExpertTables:
    half, own = torch.float16, width if first_columns is None else first_columns
    return experts_cuda.expert_tables(
        [trellis(HIDDEN, own, gate_bits), trellis(HIDDEN, width, 2)],
        [trellis(HIDDEN, own, 3), trellis(HIDDEN, width, 2)],
        [trellis(own, down_columns, 4), trellis(width, HIDDEN, 2)],
        suh=torch.ones(HIDDEN, dtype=half),
        svh=torch.ones(2, EXPERTS, width, dtype=half),
        down_suh=torch.ones(EXPERTS, width, dtype=half),
        down_svh=torch.ones(EXPERTS, HIDDEN, dtype=half),
        codebook="mcg",
    )


def test_tables_state_what_the_kernels_need() -> None:
    t = tables()
    assert (t.experts, t.hidden, t.width, t.widest) == (EXPERTS, HIDDEN, WIDTH, 8)
    assert t.paired
    assert t.shared_scale
    assert not t.all_widths
    assert t.k2.tolist() == [[6, 4], [6, 4], [8, 4]]
    assert t.trellis.flatten().tolist() == [w.data_ptr() for w in t.weights]
    other = tables(gate_bits=5)
    assert not other.paired
    assert other.all_widths


def test_experts_may_differ_in_their_columns() -> None:
    assert tables(first_columns=0).columns.tolist() == [0, WIDTH]
    assert tables(width=256, first_columns=128).columns.tolist() == [128, 256]


def test_sizes_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="expert width is 192"):
        tables(width=192)
    with pytest.raises(CheckpointError, match="an expert has 256 columns on this rank and scales for 128"):
        tables(first_columns=256)
    with pytest.raises(CheckpointError, match=r"trellis 4 has shape \(8, 8, 64\).*expected \(8, 16\) tiles"):
        tables(down_columns=128)


@pytest.mark.parametrize("path", [experts_cuda.decode, experts_cuda.prompt])
@pytest.mark.parametrize("wrong", ["x", "picks", "weights", "out", "shared"])
def test_tensors_that_the_kernels_would_misread_are_refused(path: object, wrong: str) -> None:
    good = {
        "x": torch.zeros(3, HIDDEN, dtype=torch.bfloat16),
        "picks": torch.zeros(3, 2, dtype=torch.int32),
        "weights": torch.zeros(3, 2),
        "out": torch.zeros(3, HIDDEN),
        "shared": torch.zeros(3, HIDDEN),
    }
    strided = torch.zeros(good[wrong].shape[1], good[wrong].shape[0], dtype=good[wrong].dtype).T
    for bad in (good[wrong].to(torch.float64), strided):
        given = {**good, wrong: bad}
        with pytest.raises(ValueError, match=f"{wrong} is torch"):
            path(tables(), given["x"], given["picks"], given["weights"], None, given["out"], given["shared"])  # type: ignore[operator]


def test_windows_larger_than_the_kernels_take_are_refused() -> None:
    for path, rows in ((experts_cuda.decode, 17), (experts_cuda.prompt, 4097)):
        x, picks = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{rows} rows"):
            path(tables(), x, picks, torch.zeros(rows, 2), None, torch.zeros(rows, HIDDEN))  # type: ignore[arg-type]


def test_parts_depend_on_the_hidden_size_alone_and_divide_it() -> None:
    for hidden in range(128, 8192, 128):
        assert hidden // 128 % experts_cuda.parts_of(hidden) == 0
    assert experts_cuda.parts_of(6144) == experts_cuda.parts_of(4096) == 8
