"""Bytes that the latent cache takes for a token, for every format it can have. Torch-free."""

from __future__ import annotations

from tfglm.checkpoint.config import ModelConfig
from tfglm.formats.latent import KvFormat, RowBytes, row_bytes

FLOAT32 = "fp32"
"""The CPU cache's format for comparing with engines that cache float32; every other is a KvFormat."""


def layer_bytes(config: ModelConfig, kv: str) -> RowBytes:
    """Bytes a token of one layer's latent, rotary and index rows."""
    widths = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    if kv == FLOAT32:
        return RowBytes(*(4 * width for width in widths))
    return row_bytes(KvFormat(kv), *widths)


def trunk_bytes_per_token(config: ModelConfig, kv: str) -> int:
    """Of all trunk layers: latent and rotary rows in each, an index key in those that have an indexer."""
    row = layer_bytes(config, kv)
    return config.num_hidden_layers * (row.latent + row.rotary) + config.indexer_types.count("full") * row.index


def mtp_bytes_per_token(config: ModelConfig, kv: str) -> int:
    """Of the MTP layer, which has an indexer of its own."""
    row = layer_bytes(config, kv)
    return row.latent + row.rotary + row.index
