"""Latent cache rows: the byte layout, the rounding rules and the errors that the format is known for."""

import numpy as np
import pytest
import torch

from tfglm.formats import latent
from tfglm.formats.latent import KvFormat

FORMATS = list(KvFormat)


def bf16_gaussian(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(scale)
    return torch.from_numpy(values).bfloat16().float().numpy()


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("kv", "bytes_a_token"), [("bf16", 96_640), ("fp8", 57_456), ("fp4", 39_760), ("fp4x", 31_976)]
)
def test_bytes_a_token_of_glm53_with_its_mtp_layer(kv: str, bytes_a_token: int) -> None:
    row = latent.row_bytes(KvFormat(kv), 512, 64, 128)
    assert 79 * (row.latent + row.rotary) + 22 * row.index == bytes_a_token


def test_bf16_bytes_are_torch_s() -> None:
    values = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32) * 100
    want = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
    assert np.array_equal(latent.pack_bf16(values), want)
    assert np.array_equal(latent.unpack_bf16(want), torch.from_numpy(values).bfloat16().float().numpy())


def test_e4m3_codes_are_torch_s_up_to_saturation() -> None:
    table = latent.decode_e4m3(np.arange(256, dtype=np.uint8))
    middles = (table[:126] + table[1:127]) / 2
    random = np.random.default_rng(2).standard_normal(20_000).astype(np.float32) * 100
    values = np.concatenate(
        [table[:127], table[128:255], middles, -middles, random, np.float32([448, -448, 0.0, -0.0])]
    )
    values = values[np.abs(values) <= 448]
    want = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(latent.encode_e4m3(values), want)
    assert latent.encode_e4m3(np.float32([464, 465, 1e30, -1e30])).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
    finite = np.delete(np.arange(256), [127, 255]).astype(np.uint8)
    want_values = torch.from_numpy(finite).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(latent.decode_e4m3(finite), want_values)


def test_e2m1_ties_go_up_and_zero_has_no_sign() -> None:
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    assert latent.encode_e2m1(ties).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert latent.encode_e2m1(np.nextafter(ties, np.float32(0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert latent.encode_e2m1(np.float32([-0.2, -0.0, -0.25, -9, 9])).tolist() == [0, 0, 9, 15, 7]
    assert latent.decode_e2m1(np.arange(16, dtype=np.uint8)).tolist() == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]


def test_row_scale_is_the_power_of_two_that_leaves_codes_within_256() -> None:
    rows = np.float32([[0.9, 0], [1, -0.5], [1.0001, 0], [-3, 2], [0, 0], [1e-45, 0], [3e38, 0]])
    scale, reciprocal = latent.row_scale(rows)
    exponents = np.log2(scale.astype(np.float64))
    assert exponents.tolist() == [-8, -8, -7, -6, -126, -126, 120]
    assert np.array_equal(scale.astype(np.float64) * reciprocal, np.ones(7))


def test_fp8_row_layout() -> None:
    values = np.zeros((2, 512), np.float32)
    values[0, :3] = [1, -0.5, 2]
    packed = latent.pack_fp8_latent(values)
    assert packed.shape == (2, 528)
    # amax 2 -> scale 2^-7: codes of 128, -64, 256
    assert packed[0, :3].tolist() == [0x70, 0x68 | 0x80, 0x78]
    assert packed[0, 512:516].view("<f4")[0] == 2.0**-7
    assert packed[1, 512:516].view("<f4")[0] == 2.0**-126
    assert not packed[1, :512].any()
    assert not packed[:, 516:].any()


def test_fp4_row_layout() -> None:
    values = np.zeros((1, 512), np.float32)
    values[0, 16:20] = [6, -3, 0.5, 1]
    packed = latent.pack_fp4_latent(values)
    assert packed.shape == (1, 304)
    scale = packed[0, 288:292].view("<f4")[0]
    assert scale == 2.0 ** (3 - 8)
    assert latent.decode_e4m3(packed[0, 256:288])[1] * scale == 1
    assert packed[0, 256] == 0
    assert packed[0, 8:10].tolist() == [7 | (5 | 8) << 4, 1 | 2 << 4]  # even value in the low nibble
    assert not packed[0, 292:].any()


def test_fp4x_keeps_the_rotary_scale_in_word_73() -> None:
    latents, rotaries = bf16_gaussian(3, 512), bf16_gaussian(3, 64, seed=1, scale=10)
    packed, codes = latent.pack_rows(KvFormat.FP4X, latents, rotaries)
    assert codes.shape == (3, 64)
    scale, _ = latent.row_scale(rotaries)
    assert np.array_equal(packed.view("<f4")[:, 73], scale)
    packed[:, 292:296] = 0
    assert np.array_equal(packed, latent.pack_fp4_latent(latents))
    keys = bf16_gaussian(4, 128, seed=2)
    assert latent.pack_index(KvFormat.FP4X, keys).shape == (4, 132)


@pytest.mark.parametrize(("kv", "error"), [("bf16", 0.0), ("fp8", 0.0266), ("fp4", 0.095), ("fp4x", 0.095)])
def test_relative_error_on_gaussian_rows(kv: str, error: float) -> None:
    rows = bf16_gaussian(400, 512)
    got, _ = latent.unpack_rows(KvFormat(kv), *latent.pack_rows(KvFormat(kv), rows, rows[:, :64]), 512)
    assert relative_error(got, rows) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("kv", FORMATS)
def test_decoded_rows_are_exact_in_bf16_and_encode_to_themselves(kv: KvFormat) -> None:
    latents, rotaries = bf16_gaussian(200, 512, seed=3, scale=3), bf16_gaussian(200, 64, seed=4)
    latents[0] = 0
    packed = latent.pack_rows(kv, latents, rotaries)
    values = latent.unpack_rows(kv, *packed, 512)
    for part in values:
        assert np.array_equal(part, torch.from_numpy(part).bfloat16().float().numpy())
    again = latent.unpack_rows(kv, *latent.pack_rows(kv, *values), 512)
    assert all(np.array_equal(a, b) for a, b in zip(again, values, strict=True))
    assert not values[0][0].any()
    keys = latent.unpack_index(kv, latent.pack_index(kv, rotaries))
    assert np.array_equal(keys, latent.unpack_index(kv, latent.pack_index(kv, keys)))


@pytest.mark.parametrize("kv", FORMATS)
def test_a_row_s_bytes_do_not_depend_on_its_neighbours(kv: KvFormat) -> None:
    latents, rotaries = bf16_gaussian(9, 48, seed=5), bf16_gaussian(9, 16, seed=6)
    whole = latent.pack_rows(kv, latents, rotaries)
    row = latent.row_bytes(kv, 48, 16, 32)
    assert [part.shape[1] for part in whole] == [row.latent, row.rotary]
    for i in range(9):
        alone = latent.pack_rows(kv, latents[i : i + 1], rotaries[i : i + 1])
        assert all(np.array_equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))
