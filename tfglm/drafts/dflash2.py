"""DFlash2: a block filled with a local convolution around every sublayer, and a selector that scores neighbours.

After z-lab's dflash. The published weights are licensed CC BY-NC-ND 4.0: for non-commercial use only.
"""

from __future__ import annotations

import numpy as np
import torch

from tfglm.drafts.block import BlockModel, Tensors
from tfglm.drafts.block_drafter import BlockDrafter, Scorer, table_rows
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight


class DFlash2Drafter(BlockDrafter):
    def __init__(self, model: BlockModel, head: Weight, ops: Ops, kept_pages: int = 0) -> None:
        super().__init__(model, head, ops, model.config.selector_top_k, kept_pages)

    def scorer(self, hidden: torch.Tensor) -> DFlash2Scorer:
        projected = self._ops.linear(hidden, self._model.tensors["candidate_selector.hidden_projection.weight"])
        return DFlash2Scorer(self._model.tensors, projected.float().cpu().numpy().astype(np.float64))


class DFlash2Scorer(Scorer):
    """logits + successor[candidate] . (predecessor[token before] * projected row [slots, rank])."""

    def __init__(self, tensors: Tensors, projected: np.ndarray) -> None:
        self._tensors = tensors
        self._projected = projected

    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        predecessor = table_rows(self._tensors["candidate_selector.predecessor_codebook"], before)
        successors = table_rows(self._tensors["candidate_selector.successor_codebook"], ids)
        return values + successors @ (predecessor * self._projected[slot]), None
