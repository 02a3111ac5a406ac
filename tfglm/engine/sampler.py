"""From a row of logits to a token: a pure function of the row, the history's counts, the parameters and the key.

Order: repetition, frequency and presence penalty, logit_bias; then sort (value descending, id ascending), top_k,
temperature, top_p, min_p; then the greatest of value / temperature + keyed Gumbel noise. Everything after the row
itself is float64. Ids beyond the tokenizer (the model's padding columns) are never chosen.

As in vLLM, the repetition penalty counts prompt and reply, the frequency and presence penalties the reply alone.
Unlike vLLM, min_p comes after top_p.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from tfglm.engine.api import SamplingParams, TokenLogprob
from tfglm.engine.noise import gumbel
from tfglm.errors import TfglmError

MASS_ONE = 2.0**40
"""Probability mass of the top token in top_p's integer arithmetic, whose sums are exact in any order."""

NUCLEUS_REACH = 10.0
"""How far below the top (in scaled logits) the nucleus is looked for first; beyond it lies e^-10 a token."""

LOWEST_TEMPERATURE = 1e-6


class LogitsError(TfglmError):
    """The model gave a row that no token can be chosen from."""

    code = "E_LOGITS"


class TokenCounts:
    """How often each token occurs in a request, for the penalties; adding a token costs the same at any length."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._slots, np.int64, len(self._slots))
        self._in_reply = np.zeros(len(self._slots), np.int64)

    def add(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            grown = max(64, 2 * slot)
            self._ids = np.resize(self._ids, grown)
            self._in_reply = np.concatenate([self._in_reply, np.zeros(grown - slot, np.int64)])
        self._ids[slot] = token
        self._in_reply[slot] += 1

    def times(self, token: int) -> int | None:
        """How often the reply holds a token; None if neither prompt nor reply does."""
        slot = self._slots.get(token)
        return None if slot is None else int(self._in_reply[slot])

    @property
    def ids(self) -> np.ndarray:
        """Every token of prompt and reply once, int64 [n]."""
        return self._ids[: len(self._slots)]

    @property
    def in_reply(self) -> np.ndarray:
        """How often the reply holds each of `ids`, int64 [n]."""
        return self._in_reply[: len(self._slots)]


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    seed: int,
    position: int,
    *,
    vocab_size: int,
    counts: TokenCounts | None = None,
    masked: Collection[int] = (),
) -> int:
    """The token that follows, at absolute `position` (the number of tokens before it).

    logits: float32 [at least vocab_size]; counts: needed when `has_penalties(params)`; masked: ids not to be chosen.
    Raises LogitsError if the row holds NaN or +inf, or if nothing can be chosen.
    """
    values = _adjusted(logits[:vocab_size], params, counts, masked)
    best = int(values.argmax())
    if not math.isfinite(values[best]):
        raise LogitsError(f"the best logit at position {position} is {values[best]}; no token can be chosen")
    if params.temperature == 0 or params.top_k == 1:
        return best
    ids = kept(values, params)
    scores = values[ids].astype(np.float64) / max(params.temperature, LOWEST_TEMPERATURE) + gumbel(seed, position, ids)
    level = ids[scores == scores.max()]
    return int(level[values[level].argmax()])


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def penalised(values: np.ndarray, times: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [n] logits of tokens that prompt or reply hold, after the penalties; times [n]: of each in the reply."""
    values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    return values - params.frequency_penalty * times - params.presence_penalty * (times > 0)


def _adjusted(
    logits: np.ndarray, params: SamplingParams, counts: TokenCounts | None, masked: Collection[int]
) -> np.ndarray:
    """The row after penalties, bias and mask, [vocab_size]; the row itself when none applies."""
    values = logits
    if counts is not None and has_penalties(params):
        values = values.astype(np.float64)
        known = counts.ids < len(values)
        ids, times = counts.ids[known], counts.in_reply[known]
        values[ids] = penalised(values[ids], times, params)
    if params.logit_bias:
        values = values.astype(np.float64)
        for token, bias in params.logit_bias.items():
            if 0 <= token < len(values):
                values[token] += bias
    if masked:
        values = values.copy()
        values[[token for token in masked if token < len(values)]] = -np.inf
    return values


def kept(values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Ids that top_k, top_p and min_p leave of a row, ascending, int64 [n >= 1]. Logits of -inf are never kept.

    values: float32 or float64 [vocab], its greatest finite. Each filter keeps a prefix of the same order, so top_k and
    top_p only have to agree on its length.
    """
    temperature = max(params.temperature, LOWEST_TEMPERATURE)
    count = params.top_k if params.top_k > 0 else len(values)
    if params.top_p < 1:
        pool = values if count >= len(values) else values[_leading(values, count)]
        count = _nucleus_size(pool, temperature, params.top_p)
    ids = _leading(values, count)
    best = values[ids].astype(np.float64)
    least = -math.inf
    if params.min_p > 0:
        best /= temperature
        least = float(best.max()) + math.log(params.min_p)
    return ids[(best >= least) & (best > -math.inf)]


def _leading(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the first `count` in the order (value descending, index ascending).

    A partition finds the last value that gets in; ties at it go to the lowest indices.
    """
    spare = len(values) - count
    if spare <= 0:
        return np.arange(len(values))
    last = np.partition(values, spare)[spare]
    inside = values > last
    ties = np.flatnonzero(values == last)
    inside[ties[: count - np.count_nonzero(inside)]] = True
    return np.flatnonzero(inside)


def _nucleus_size(values: np.ndarray, temperature: float, top_p: float) -> int:
    """How many tokens the smallest prefix, best first, needs to hold the share top_p of the mass of all.

    Masses are integers and the share an exact fraction, so no rounding moves the cut. Only tokens within NUCLEUS_REACH
    of the top are sorted at first: they are a prefix of the whole order, so if their mass suffices the cut lies inside.
    """
    mass = values.astype(np.float64)
    mass /= temperature
    mass -= mass.max()
    np.exp(mass, out=mass)
    mass *= MASS_ONE
    whole = mass.astype(np.int64)
    numerator, denominator = top_p.as_integer_ratio()
    need = -(-numerator * int(whole.sum()) // denominator)  # rounded up
    near = np.flatnonzero(values >= float(values.max()) - NUCLEUS_REACH * temperature)
    if int(whole[near].sum()) < need:
        near = np.arange(len(values))
    order = near[np.argsort(-values[near])]
    return int(np.searchsorted(np.cumsum(whole[order]), need)) + 1


def log_total(logits: np.ndarray, vocab_size: int) -> float:
    """log of the sum of exp over the vocabulary, in float64. Raises LogitsError if the greatest logit is not finite."""
    values = logits[:vocab_size].astype(np.float64)
    top = float(values.max())
    if not math.isfinite(top):
        raise LogitsError(f"the best logit of a row is {top}; it has no probabilities")
    return top + math.log(float(np.exp(values - top).sum()))


def token_logprob(logits: np.ndarray, token: int, alternatives: int, vocab_size: int) -> TokenLogprob:
    """Natural-log probability of token and of the best `alternatives` under the raw row (temperature 1, no penalties).

    A logit of -inf has the log-probability -inf and is never listed among the alternatives.
    """
    total = log_total(logits, vocab_size)
    row = logits[:vocab_size]
    ids = _leading(row, alternatives) if alternatives > 0 else np.empty(0, np.int64)
    ids = ids[row[ids] > -np.inf]
    ids = ids[np.argsort(-row[ids], kind="stable")]
    top = tuple((int(i), float(row[i]) - total) for i in ids)
    return TokenLogprob(token, float(row[token]) - total, top)
