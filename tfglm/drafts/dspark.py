"""DSpark (arXiv 2607.05147): a block whose slots are chosen one after the other, each biased by the token before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tfglm.drafts.block import BlockModel
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_drafter import BlockDrafter, Scorer, Table, sigmoid
from tfglm.drafts.candidates import CANDIDATES
from tfglm.ops.base import Ops
from tfglm.ops.exl3_weights import Weight


class DSparkDrafter(BlockDrafter):
    def __init__(self, model: BlockModel, head: Weight, ops: Ops, kept_pages: int = 0) -> None:
        super().__init__(model, head, ops, CANDIDATES, kept_pages)
        self._small = {
            name: tensor.float().numpy()
            for name, tensor in model.tensors.items()
            if name.startswith(("markov_head.gate", "markov_head.joint", "confidence_head."))
        }
        names = [f"markov_head.markov_{name}.weight" for name in ("w1", "w2")]
        self._tables = [Table(model.tensors[name]) for name in names] if model.config.markov_rank else []

    def scorer(self, hidden: torch.Tensor) -> DSparkScorer:
        return DSparkScorer(self.config, self._tables, self._small, hidden.float().cpu().numpy())


class DSparkScorer(Scorer):
    """The sequential head: logits + W2 . f(W1[token before], row), where f is the identity, a gate or a recurrence.
    And the confidence head, trained on how near its slot comes to the target's distribution.

    tables: W1 and W2 if there is such a head. small: its other weights and the confidence head's. hidden: rows
    [slots, hidden]. All float32."""

    def __init__(
        self, config: BlockConfig, tables: Sequence[Table], small: dict[str, np.ndarray], hidden: np.ndarray
    ) -> None:
        self._config = config
        self._tables = tables
        self._small = small
        self._hidden = hidden
        self._state = np.zeros(config.markov_rank, np.float32)
        if config.confidence:
            weight, bias = small["confidence_head.proj.weight"][0], small["confidence_head.proj.bias"]
            self._sure = hidden @ weight[: hidden.shape[1]] + bias
            self._sure_of_token = weight[hidden.shape[1] :]

    def __call__(self, slot: int, before: int, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float | None]:
        if not self._tables:
            return values, self._confidence(slot, None)
        first, second = self._tables
        embedded = first[before]
        return values + second[ids] @ self._mix(embedded, self._hidden[slot]), self._confidence(slot, embedded)

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

    def _confidence(self, slot: int, embedded: np.ndarray | None) -> float | None:
        if not self._config.confidence:
            return None
        sure = self._sure[slot]
        if embedded is not None and self._config.confidence_with_markov:
            sure = sure + self._sure_of_token @ embedded
        return float(sigmoid(sure))
