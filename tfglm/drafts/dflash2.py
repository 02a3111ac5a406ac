"""DFlash2: a block filled with a local convolution around every sublayer, and a selector that scores neighbours.

After z-lab's dflash. The published weights are licensed CC BY-NC-ND 4.0: for non-commercial use only.
"""

from __future__ import annotations

import numpy as np
import torch

from tfglm.drafts.block import BlockModel
from tfglm.drafts.block_drafter import BlockDrafter, Scorer, Table
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight


class DFlash2Drafter(BlockDrafter):
    def __init__(self, model: BlockModel, head: Weight, ops: Ops, kept_pages: int = 0) -> None:
        super().__init__(model, head, ops, model.config.selector_top_k, kept_pages)
        names = ("predecessor", "successor")
        self._predecessors, self._successors = (
            Table(model.tensors[f"candidate_selector.{name}_codebook"]) for name in names
        )

    def scorer(self, hidden: torch.Tensor) -> DFlash2Scorer:
        projected = self._ops.linear(hidden, self._model.tensors["candidate_selector.hidden_projection.weight"])
        return DFlash2Scorer(self._predecessors, self._successors, projected.float().cpu().numpy())


class DFlash2Scorer(Scorer):
    """logits + successor[candidate] . (predecessor[token before] * projected row [slots, rank])."""

    def __init__(self, predecessors: Table, successors: Table, projected: np.ndarray) -> None:
        self._predecessors = predecessors
        self._successors = successors
        self._projected = projected

    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        return values + self._successors[ids] @ (self._predecessors[before] * self._projected[slot]), None
