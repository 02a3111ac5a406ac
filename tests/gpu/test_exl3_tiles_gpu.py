"""EXL3 tiles on the GPU against the reference's own arrays and against the CPU search."""

from __future__ import annotations

import hashlib

import exl3_math
import numpy as np
import pytest
import torch

from tfglm.errors import CheckpointError
from tfglm.ops import exl3_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

TABLE_HASHES = {
    "3inst": "ad88de2dcff5bb05fff2faec37cceceb",
    "mcg": "95383563929baa9d1ae5de0be2249028",
    "mul1": "bc48d02cb1c14939dc47b90f870dd689",
}
WIDTHS = [(k2, c) for c in TABLE_HASHES for k2 in (2, 4, 6, 8, 10, 12, 14, 16)] + [(k2, "mul1") for k2 in (3, 5, 7)]


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy().view(np.uint16)


@pytest.mark.parametrize("codebook", TABLE_HASHES)
def test_table_is_the_reference_table(codebook: str) -> None:
    table = bits_of(exl3_cuda.codebook_table(codebook))
    assert hashlib.sha256(table.tobytes()).hexdigest()[:32] == TABLE_HASHES[codebook]
    assert np.array_equal(table, exl3_math.vectors("exl3_vectors")[f"codebook_{codebook}_u16"])


@pytest.mark.parametrize(("k2", "codebook"), [(k2, c) for k2, c in WIDTHS if 4 <= k2 <= 8])
def test_decode_equals_the_reference_vectors(k2: int, codebook: str) -> None:
    vectors = exl3_math.vectors("exl3_vectors")
    trellis = torch.from_numpy(vectors[f"k2_{k2}_{codebook}_trellis_i16"]).cuda()
    assert np.array_equal(
        bits_of(exl3_cuda.decode_tiles(trellis, codebook)), vectors[f"k2_{k2}_{codebook}_wrot_f16"].view(np.uint16)
    )


@pytest.mark.parametrize(("k2", "codebook"), WIDTHS)
def test_decode_of_random_words_at_every_width(k2: int, codebook: str) -> None:
    trellis = torch.randint(-(1 << 15), 1 << 15, (5, 11, 8 * k2), dtype=torch.int16, device="cuda")
    expected = exl3_math.decode(trellis, codebook).half()
    assert np.array_equal(bits_of(exl3_cuda.decode_tiles(trellis, codebook)), bits_of(expected))


@pytest.mark.parametrize("codebook", TABLE_HASHES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_finds_the_reference_states(bits: int, codebook: str) -> None:
    tiles = exl3_math.vectors("exl3_quantised_tiles")
    wanted = torch.from_numpy(tiles[f"K{bits}_{codebook}_input"]).cuda()
    states = exl3_cuda.encode_tiles(wanted, bits, codebook).cpu().numpy()
    assert np.array_equal(states, tiles[f"K{bits}_{codebook}_states"])


@pytest.mark.parametrize("bits", exl3_cuda.ENCODE_BITS)
def test_states_close_to_a_ring_and_do_not_depend_on_the_workspace(bits: int) -> None:
    tiles = torch.randn(301, 256, device="cuda") * 1.2
    states = exl3_cuda.encode_tiles(tiles, bits, "mcg").cpu().numpy().astype(np.int64)
    entering = np.roll(states, 1, axis=1)
    assert np.array_equal(states >> bits, entering & ((1 << (16 - bits)) - 1))
    again = exl3_cuda.encode_tiles(tiles, bits, "mcg", workspace=100 << 20)
    assert np.array_equal(again.cpu().numpy(), states)


@pytest.mark.parametrize(
    ("bits", "codebook", "error"),
    [(2, "mcg", 0.0686), (3, "mcg", 0.01739), (4, "mcg", 0.00455), (5, "mcg", 0.001194), (3, "mul1", 0.01752)],
)
def test_error_on_gaussian_tiles(bits: int, codebook: str, error: float) -> None:
    """Within 2 % of the exhaustive CPU search's error over 160 tiles (best input scale, fp16 and fp32 costs alike)."""
    table = exl3_math.table(codebook)
    noise = torch.randn(528, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).double()
    measured = []
    for scale in (0.85, 0.9, 0.95, 1.0):
        tiles = noise * scale * table.std()
        states = exl3_cuda.encode_tiles(tiles.float(), bits, codebook)
        decoded = table[states.to(torch.int64)]
        measured.append((((decoded - tiles) ** 2).sum() / (tiles**2).sum()).item())
    assert min(measured) == pytest.approx(error, rel=0.02)


def test_width_without_a_kernel_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not 7"):
        exl3_cuda.encode_tiles(torch.zeros(1, 256, device="cuda"), 7, "mcg")
