"""Bytes that each rank holds of a block drafter. Torch-free."""

from __future__ import annotations

from math import prod
from pathlib import Path

from tfglm.cache.sizes import FLOAT32
from tfglm.checkpoint.safetensors import TensorEntry
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import GPU_FORMAT, HOST_TABLES, held_heads, held_part, page_rows, tensor_entries
from tfglm.drafts.kind import block_config, kept_pages
from tfglm.memory.weights import matrix_bytes
from tfglm.settings import Settings


def block_drafter_bytes(settings: Settings) -> tuple[int, ...]:
    """Of each rank: weights, the rings of all streams, and the pages of them that outlive their streams. The tables
    that rank 0 chooses with are counted too, although beside a GPU with memory of its own they are the host's.

    Raises ConfigError and CheckpointError for a folder that holds no drafter.
    """
    config, entries = block_config(settings), tensor_entries(Path(settings.drafter_path)).values()
    on_gpu, ranks = settings.device == "cuda", settings.ranks
    weights = [sum(_held(config, entry, ranks, rank, on_gpu) for entry in entries) for rank in range(ranks)]
    return tuple(held + _rows(config, settings, rank) for rank, held in enumerate(weights))


def _held(config: BlockConfig, entry: TensorEntry, ranks: int, rank: int, on_gpu: bool) -> int:
    if entry.name.startswith(HOST_TABLES):
        return 0 if rank else entry.nbytes
    if len(entry.shape) == 1:
        return 4 * entry.shape[0]
    sizes = [part.stop - part.start for part in held_part(config, entry.name, entry.shape, ranks, rank)]
    if on_gpu and len(sizes) == 2:
        rows, columns = sizes
        return matrix_bytes(rows, columns, GPU_FORMAT)
    return prod(sizes) * (entry.nbytes // prod(entry.shape))


def _rows(config: BlockConfig, settings: Settings, rank: int) -> int:
    rows = settings.parallel * config.window + kept_pages(config, settings) * page_rows(config)
    item = 4 if settings.kv == FLOAT32 else 2
    return rows * 2 * config.num_hidden_layers * held_heads(config, settings.ranks, rank) * config.head_dim * item
