"""The total order of every choice: higher value, then lower index, -0 as +0; against Python's stable sort."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.ops import order

LEAST, GREATEST = struct.unpack("<2f", struct.pack("<2I", 0x00000001, 0x7F7FFFFF))
# Each is a float32: two float64 that one float32 stands for would be apart here and equal there.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), LEAST, -LEAST, GREATEST, -GREATEST]),
    st.floats(width=32, allow_nan=False),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=40), st.data())
def test_best_is_the_stable_sort(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]  # -0.0 == 0.0 in Python too
    assert order.best(torch.tensor([values]), count)[0].tolist() == expected


def test_rows_are_apart() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0], [0.0, -0.0, -1.0], [-1.0, -3.0, -2.0]])
    assert order.best(values, 2).tolist() == [[1, 2], [0, 1], [0, 2]]


def test_keys_keep_every_bit_of_the_value() -> None:
    """Two neighbouring floats never compare equal, at any magnitude and either sign."""
    patterns = [0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFE]
    for pattern in patterns:
        low, high = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (pattern, pattern + 1))
        assert order.best(torch.tensor([[low, high], [-low, -high]]), 1).tolist() == [[1], [0]]


@pytest.mark.parametrize("width", [1, 70000])
def test_wide_rows_of_equal_values(width: int) -> None:
    assert order.best(torch.zeros(1, width), min(width, 50))[0].tolist() == list(range(min(width, 50)))


def test_indices_come_back_from_keys() -> None:
    indices = torch.tensor([0, 1, 2**31, 2**32 - 1])
    assert order.indices_of(order.keys(torch.tensor(-7.5), indices)).tolist() == indices.tolist()
