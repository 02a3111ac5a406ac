"""What every handler shares: settings, the model once it is loaded, live generations and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from tfglm.engine.api import EnginePort, EngineState
from tfglm.server.auth import ApiKeys
from tfglm.server.errors import unavailable
from tfglm.server.info import ModelInfo
from tfglm.server.metrics import ServerMetrics
from tfglm.server.template import ChatTemplate
from tfglm.settings import Settings

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.server.generation import Generation


@dataclass(frozen=True)
class Served:
    """A loaded model: everything a request needs."""

    engine: EnginePort
    tokenizer: Tokenizer
    template: ChatTemplate
    info: ModelInfo


class ServerState:
    """Exists before the model does, so that health checks are answered while it loads. ranks: how ranks 1, 2, .. of the
    model are, in a word or two each."""

    def __init__(self, settings: Settings, ranks: Callable[[], list[str]] = list) -> None:
        self.settings = settings
        self.ranks = ranks
        self.keys = ApiKeys(settings.api_key)
        self.metrics = ServerMetrics()
        self.served: Served | None = None
        self.draining = False
        self.live: set[Generation] = set()

    @property
    def phase(self) -> EngineState:
        if self.served is None:
            return "loading"
        return "draining" if self.draining else self.served.engine.snapshot().state

    def open(self, served: Served) -> None:
        """From now on requests are answered by this model."""
        self.served = served
        self.metrics.watch(served.info.name, served.engine, self.settings.ranks)

    def require(self) -> Served:
        """The model, or the 503 that says why there is none to talk to."""
        served, phase = self.served, self.phase
        if served is None or phase == "loading":
            raise unavailable("loading", "the model is still loading; /health answers 200 when it is ready")
        if phase == "draining":
            raise unavailable("draining", "the server is shutting down and takes no new requests")
        if phase == "failed":
            raise unavailable("engine_failed", "the engine has failed; the log says why; restart the server")
        return served


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
