"""Which drafter settings, checkpoint and drafter folder come to, and what it keeps. Torch-free."""

from __future__ import annotations

import logging
from pathlib import Path

from tfglm.cache.sizes import mtp_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import pages_of_window
from tfglm.errors import ConfigError
from tfglm.settings import Settings

log = logging.getLogger(__name__)

DFLASH2_LICENCE = (
    "W_LICENCE: the published DFlash2 drafters are licensed CC BY-NC-ND 4.0: no commercial use, no distribution of "
    "altered copies; --drafter mtp and dspark have other terms"
)


def drafter_kind(settings: Settings, config: ModelConfig) -> str:
    """The drafter that the settings and the files come to: "mtp", "dspark", "dflash2" or "none". Raises ConfigError
    for one that is asked for and is not there, or is another model's."""
    wanted = settings.drafter
    if settings.drafter_path and wanted in ("auto", "dspark", "dflash2"):
        return _block_kind(block_config(settings), settings, config)
    if wanted in ("dspark", "dflash2"):
        raise ConfigError(f"--drafter is {wanted}, which needs --drafter-path: the folder of its files")
    if settings.drafter_path:
        raise ConfigError(f"--drafter-path is {settings.drafter_path!r}, which --drafter {wanted} does not read")
    has_mtp = bool(config.num_nextn_predict_layers)
    if wanted == "auto":
        return "mtp" if has_mtp else "none"
    if wanted == "mtp" and not has_mtp:
        raise ConfigError(
            "--drafter is mtp, but the checkpoint has no MTP layer (num_nextn_predict_layers is 0); none and auto work"
        )
    return wanted


def block_config(settings: Settings) -> BlockConfig:
    """The config in the drafter folder. Raises ConfigError."""
    try:
        return BlockConfig.from_file(Path(settings.drafter_path) / "config.json")
    except ConfigError as error:
        raise ConfigError(f"--drafter-path: {error.message}") from None


def _block_kind(block: BlockConfig, settings: Settings, config: ModelConfig) -> str:
    folder, wanted = settings.drafter_path, settings.drafter
    if wanted == "auto" and block.kind == "dflash2":
        raise ConfigError(f"{folder} holds a DFlash2 drafter, which is never taken by itself: say --drafter dflash2")
    if wanted not in ("auto", block.kind):
        raise ConfigError(f"--drafter is {wanted}, but {folder} holds a {block.kind} drafter")
    for name in ("hidden_size", "vocab_size"):
        own, needed = getattr(block, name), getattr(config, name)
        if own != needed:
            raise ConfigError(f"{folder} holds a drafter of another model: its {name} is {own}, this one's {needed}")
    return block.kind


def cached_bytes_per_token(kind: str, config: ModelConfig, kv: str) -> int:
    """Bytes a drafter caches for one token beside the trunk's own."""
    return mtp_bytes_per_token(config, kv) if kind == "mtp" else 0


def kept_pages(block: BlockConfig, settings: Settings) -> int:
    """Pages of a block drafter's own rows that are kept for prompts that resume: as much as all streams' rings hold."""
    return settings.parallel * pages_of_window(block) if settings.kept_gib else 0
