"""DSpark (arXiv 2607.05147): a block whose slots are chosen one after the other, each biased by the token before it."""

from __future__ import annotations

import numpy as np
import torch

from tfglm.drafts.block import BlockModel, Tensors
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_drafter import BlockDrafter, Scorer, sigmoid, table_rows
from tfglm.drafts.candidates import CANDIDATES
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight


class DSparkDrafter(BlockDrafter):
    def __init__(self, model: BlockModel, head: Weight, ops: Ops, kept_pages: int = 0) -> None:
        super().__init__(model, head, ops, CANDIDATES, kept_pages)
        self._small = {
            name: tensor.float().numpy().astype(np.float64)
            for name, tensor in model.tensors.items()
            if name.startswith(("markov_head.gate", "markov_head.joint", "confidence_head."))
        }

    def scorer(self, hidden: torch.Tensor) -> DSparkScorer:
        return DSparkScorer(
            self.config, self._model.tensors, self._small, hidden.float().cpu().numpy().astype(np.float64)
        )


class DSparkScorer(Scorer):
    """The sequential head: logits + W2 . f(W1[token before], row), where f is the identity, a gate or a recurrence.
    And the confidence head, trained on how near its slot comes to the target's distribution."""

    def __init__(self, config: BlockConfig, tensors: Tensors, small: dict[str, np.ndarray], hidden: np.ndarray) -> None:
        self._config = config
        self._tensors = tensors
        self._small = small
        self._hidden = hidden
        self._state = np.zeros(config.markov_rank)

    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        row = self._hidden[slot]
        if not self._config.markov_rank:
            return values.astype(np.float64), self._confidence(row, np.empty(0))
        embedded = table_rows(self._tensors["markov_head.markov_w1.weight"], before)
        mixed = self._mix(embedded, row)
        bias = table_rows(self._tensors["markov_head.markov_w2.weight"], ids) @ mixed
        return values + bias, self._confidence(row, embedded)

    def _mix(self, embedded: np.ndarray, row: np.ndarray) -> np.ndarray:
        small = self._small
        if self._config.markov_type == "vanilla":
            return embedded
        if self._config.markov_type == "gated":
            joined = np.concatenate([row, embedded])
            gate = sigmoid(small["markov_head.gate_proj.weight"] @ joined + small["markov_head.gate_proj.bias"])
            return gate * embedded
        joined = np.concatenate([self._state, embedded, row])
        projected = small["markov_head.joint_proj.weight"] @ joined + small["markov_head.joint_proj.bias"]
        gate, candidate, out = np.split(projected, 3)
        keep = sigmoid(gate)
        self._state = keep * self._state + (1 - keep) * np.tanh(candidate)
        mixed: np.ndarray = np.tanh(out)
        return mixed

    def _confidence(self, row: np.ndarray, embedded: np.ndarray) -> float | None:
        if not self._config.confidence:
            return None
        features = np.concatenate([row, embedded]) if self._config.confidence_with_markov else row
        weight, bias = self._small["confidence_head.proj.weight"], self._small["confidence_head.proj.bias"]
        return float(sigmoid(weight[0] @ features + bias[0]))
