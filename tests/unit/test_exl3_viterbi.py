"""The ring search: the reference quantiser's own states, both implementations alike, and the error it leaves."""

from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from tfglm.errors import CheckpointError
from tfglm.formats import exl3, exl3_viterbi
from tfglm.formats.exl3_code import CODEBOOKS, codebook_table, half_bits, new_bits

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "exl3_quantised_tiles.npz")
WIDTHS = [(1, "3inst"), (2, "mcg"), (3, "mcg"), (4, "mul1"), (8, "mcg"), (1.5, "mul1"), (2.5, "mul1"), (3.5, "mul1")]
# Squared error over that of the tile for N(0, 1) weights, measured on 300 tiles, at the best of five input scales
# (standard deviations of the codebook).
NMSE = {
    (1, "mcg"): (0.2732, 1.0), (1, "mul1"): (0.2776, 1.0), (1.5, "mul1"): (0.1379, 1.0),
    (2, "mcg"): (0.06859, 1.0), (2, "mul1"): (0.06831, 0.98), (2.5, "mul1"): (0.03459, 0.95),
    (3, "mcg"): (0.01741, 0.95), (3, "mul1"): (0.01749, 0.95), (3.5, "mul1"): (0.00884, 0.95),
    (4, "mcg"): (0.004549, 0.9),
}  # fmt: skip


def numpy_states(tiles: np.ndarray, bits: float, codebook: str, costs: str) -> np.ndarray:
    added = new_bits(half_bits(bits, codebook))
    order = exl3_viterbi.end_order(65536 >> int(added[0]))
    table = codebook_table(codebook).astype(np.float32)
    rounded = tiles.astype(np.float16).astype(np.float32)
    return exl3_viterbi.search_numpy(rounded, table, added, order, costs == "fp16")


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_states_of_the_reference_quantiser(bits: int, codebook: str) -> None:
    name = f"K{bits}_{codebook}"
    tile, expected = VECTORS[f"{name}_input"], VECTORS[f"{name}_states"]
    states = exl3.encode_tiles(tile, bits, codebook)
    assert np.array_equal(states, expected)
    packed = exl3.pack_tiles(states.reshape(1, 1, 256), bits)
    assert np.array_equal(packed.reshape(1, -1).view(np.uint16), VECTORS[f"{name}_packed"])
    table = codebook_table(codebook)
    assert np.array_equal(table[states].view(np.uint16), VECTORS[f"{name}_decoded"].view(np.uint16))
    # float32 costs may choose another ring, never a worse one.
    single = exl3.encode_tiles(tile, bits, codebook, costs="fp32")
    error = [np.sum((table[s].astype(np.float64) - tile) ** 2) for s in (single, states)]
    assert error[0] <= error[1] * (1 + 1e-6)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_numpy_finds_the_reference_states(codebook: str) -> None:
    name = f"K3_{codebook}"
    assert np.array_equal(numpy_states(VECTORS[f"{name}_input"], 3, codebook, "fp16"), VECTORS[f"{name}_states"])


@pytest.mark.skipif(exl3_viterbi.compiled is None, reason="numba is not installed")
@pytest.mark.parametrize(("bits", "codebook"), WIDTHS)
def test_compiled_and_numpy_agree(bits: float, codebook: str) -> None:
    tiles = np.random.default_rng(5).standard_normal((1, 256)).astype(np.float32)
    for costs in ("fp16", "fp32"):
        compiled = exl3.encode_tiles(tiles, bits, codebook, costs=costs)
        assert np.array_equal(compiled, numpy_states(tiles, bits, codebook, costs))


@pytest.mark.parametrize(("bits", "codebook"), [(bits, "mcg") for bits in range(1, 9)] + [(2.5, "mul1")])
def test_a_tile_of_codebook_values_is_found_again(bits: float, codebook: str) -> None:
    random = np.random.default_rng(int(10 * bits))
    trellis = random.integers(-(2**15), 2**15, (1, 2, int(16 * bits)), dtype=np.int16)
    values = codebook_table(codebook)[exl3.unpack_tiles(trellis)].astype(np.float32)
    found = exl3.encode_tiles(values.reshape(2, 256), bits, codebook).reshape(1, 2, 256)
    assert np.array_equal(codebook_table(codebook)[found].astype(np.float32), values)
    assert np.array_equal(exl3.pack_tiles(found, bits), trellis)


@pytest.mark.parametrize(("bits", "codebook"), list(NMSE))
def test_error_on_gaussian_tiles(bits: float, codebook: str) -> None:
    expected, scale = NMSE[bits, codebook]
    table = codebook_table(codebook).astype(np.float64)
    # All quantiles once, shuffled: few tiles then hold their due of the tails that the codebook cannot reach.
    count = 12 * 256
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    tiles = np.random.default_rng(1).permutation(normal).reshape(12, 256) * scale * table.std()
    states = exl3.encode_tiles(tiles.astype(np.float32), bits, codebook, costs="fp32")
    found = np.sum((table[states] - tiles) ** 2) / np.sum(tiles**2)
    assert 4.0**-bits < found < 1.02 * expected  # above the rate-distortion bound, no worse than measured


def test_torch_tiles_and_empty_input() -> None:
    tiles = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    assert torch.equal(
        exl3.encode_tiles(torch.from_numpy(tiles), 3, "mcg"), torch.from_numpy(exl3.encode_tiles(tiles, 3, "mcg"))
    )
    assert exl3.encode_tiles(tiles[:0], 2, "mcg").shape == (0, 256)


def test_a_width_the_codebook_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"2\.5 bits does not exist in codebook mcg"):
        exl3.encode_tiles(np.zeros((1, 256), dtype=np.float32), 2.5, "mcg")
