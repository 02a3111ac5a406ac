"""Which tile a prompt's linear layer takes: a matter of speed alone, so that of the busiest multiprocessor."""

import pytest

from tfglm.ops.cuda_linear import FEW, SMALL, WIDE, Tile, prompt_tile


@pytest.mark.parametrize(
    ("rows", "outputs", "batch", "multiprocessors", "tile"),
    [
        (2048, 6144, 1, 132, WIDE),
        (2048, 2624, 1, 132, SMALL),  # six wide tiles or ten small ones a multiprocessor
        (2048, 256, 1, 132, FEW),  # 128 small tiles: one each
        (128, 2624, 1, 132, FEW),
        (2048, 256, 22, 132, WIDE),
        (2048, 6144, 1, 48, WIDE),
        (2048, 256, 1, 48, SMALL),
    ],
)
def test_tile(rows: int, outputs: int, batch: int, multiprocessors: int, tile: Tile) -> None:
    assert prompt_tile(rows, outputs, batch, multiprocessors) == tile
