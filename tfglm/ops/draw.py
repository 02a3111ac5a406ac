"""What is drawn from a row of logits where they are, instead of bringing them to the engine's sampler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """How the token after one row is drawn: as engine.sampler.choose does it without penalties, bias or masked tokens.

    temperature: 0 takes the greatest logit, else it is at least 1e-6. top_k: 0 keeps all. top_p: 1 keeps all.
    log_min_p: of min_p; -inf keeps all. key: engine.noise.noise_key of seed and position. vocabulary: ids below it can
    be drawn.
    """

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float
    key: int
    vocabulary: int
