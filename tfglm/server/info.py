"""What the API says about the model it serves."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling of a request that names none: the checkpoint's generation_config.json, else GLM-5's published values."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: Path) -> SamplingDefaults:
        """Raises ConfigError when generation_config.json holds something other than numbers for these fields."""
        path = folder / "generation_config.json"
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text(encoding="utf-8"))
        values: dict[str, Any] = {}
        for name, default in (("temperature", 1.0), ("top_p", 0.95), ("top_k", 0), ("min_p", 0.0)):
            values[name] = _number(path, stored, name, default)
        values["top_k"] = int(values["top_k"])
        values["repetition_penalty"] = _number(path, stored, "repetition_penalty", 1.0)
        return cls(**values)


@dataclass(frozen=True)
class ModelInfo:
    """The one model of a server. `context` is the window of a request: prompt and reply, in tokens."""

    name: str
    context: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))


def _number(path: Path, stored: dict[str, Any], name: str, default: float) -> float:
    value = stored.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{path.name}: {name} is {value!r}; it must be a number")
    return value
