"""From settings and files to what drafts: which model, and what its rounds cost on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tfglm.cache.sizes import FLOAT32
from tfglm.checkpoint.store import Checkpoint
from tfglm.drafts.base import Ask, Drafter, Kept
from tfglm.drafts.block import BlockModel
from tfglm.drafts.block_files import GPU_FORMAT
from tfglm.drafts.block_weights import read_weights
from tfglm.drafts.costs import PROMPT, Costs, enough, measure
from tfglm.drafts.dflash2 import DFlash2Drafter
from tfglm.drafts.dspark import DSparkDrafter
from tfglm.drafts.kind import DFLASH2_LICENCE, block_config, kept_pages
from tfglm.drafts.mtp import MtpDrafter
from tfglm.drafts.policy import WINDOW_ROWS
from tfglm.errors import RanksError
from tfglm.models.glm53 import Glm53
from tfglm.models.glm53_cuda import CudaGlm53
from tfglm.models.mtp import Mtp, load_mtp
from tfglm.models.mtp_cuda import load_mtp_cuda
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.window import Rows
from tfglm.settings import Settings

log = logging.getLogger(__name__)


def load_drafter(kind: str, checkpoint: Checkpoint, model: Glm53, settings: Settings) -> Drafter | None:
    """The drafter of a kind from `drafter_kind`, None for "none". Says in the log what a drafter's licence forbids.
    Raises CheckpointError for files that do not hold it."""
    if kind == "mtp":
        return MtpDrafter(model, _load_mtp(checkpoint, model, settings.kv))
    if kind == "none":
        return None
    folder = Path(settings.drafter_path)
    tensors, config = read_weights(folder, block_config(settings), model.config.num_hidden_layers)
    dtype = torch.float32 if settings.kv == FLOAT32 else torch.bfloat16
    backbone = BlockModel(config, tensors, model.weights.embed, model.ops, dtype, model.vocabulary, _hold(model))
    pages = kept_pages(config, settings)
    if kind == "dspark":
        return DSparkDrafter(backbone, model.weights.head, model.ops, pages)
    log.warning(DFLASH2_LICENCE)
    return DFlash2Drafter(backbone, model.weights.head, model.ops, pages)


def _hold(model: Glm53) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A GPU holds a block drafter's matrices in GPU_FORMAT whatever the trunk's are in: they decide no token."""
    if not model.weights.embed.is_cuda:
        return None
    assert isinstance(model, CudaGlm53)
    return partial(model.ops.hold, kind=GPU_FORMAT)


def _load_mtp(checkpoint: Checkpoint, model: Glm53, kv: str) -> Mtp:
    source = CheckpointSource(checkpoint, share=model.share)
    if model.weights.embed.is_cuda:
        assert isinstance(model, CudaGlm53)
        return load_mtp_cuda(model, source)
    return Mtp(model, load_mtp(model.weights, model.config, source), kv)


def prepare(model: Glm53, drafter: Drafter | None, window: int) -> None:
    """Do now what the first windows with drafts would wait for, in streams of up to `window` tokens."""
    model.prepare(WINDOW_ROWS, window, drafter.taps if drafter else Taps())
    if isinstance(drafter, MtpDrafter):
        drafter.prepare(WINDOW_ROWS, window)


def sound_costs(
    model: Glm53, drafter: Drafter | None, text: Sequence[int], window: int
) -> tuple[Drafter | None, Costs]:
    """The drafter and what rounds with it cost; None, and what they cost without, if it fails at its first drafts: then
    all is prepared for replies of `window` tokens without it."""
    try:
        return drafter, measured_costs(model, drafter, text)
    except RanksError:
        raise
    except Exception as error:
        if drafter is None:
            raise
        log.warning(
            "W_DRAFTER: %s failed at its first drafts (%s: %s); the server starts without it",
            drafter.name,
            type(error).__name__,
            error,
            exc_info=True,
        )
        prepare(model, None, window)
        return None, measured_costs(model, None, text)


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
        model.forward_tapped([Rows(stream, text[:PROMPT], 0)], drafter.taps)

        def tapped(rows: int) -> None:
            model.forward_tapped([Rows(stream, text[PROMPT : PROMPT + rows], rows)], drafter.taps)
            stream.truncate(PROMPT)

        def propose(room: int) -> float:
            """Milliseconds of the first proposal after the prompt."""
            own = model.open_stream()
            try:
                context = drafter.open(own)
                passed = model.forward_tapped([Rows(own, text[:PROMPT], 0)], drafter.taps)
                drafter.read([Kept(context, text[:PROMPT], 0)], passed)
                start = time.perf_counter()
                drafter.propose([Ask(context, text[PROMPT], room, _first, lambda confidence: True, sampled=False)])
                elapsed = time.perf_counter() - start
                drafter.close(context)
            finally:
                own.close()
            return elapsed * 1000

        steps = min(3, drafter.most)
        one, more = (min(propose(room) for _ in range(3)) for room in (1, steps))
        next_ms = max(0.0, (more - one) / (steps - 1)) if steps > 1 else 0.0
        return Costs(tuple(measure(tapped, WINDOW_ROWS)), one, next_ms)
    finally:
        stream.close()


def _first(ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
    return int(ids[values.argmax()]), 0.5
