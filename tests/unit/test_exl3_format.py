"""EXL3 decode and pack against stored vectors of the reference implementation, and against the format's definition."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tfglm.errors import CheckpointError
from tfglm.formats import exl3
from tfglm.formats.exl3_code import CODEBOOKS, MARKERS, codebook_table, window_ends
from tfglm.formats.hadamard import butterfly, rotate, signs_matrix

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "exl3_vectors.npz")
PACKS = sorted(key.removesuffix("_trellis_i16") for key in VECTORS.files if key.startswith("k2_") and "trellis" in key)
WIDTHS = [(bits, codebook) for codebook in CODEBOOKS for bits in range(1, 9)]
WIDTHS += [(bits, "mul1") for bits in (1.5, 2.5, 3.5)]


def random_trellis(bits: float, k: int = 32, n: int = 48) -> np.ndarray:
    random = np.random.default_rng(int(bits * 2))
    return random.integers(-(2**15), 2**15, (k // 16, n // 16, int(16 * bits)), dtype=np.int16)


@pytest.mark.parametrize(
    ("codebook", "digest"),
    [
        ("3inst", "ad88de2dcff5bb05fff2faec37cceceb"),
        ("mcg", "95383563929baa9d1ae5de0be2249028"),
        ("mul1", "bc48d02cb1c14939dc47b90f870dd689"),
    ],
)
def test_codebook_tables(codebook: str, digest: str) -> None:
    table = codebook_table(codebook)
    assert hashlib.sha256(table.astype("<f2").tobytes()).hexdigest()[:32] == digest
    assert np.array_equal(table.view(np.uint16), VECTORS[f"codebook_{codebook}_u16"])


def test_there_are_vectors_for_every_codebook() -> None:
    assert {name.split("_")[2] for name in PACKS} == set(CODEBOOKS)
    assert len(PACKS) == 11


@pytest.mark.parametrize("name", PACKS)
def test_stored_packs(name: str) -> None:
    bits, codebook = int(name.split("_")[1]) / 2, name.split("_")[2]
    trellis, states = VECTORS[f"{name}_trellis_i16"], VECTORS[f"{name}_states_u16"]
    assert exl3.trellis_bits(trellis, codebook) == bits
    assert np.array_equal(exl3.unpack_tiles(trellis), states)
    assert np.array_equal(exl3.pack_tiles(states, bits), trellis)
    weights = exl3.decode_tiles(trellis, codebook)
    assert weights.dtype == np.float16
    assert np.array_equal(weights.view(np.uint16), VECTORS[f"{name}_wrot_f16"].view(np.uint16))


def test_stored_linear() -> None:
    trellis, suh, svh = (VECTORS[f"linear_{name}"] for name in ("trellis_i16", "suh", "svh"))
    expected = VECTORS["linear_w_f64"]
    weights = exl3.reconstruct(trellis, suh, svh, "mcg")
    assert weights.dtype == np.float32
    # The stored float64 matrix carries its own last-bit errors, which may tip a rounding to the neighbour.
    assert np.all(np.abs(weights - expected) <= np.spacing(np.abs(expected).astype(np.float32)) * (0.5 + 1e-3))
    assert np.mean(weights == expected.astype(np.float32)) > 0.999

    rotated = torch.from_numpy(exl3.decode_tiles(trellis, "mcg"))
    x = torch.from_numpy(VECTORS["linear_x"])
    y = exl3.forward(x, rotated, torch.from_numpy(suh), torch.from_numpy(svh))
    assert y.dtype == torch.float32
    # One fp16 rounding of each rotated input (2^-11 relative) is the only error above float32's.
    bound = (
        2.0**-11
        * np.linalg.norm(VECTORS["linear_x"].astype(np.float64), axis=1)[:, None]
        * np.linalg.norm(expected, axis=0)
    )
    assert np.all(np.abs(y.numpy() - VECTORS["linear_y_f64"]) < bound)


@pytest.mark.parametrize(("bits", "codebook"), WIDTHS)
def test_windows_bit_by_bit(bits: float, codebook: str) -> None:
    """Every state against a walk over the ring one bit at a time."""
    trellis = random_trellis(bits)
    words = trellis.view("<u4")[1, 2]
    ring = [int(word) >> (31 - bit) & 1 for word in words for bit in range(32)]
    assert len(ring) == 256 * bits
    states = exl3.unpack_tiles(trellis)
    for position in range(256):
        end = int((position + 1) * 2 * bits) // 2
        window = [ring[(end - 16 + i) % len(ring)] for i in range(16)]
        assert states[1, 2, position] == int("".join(map(str, window)), 2)
    assert np.array_equal(exl3.pack_tiles(states, bits), trellis)
    values = exl3.decode_tiles(trellis, codebook)
    assert np.array_equal(exl3.to_stream_order(values)[1, 2], codebook_table(codebook)[states[1, 2]])


def test_tile_order_is_that_of_the_matrix_instruction() -> None:
    matrix = np.arange(32 * 48).reshape(32, 48)
    tiles = exl3.to_stream_order(matrix)
    for position in range(256):
        lane, slot = position >> 3, position & 7
        row = 2 * (lane & 3) + (slot & 1) + 8 * ((slot >> 1) & 1)
        column = (lane >> 2) + 8 * (slot >> 2)
        assert tiles[1, 2, position] == matrix[16 + row, 32 + column]
    assert np.array_equal(exl3.from_stream_order(tiles), matrix)


def test_reconstruct_is_the_product_of_its_factors() -> None:
    random = np.random.default_rng(3)
    trellis = random_trellis(2.5, 256, 128)
    suh, svh = random.standard_normal(256).astype(np.float16), random.standard_normal(128).astype(np.float16)
    block = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    rotation = np.kron(np.eye(2), block)
    rotated = exl3.decode_tiles(trellis, "mul1").astype(np.float64)
    expected = np.diag(suh.astype(np.float64)) @ rotation @ rotated @ block @ np.diag(svh.astype(np.float64))
    np.testing.assert_allclose(exl3.reconstruct(trellis, suh, svh, "mul1"), expected, rtol=1e-6, atol=1e-6)


def test_hadamard_rotation() -> None:
    x = np.random.default_rng(0).standard_normal((3, 256))
    np.testing.assert_allclose(rotate(rotate(x)), x, atol=1e-12)
    np.testing.assert_allclose(butterfly(x), (x.reshape(-1, 128) @ signs_matrix()).reshape(3, 256), atol=1e-12)
    assert torch.equal(butterfly(torch.from_numpy(x)), torch.from_numpy(butterfly(x)))


def test_forward_of_a_row_does_not_depend_on_its_neighbours() -> None:
    random = torch.Generator().manual_seed(0)
    rotated = torch.from_numpy(exl3.decode_tiles(random_trellis(3, 256, 384), "mcg"))
    suh, svh = torch.randn(256, generator=random).half(), torch.randn(384, generator=random).half()
    x = torch.randn(37, 256, generator=random).bfloat16()
    together = exl3.forward(x, rotated, suh, svh)
    for row in range(37):
        assert torch.equal(exl3.forward(x[row : row + 1], rotated, suh, svh)[0], together[row])
    assert exl3.forward(x[:0], rotated, suh, svh).shape == (0, 384)


def test_signs_of_old_packs() -> None:
    words = np.array([1, -32768, 0, 6], dtype=np.int16)
    expected = np.ones(64, dtype=np.float16)
    expected[[0, 31, 49, 50]] = -1
    assert np.array_equal(exl3.signs(words), expected)


def test_torch_in_torch_out() -> None:
    trellis = random_trellis(3, 128, 128)
    suh = np.linspace(-1, 1, 128).astype(np.float16)
    as_torch = torch.from_numpy(trellis)
    assert torch.equal(exl3.decode_tiles(as_torch, "mcg"), torch.from_numpy(exl3.decode_tiles(trellis, "mcg")))
    assert torch.equal(exl3.pack_tiles(exl3.unpack_tiles(as_torch), 3), as_torch)
    w = exl3.reconstruct(as_torch, torch.from_numpy(suh), torch.from_numpy(suh), "mcg")
    assert torch.equal(w, torch.from_numpy(exl3.reconstruct(trellis, suh, suh, "mcg")))


@pytest.mark.parametrize(
    ("width", "codebook", "message"),
    [
        (24, "mcg", "1.5 bits does not exist in codebook mcg"),
        (40, "3inst", "2.5 bits does not exist in codebook 3inst"),
        (72, "mul1", "4.5 bits does not exist"),
        (144, "mul1", "9 bits does not exist"),
        (8, "mul1", "0.5 bits does not exist"),
        (36, "mul1", "2.25 bits does not exist"),
        (48, "mcg2", "codebook 'mcg2' is unknown"),
    ],
)
def test_widths_that_do_not_exist_are_refused(width: int, codebook: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        exl3.decode_tiles(np.zeros((8, 8, width), dtype=np.int16), codebook)


def test_scales_of_the_wrong_length_are_refused() -> None:
    ones = np.ones(256, dtype=np.float16)
    with pytest.raises(CheckpointError, match=r"svh has shape \(256,\); the trellis has n = 128"):
        exl3.reconstruct(random_trellis(2, 256, 128), ones, ones, "mcg")


def test_states_that_form_no_ring_are_refused() -> None:
    states = exl3.unpack_tiles(random_trellis(2)).copy()
    states[0, 0, 100] ^= 1 << 9  # a bit that position 95 brought
    with pytest.raises(ValueError, match="not tail-biting rings of 2 bits"):
        exl3.pack_tiles(states, 2)


def test_markers_and_window_ends() -> None:
    assert MARKERS == {"mcg": 3417055213, "mul1": 0x83DCD12D}
    assert window_ends(5)[:4].tolist() == [2, 5, 7, 10] and window_ends(5)[-1] == 640
