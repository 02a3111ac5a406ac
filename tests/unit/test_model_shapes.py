"""The trial at load covers every product and function that the forward pass makes of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.shapes import shapes_of
from tfglm.models.window import Rows as WindowRows
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import RowFunction, Rows


class Recording(Rows):
    """Notes the shapes of what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linears: set[tuple[int, int]] = set()
        self.groups: set[tuple[int, int, int]] = set()
        self.batches: set[tuple[int, int, int]] = set()
        self.widths: set[int] = set()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.linears.add((weight.shape[1], weight.shape[0]))
        return super().linear(x, weight)

    def grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.groups.add((weight.shape[0], weight.shape[2], weight.shape[1]))
        return super().grouped(x, weight)

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.batches.add((a.shape[1], a.shape[2], b.shape[2]))
        return super().batched(a, b)

    def each(self, function: RowFunction, x: torch.Tensor) -> torch.Tensor:
        self.widths.add(x.shape[-1])
        return super().each(function, x)


@pytest.mark.parametrize("fields", [{}, {"n_shared_experts": 2}, {"first_k_dense_replace": 0}], ids=str)
def test_the_trial_covers_the_forward_pass(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_checkpoint(tmp_path / "tiny", num_hidden_layers=4, n_routed_experts=4, index_topk=48, **fields)
    with Checkpoint.open(tmp_path / "tiny") as checkpoint:
        loaded = load_model(checkpoint, tokens=2 * PAGE)
    rows = Recording()
    model = Glm53(loaded.config, loaded.weights, tokens=2 * PAGE, ops=ReferenceOps(rows))
    stream = model.open_stream()
    for count in (1, 8, 17, 300):
        model.forward([WindowRows(stream, [3] * count, 1)])
    shapes = shapes_of(model.config)
    assert rows.linears <= shapes.linears | shapes.experts
    experts = {(inputs, outputs) for _, inputs, outputs in rows.groups - shapes.groups}
    assert experts <= shapes.experts
    assert rows.batches <= shapes.scores | shapes.sums | shapes.shared
    assert rows.widths <= shapes.widths
    assert shapes.linears | shapes.experts <= rows.linears | experts, "shapes that no forward pass has"
