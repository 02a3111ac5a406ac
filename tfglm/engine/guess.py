"""The target's own way of choosing a token, for drafters: same penalties, same filters, same noise."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tfglm.engine.api import SamplingParams
from tfglm.engine.noise import gumbel
from tfglm.engine.sampler import LOWEST_TEMPERATURE, TokenCounts, has_penalties, kept, penalised

SPREAD = 2.0
"""Temperature at which noisy scores give an estimate of the chosen token's chance to be the target's too."""


class Guess:
    """One path of drafts after a reply's tokens; see `drafts.base.Draw`.

    A drafter's scores differ from the target's logits, but the noise is what the target will add at that position, so
    where both are near the same token wins. noise: its weight, 1 for the target's own, 0 for a greedy draft. position:
    of the first drafted token. Only candidates that the tokenizer has, and none of `masked` for the first `unmasked`
    tokens of the path, are chosen; where a request rules all of them out, a token that nobody believes in.
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
            return 0, 0.0
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
        params, tokens = self._params, ids.tolist()
        if self._counts is not None:
            # -1: neither in the prompt nor in the reply.
            before = np.array([-1 if (times := self._counts.times(token)) is None else times for token in tokens])
            drafted = np.array([self._path.count(token) for token in tokens])
            known = (before >= 0) | (drafted > 0)
            times = np.maximum(before, 0) + drafted
            scores[known] = penalised(scores[known], times[known], params)
        if params.logit_bias:
            scores += np.array([params.logit_bias.get(token, 0.0) for token in tokens])
