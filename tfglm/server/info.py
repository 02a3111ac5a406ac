"""What the API says about the model it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tfglm.checkpoint.config import GenerationDefaults


@dataclass(frozen=True)
class ModelInfo:
    """The one model of a server. `context` is the window of a request: prompt and reply, in tokens."""

    name: str
    context: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
