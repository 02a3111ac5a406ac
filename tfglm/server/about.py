"""What the server says about itself: models, health, version, properties, metrics, and its OpenAPI description."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

from tfglm import __version__
from tfglm.server.errors import RETRY_SECONDS
from tfglm.server.jsontext import dump_bytes
from tfglm.server.metrics import CONTENT_TYPE
from tfglm.server.sampling import check_model
from tfglm.server.state import STATE, Served
from tfglm.server.thinking import EFFORTS
from tfglm.settings import Settings


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = dump_bytes(payload)
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8", headers=headers)


async def health(request: web.Request) -> web.Response:
    """200 only when requests are taken; figures only for those who hold a key."""
    state = request.app[STATE]
    phase = state.phase
    payload: dict[str, Any] = {"status": "ok" if phase == "ready" else phase}
    if state.settings.ranks > 1 and state.keys.accepts(request.headers):
        payload["ranks"] = [phase, *state.ranks()]
    if state.served is not None and state.keys.accepts(request.headers):
        now = state.served.engine.snapshot()
        payload |= {
            "model": state.served.info.name,
            "context_length": state.served.info.context,
            "running": now.running,
            "waiting": now.waiting,
            "step_age_s": round(now.step_age_s, 3),
            "kv_tokens_used": now.kv_tokens_used,
            "kv_tokens_total": now.kv_tokens_total,
            "kept_tokens": now.kept_tokens,
            "prompt_tokens": now.prompt_tokens,
            "generation_tokens": now.generation_tokens,
        }
    if phase == "ready":
        return json_response(payload)
    return json_response(payload, 503, {"Retry-After": str(RETRY_SECONDS)})


async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response({"object": "list", "data": [_model(state.require(), state.settings)]})


async def model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    served = state.require()
    check_model(request.match_info["id"], served.info)
    return json_response(_model(served, state.settings))


async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def props(request: web.Request) -> web.Response:
    state = request.app[STATE]
    served = state.require()
    defaults = served.info.defaults
    sampling = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "n_predict": state.settings.max_tokens,
    }
    return json_response(
        {
            "default_generation_settings": {"n_ctx": served.info.context, "params": sampling},
            "total_slots": state.settings.parallel,
            "model_alias": served.info.name,
            "chat_template": served.template.source,
            "modalities": {"vision": False, "audio": False},
            "thinking": state.settings.thinking,
            "build_info": f"tfglm {__version__}",
        }
    )


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[STATE].metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=_openapi_file(), content_type="application/json", charset="utf-8")


@cache
def _openapi_file() -> bytes:
    return (Path(__file__).parent / "openapi.json").read_bytes()


def _model(served: Served, settings: Settings) -> dict[str, Any]:
    info = served.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "tfglm",
        "root": info.name,
        "parent": None,
        "permission": [],
        "max_model_len": info.context,
        "context_length": info.context,
        "max_output_tokens": info.context - 1,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "reasoning": {"default": "max" if settings.thinking else "none", "effort_mapping": EFFORTS},
    }
