"""Which drafter settings and checkpoint come to, and what it caches. Torch-free."""

from __future__ import annotations

from tfglm.cache.sizes import mtp_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError
from tfglm.settings import Settings


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
    return mtp_bytes_per_token(config, kv) if kind == "mtp" else 0
