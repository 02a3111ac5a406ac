"""From a drafter's rows of logits to what its choice is made of."""

from __future__ import annotations

import numpy as np
import torch

CANDIDATES = 64
"""Best tokens of a row that a draft is chosen from."""


def best_candidates(logits: torch.Tensor, count: int = CANDIDATES) -> tuple[np.ndarray, np.ndarray]:
    """The best `count` of each row of [R, vocab]: ids int64 [R, n], ascending in each row, and their values [R, n] in
    the dtype of the logits. Raises ValueError for logits that are not numbers, see tfglm.ops.steps."""
    ids = logits.topk(min(count, logits.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
    values = logits.gather(1, ids)  # launched before the first copy waits
    found = ids.cpu().numpy(), values.cpu().numpy()
    if np.isnan(found[1]).any():
        raise ValueError(
            "its logits are not numbers: another rank failed at them, as its log says, or its weights are bad"
        )
    return found
