"""The target's own way of choosing a token, for drafters: same penalties, same filters, same noise."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tfglm.engine.api import SamplingParams
from tfglm.engine.noise import gumbel
from tfglm.engine.sampler import LOWEST_TEMPERATURE, TokenCounts, has_penalties, kept

SPREAD = 2.0
"""Temperature at which noisy scores give an estimate of the chosen token's chance to be the target's too."""


class Guess:
    """One path of drafts after a reply's tokens; see `drafts.base.Draw`.

    A drafter's scores differ from the target's logits, but the noise is what the target will add at that position, so
    where both are near the same token wins. noise: its weight, 1 for the target's own, 0 for a greedy draft. position:
    of the first drafted token. Only candidates that the tokenizer has, and none of `masked` for the first `unmasked`
    tokens of the path, are chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
        vocab_size: int,
        counts: TokenCounts | None,
        noise: float,
        masked: Collection[int] = (),
        unmasked: int = 0,
    ) -> None:
        self._params = params
        self._seed = seed
        self._position = position
        self._vocab_size = vocab_size
        self._counts = counts if counts is not None and has_penalties(params) else None
        self._noise = noise
        self._masked = np.array(sorted(masked), np.int64)
        self._unmasked = unmasked
        self._path: list[int] = []

    def __call__(self, ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
        allowed = (ids < self._vocab_size) & np.isfinite(values)
        if ahead < self._unmasked:
            allowed &= ~np.isin(ids, self._masked)
        ids, scores = ids[allowed], values[allowed].astype(np.float64)
        if not len(ids):
            raise ValueError("a drafter offers no candidate that could be chosen")
        self._adjust(ids, scores)
        params, spread = self._params, 1.0
        if params.temperature > 0 and params.top_k != 1:
            left = kept(scores, params)
            ids, scores = ids[left], scores[left] / max(params.temperature, LOWEST_TEMPERATURE)
            scores += self._noise * gumbel(self._seed, self._position + ahead, ids)
            spread = SPREAD
        best = int(scores.argmax())
        token = int(ids[best])
        self._path.append(token)
        return token, float(1 / np.exp((scores - scores[best]) / spread).sum())

    def _adjust(self, ids: np.ndarray, scores: np.ndarray) -> None:
        """Penalties as they will be if the path so far is kept, and logit_bias, in place."""
        params = self._params
        if self._counts is not None:
            for i, token in enumerate(ids.tolist()):
                times = self._counts.times(token)
                drafted = self._path.count(token)
                if times is None and not drafted:
                    continue
                times = (times or 0) + drafted
                value = scores[i]
                value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
                scores[i] = value - params.frequency_penalty * times - params.presence_penalty * (times > 0)
        for token, bias in params.logit_bias.items():
            scores[ids == token] += bias
