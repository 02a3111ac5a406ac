"""A checkpoint as a model on a CPU or a GPU, whole or a rank's part of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfglm.checkpoint.names import layer_prefix
from tfglm.checkpoint.store import Checkpoint
from tfglm.errors import ConfigError
from tfglm.layout import PLACEMENT, Layout, Placement, Share
from tfglm.models import glm53_cuda
from tfglm.models.glm53 import Glm53, packed_format
from tfglm.models.shapes import quantised_shapes, shapes_of
from tfglm.models.source import CheckpointSource
from tfglm.models.weights import load_weights
from tfglm.ops.group import Alone, Group
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows as RowMath


def load_model(
    checkpoint: Checkpoint,
    *,
    tokens: int,
    device: str = "cpu",
    kv: str = "bf16",
    dense: str = "bf16",
    head: str = "bf16",
    progress: Callable[[int, int], None] | None = None,
    group: Group | None = None,
    placement: Placement = PLACEMENT,
    cp: bool = False,
) -> Glm53:
    """The model of an open checkpoint, with a cache of `tokens` tokens over all streams.

    device: "cpu" or "cuda". kv: the cache's format. dense, head: formats of linear layers and of lm_head on a GPU
    (settings.DENSE_FORMATS); a CPU multiplies by what the checkpoint holds. group: the ranks to spread it over, all of
    which load at the same time, each its own part; placement: of the routed experts' columns; cp: deal the caches out
    to them, each with room for `tokens` tokens.
    progress is called after each tensor with the bytes done and the bytes there are. Memory stays near the size of what
    is held. The number of torch threads must be set before, alike on all ranks. Raises ConfigError, CheckpointError,
    MemoryShortError, RanksError.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; supported: cpu, cuda")
    group = group or Alone()
    config = checkpoint.config
    share = Share(Layout.of(config, group.ranks, placement), group.rank)
    mtp = layer_prefix(config.num_hidden_layers) + "."
    total = sum(entry.nbytes for name, entry in checkpoint.entries.items() if not name.startswith(mtp))
    source = CheckpointSource(checkpoint, (lambda done: progress(done, total)) if progress else None, share)
    if device == "cuda":
        model: Glm53 = glm53_cuda.load(config, source, tokens=tokens, kv=kv, dense=dense, head=head, group=group, cp=cp)
    else:
        # Before the weights: what it multiplies on trial is gone by then.
        rows = _agreed(RowMath.verified(shapes_of(config, quantised_shapes(checkpoint, share), share, cp)), group)
        weights = load_weights(config, source)
        model = Glm53(
            config, weights, tokens=tokens, kv=kv, ops=ReferenceOps(rows, packed_format(kv)), group=group, cp=cp
        )
    model.placement = placement
    return model


def _agreed(rows: RowMath, group: Group) -> RowMath:
    """What all ranks compute alike they must compute with the same bits: if one needs to take every row by itself, all
    do."""
    if group.ranks == 1 or not group.gather(torch.tensor([float(rows.alone)])).any():
        return rows
    return RowMath(alone=True)
