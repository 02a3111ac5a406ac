"""From settings and files to what drafts: which model, and what its rounds cost on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from tfglm.cache.latent import DTYPES
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.drafts.base import Ask, Drafter, Kept
from tfglm.drafts.costs import PROMPT, Costs, enough, measure
from tfglm.drafts.mtp import MtpDrafter
from tfglm.drafts.policy import WINDOW_ROWS
from tfglm.errors import ConfigError
from tfglm.models.glm53 import Glm53
from tfglm.models.mtp import Mtp, load_mtp, mtp_bytes_per_token
from tfglm.models.window import Rows
from tfglm.settings import Settings

log = logging.getLogger(__name__)


def drafter_kind(settings: Settings, config: ModelConfig) -> str:
    """The drafter that the settings and the checkpoint come to: "mtp" or "none". Raises ConfigError for one that is
    asked for and is not there."""
    has_mtp = bool(config.num_nextn_predict_layers)
    if settings.drafter == "auto":
        return "mtp" if has_mtp else "none"
    if settings.drafter == "mtp" and not has_mtp:
        raise ConfigError(
            "--drafter is mtp, but the checkpoint has no MTP layer (num_nextn_predict_layers is 0); none and auto work"
        )
    return settings.drafter


def cached_bytes_per_token(kind: str, config: ModelConfig, kv: str) -> int:
    """Bytes a drafter caches for one token beside the trunk's own."""
    return mtp_bytes_per_token(config, DTYPES[kv].itemsize) if kind == "mtp" else 0


def load_drafter(kind: str, checkpoint: Checkpoint, model: Glm53, settings: Settings) -> Drafter | None:
    """The drafter of a kind from `drafter_kind`, None for "none"."""
    if kind == "mtp":
        weights = load_mtp(model.weights, model.config, checkpoint.read)
        return MtpDrafter(Mtp(model, weights, settings.kv))
    return None


def measured_costs(model: Glm53, drafter: Drafter | None, text: Sequence[int]) -> Costs:
    """Time windows of 1 to WINDOW_ROWS rows, and the drafter, after the beginning of a text. Seconds at most."""
    text = enough(text, PROMPT + WINDOW_ROWS)
    stream = model.open_stream()
    try:
        if drafter is None:
            model.forward([Rows(stream, text[:PROMPT], 0)])

            def window(rows: int) -> None:
                model.forward([Rows(stream, text[PROMPT : PROMPT + rows], rows)])
                stream.truncate(PROMPT)

            return Costs(tuple(measure(window, WINDOW_ROWS)))
        passed = model.forward_tapped([Rows(stream, text[:PROMPT], 0)], drafter.taps)

        def tapped(rows: int) -> None:
            model.forward_tapped([Rows(stream, text[PROMPT : PROMPT + rows], rows)], drafter.taps)
            stream.truncate(PROMPT)

        def propose(room: int) -> float:
            """Milliseconds of the first proposal after the prompt."""
            context = drafter.open()
            drafter.read([Kept(context, text[:PROMPT], 0)], passed)
            start = time.perf_counter()
            drafter.propose([Ask(context, text[PROMPT], room, _first, lambda confidence: True, sampled=False)])
            elapsed = time.perf_counter() - start
            drafter.close(context)
            return elapsed * 1000

        steps = min(3, drafter.most)
        one, more = (min(propose(room) for _ in range(3)) for room in (1, steps))
        next_ms = max(0.0, (more - one) / (steps - 1)) if steps > 1 else 0.0
        return Costs(tuple(measure(tapped, WINDOW_ROWS)), one, next_ms)
    finally:
        stream.close()


def _first(ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
    return int(ids[values.argmax()]), 0.5
