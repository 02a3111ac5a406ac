"""Packed dense weights: every code where the layout says, and values within the format's step."""

import numpy as np
import pytest
import torch

from tfglm.errors import ConfigError
from tfglm.formats import groups

BITS = [4, 6, 8]


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.05


def code_in_piece(piece: np.ndarray, bits: int, row: int, column: int) -> int:
    """A code of a piece by the layout as written in weights.cuh, one value at a time."""
    g, half = row % 8, row // 8
    t, i = column % 32 // 8, column // 32 * 8 + column % 8
    lane = g * 4 + t
    if bits == 8:
        byte = [0, 2, 1, 3][i % 4]
        return int(piece[half * 512 + lane * 16 + i // 4 * 4 + byte])
    nibble = i % 8 // 2 + 4 * (i % 2)
    word = int(piece[lane * 16 + half * 8 + i // 8 * 4 :][:4].view("<u4")[0])
    code = word >> (4 * nibble) & 15
    if bits == 6:
        high = int(piece[512 + lane * 8 + half * 4 :][:4].view("<u4")[0])
        code |= (high >> (i // 2 * 2 + 16 * (i % 2)) & 3) << 4
    return code


@pytest.mark.parametrize("bits", BITS)
def test_every_code_lies_where_the_layout_says(bits: int) -> None:
    codes = groups.quantise(random_weight(37, 192), bits)
    packed = groups.pack(codes)
    assert packed.pieces.shape == (3, 3, groups.PIECE_BYTES[bits])
    pieces, scales = packed.pieces.numpy(), packed.scales.float().numpy()
    for row in range(37):
        for column in range(192):
            piece = pieces[row // 16, column // 64]
            assert code_in_piece(piece, bits, row % 16, column % 64) == int(codes.codes[row, column])
            pair = scales[row // 16, column // 64, row % 16]
            assert pair[0] == codes.scale[row, column // 64]
            assert pair[1] == codes.bias[row, column // 64]


@pytest.mark.parametrize("bits", BITS)
def test_unpack_is_the_inverse(bits: int) -> None:
    codes = groups.quantise(random_weight(20, 128, seed=1), bits)
    again = groups.unpack(groups.pack(codes))
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.scale, codes.scale)
    assert torch.equal(again.bias, codes.bias)


@pytest.mark.parametrize("bits", BITS)
def test_values_are_within_a_step_of_the_weight(bits: int) -> None:
    weight = random_weight(64, 256, seed=2)
    weight[3, 64:128] = 0.25  # a constant group has no step
    weight[4, :64] = 0
    codes = groups.quantise(weight, bits)
    values = groups.dequantise(codes).float()
    step = codes.scale.float().repeat_interleave(64, dim=1)
    slack = (
        weight.abs().unflatten(1, (-1, 64)).amax(dim=2).repeat_interleave(64, dim=1) * 2**-7
    )  # bf16 of bias and value
    assert ((values - weight).abs() <= step / 2 + slack).all()
    assert torch.equal(values[3, 64:128], torch.full((64,), 0.25))
    assert not values[4, :64].any()


def test_dequantised_values_are_rounded_once() -> None:
    codes = groups.quantise(random_weight(64, 128, seed=3), 8)
    got = groups.dequantise(codes).double().numpy()
    scale = codes.scale.double().numpy().repeat(64, axis=1)
    exact = codes.codes.double().numpy() * scale + codes.bias.double().numpy().repeat(64, axis=1)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 7)
    assert (np.abs(got - exact) <= spacing / 2).all()


def test_fp8_rows() -> None:
    weight = random_weight(33, 128, seed=4)
    weight[5] = 0
    packed = groups.pack_fp8(weight)
    assert packed.pieces.shape == (3, 2, 1024)
    codes, scale = groups.unpack_fp8(packed)
    assert codes.shape == (33, 128)
    values = codes.float() * scale[:, None]
    assert ((values - weight).abs() <= weight.abs() / 16 + weight.abs().amax(dim=1, keepdim=True) / 448 / 512).all()
    assert torch.equal(codes.float().abs().amax(dim=1) == 448, torch.arange(33) != 5)
    first = packed.pieces.numpy()[0, 0]
    raw = codes.view(torch.uint8)
    assert all(code_in_piece(first, 8, r, c) == int(raw[r, c]) for r in range(16) for c in range(64))


def test_what_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(ConfigError, match="96 columns"):
        groups.quantise(random_weight(16, 96), 4)
    with pytest.raises(ConfigError, match="5 bits"):
        groups.quantise(random_weight(16, 64), 5)
