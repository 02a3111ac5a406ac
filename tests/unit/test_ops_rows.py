"""Row invariance of the reference's arithmetic: the bits of a row are the same alone, beside others, at any place."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tfglm.ops.rows import RowFunction, Rows, Shapes, broken_shapes

# Widths of a tiny model, odd ones included; and, beyond any model, products narrower than a vector register.
SHAPES = Shapes(
    linears=frozenset({(64, 72), (40, 85), (33, 5), (24, 1), (100, 17), (128, 1536), (7, 2000), (512, 48)}),
    experts=frozenset({(64, 96), (48, 64), (128, 768), (384, 128)}),
    groups=frozenset({(5, 12, 24), (5, 24, 20), (1, 12, 24), (16, 32, 8), (3, 7, 5)}),
    scores=frozenset({(5, 24, 16), (5, 8, 32), (1, 24, 64), (16, 48, 256), (64, 64, 16)}),
    sums=frozenset({(5, 16, 24), (5, 32, 24), (1, 16, 256), (16, 64, 48)}),
    shared=frozenset({(16, 24, 256), (1, 32, 256), (4, 128, 256)}),
    widths=frozenset({1, 3, 5, 16, 24, 31, 40, 64, 100, 1000, 2049, 6144}),
)


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_tiles_keep_the_promise_here(threads: int) -> None:
    assert broken_shapes(Rows(), SHAPES) == []


def test_rows_alone_keep_the_promise(threads: int) -> None:
    shapes = Shapes(
        linears=frozenset({(64, 72), (33, 5)}),
        groups=frozenset({(5, 12, 24)}),
        scores=frozenset({(5, 24, 16)}),
        sums=frozenset({(5, 16, 24)}),
        shared=frozenset({(16, 24, 256)}),
        widths=frozenset({5, 64}),
    )
    assert broken_shapes(Rows(alone=True), shapes) == []


class ByShape(Rows):
    """A kernel that adds in another order for one row than for several, as ordinary ones do."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().linear(x.flip(1), weight.flip(1)) if len(x) > 1 else super().linear(x, weight)


class PlaceDependent(Rows):
    """A kernel that adds in another order in every other place."""

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = super().batched(a, b)
        product[1::2] = torch.bmm(a.flip(2), b.flip(1))[1::2]
        return product


class CoarseLastSilu(Rows):
    """torch's own silu where it is vectorised: the last elements come from a scalar function that rounds otherwise."""

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        y = super().silu(x)
        y.view(-1)[-1] *= 1 + 2e-7
        return y


class CoarseLastCosine(Rows):
    """The same of cosines, which go through `each`."""

    def each(self, function: RowFunction, x: torch.Tensor) -> torch.Tensor:
        y = super().each(function, x)
        if function is torch.cos:
            y.view(-1)[-1] = function(x.reshape(-1)[-1].double()) * (1 + 2e-7)
        return y


class WholeWindowScale(Rows):
    """A statistic of the window instead of the row."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / x.abs().max() * weight


@pytest.mark.parametrize("kind", [ByShape, PlaceDependent, CoarseLastSilu, CoarseLastCosine, WholeWindowScale])
def test_broken_arithmetic_is_found(kind: type[Rows]) -> None:
    assert broken_shapes(kind(), SHAPES) != []


def test_verified_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ByShape.verified(SHAPES).alone
    [record] = caplog.records
    assert record.message.startswith("W_ROWS: ") and "a linear" in record.message


def test_verified_is_silent_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    assert not Rows.verified(Shapes(linears=frozenset({(64, 72)}))).alone
    assert caplog.records == []


def test_strided_rows_give_the_same_bits() -> None:
    """Parts of wider rows, as the forward pass cuts them out of stacked products."""
    rows, wide = Rows(), torch.randn(11, 100)
    part = wide[:, 30:71]
    weight, bias = torch.randn(41), torch.randn(41)
    assert torch.equal(rows.linear(part, torch.ones(3, 41)), rows.linear(part.clone(), torch.ones(3, 41)))
    assert torch.equal(rows.rms_norm(part, weight, 1e-5), rows.rms_norm(part.clone(), weight, 1e-5))
    assert torch.equal(rows.layer_norm(part, weight, bias, 1e-6), rows.layer_norm(part.clone(), weight, bias, 1e-6))
    assert torch.equal(rows.silu(part), rows.silu(part.clone()))


def test_blocks_of_a_wide_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a weight is cut into blocks does not depend on the rows, so the bits still do not."""
    monkeypatch.setattr("tfglm.ops.rows._PIECE_ELEMENTS", 64 * 40)
    assert broken_shapes(Rows(), Shapes(linears=frozenset({(40, 64 * 3 + 7)}))) == []
