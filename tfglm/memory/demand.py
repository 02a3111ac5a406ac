"""What a model asks of every rank, whatever the window: weights, bytes a token, bytes a request. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from tfglm.cache.sizes import layer_bytes, trunk_bytes_per_token
from tfglm.drafts.kind import cached_bytes_per_token, drafter_kind
from tfglm.errors import ConfigError
from tfglm.memory.drafter import block_drafter_bytes
from tfglm.memory.flash import DFLASH2_WEIGHTS, VISION_BYTES, FlashInventory, require_possible
from tfglm.memory.inventory import Inventory
from tfglm.memory.weights import WeightBytes, layout_of, matrix_bytes, weight_bytes
from tfglm.settings import Settings

Planned = Inventory | FlashInventory
"""Every model whose memory can be planned."""


@dataclass(frozen=True)
class Demand:
    """Of each rank: weights, the drafter beside them, what a request holds whatever its length. per_token: bytes that a
    token's rows take on a rank that caches it. gathered: of those, latent and rotary of one layer. layers: of the
    model, and its MTP layer if that drafts."""

    weights: tuple[WeightBytes, ...]
    drafter: tuple[int, ...]
    per_request: tuple[int, ...]
    per_token: int
    gathered: int
    longest: int
    vocab_size: int
    hidden_size: int
    layers: int


def demand_of(inventory: Planned, settings: Settings) -> Demand:
    """Raises ConfigError for settings that the model cannot have."""
    if isinstance(inventory, FlashInventory):
        return _flash(inventory, settings)
    config, ranks = inventory.config, settings.ranks
    weights = weight_bytes(inventory, layout_of(inventory, ranks), dense=settings.dense, head=settings.head)
    kind = drafter_kind(settings, config)
    drafter = tuple(held.mtp if kind == "mtp" else 0 for held in weights)
    if kind in ("dspark", "dflash2"):
        drafter = block_drafter_bytes(settings)
    row = layer_bytes(config, settings.kv)
    return Demand(
        weights=tuple(weights),
        drafter=drafter,
        per_request=(0,) * ranks,
        per_token=trunk_bytes_per_token(config, settings.kv) + cached_bytes_per_token(kind, config, settings.kv),
        gathered=row.latent + row.rotary,
        longest=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers + (kind == "mtp"),
    )


def _flash(inventory: FlashInventory, settings: Settings) -> Demand:
    """dflash2 is held in 4-bit groups on rank 0, where the vision tower is too; auto is the model's own MTP layer."""
    require_possible(settings.kv, settings.cp)
    kind = "mtp" if settings.drafter == "auto" else settings.drafter
    if kind == "dspark":
        raise ConfigError("--drafter is dspark; the plan of the published GLM-5.3-Flash knows auto, mtp, dflash2, none")
    ranks, config = range(settings.ranks), inventory.config
    layout = inventory.layout(settings.ranks)
    weights = weight_bytes(inventory, layout, dense=settings.dense, head=settings.head)
    dflash2 = matrix_bytes(DFLASH2_WEIGHTS // config.hidden_size, config.hidden_size, "q4")
    return Demand(
        weights=tuple(weights),
        drafter=tuple(
            (weights[rank].mtp if kind == "mtp" else dflash2 if kind == "dflash2" and rank == 0 else 0)
            + (VISION_BYTES if rank == 0 else 0)
            for rank in ranks
        ),
        per_request=tuple(inventory.bytes_per_request(rank, settings.ranks) for rank in ranks),
        per_token=inventory.bytes_per_token(settings.kv, mtp=kind == "mtp"),
        gathered=0,
        longest=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers + (kind == "mtp"),
    )
