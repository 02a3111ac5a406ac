"""Routes and what surrounds every handler: request id, key, errors as JSON."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from tfglm.server import about
from tfglm.server.chat import chat_completions
from tfglm.server.completions import completions
from tfglm.server.errors import ApiError
from tfglm.server.state import STATE, ServerState
from tfglm.server.tokenize import detokenize, tokenize

log = logging.getLogger("tfglm.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/health", "/v1/health", "/ping")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(state: ServerState) -> web.Application:
    """The whole API over `state`. Routes that need the model answer 503 until `state.open` was called."""
    app = web.Application(middlewares=[_errors_as_json, _keys], client_max_size=state.settings.body_mib * 1024 * 1024)
    app[STATE] = state
    app.on_response_prepare.append(_echo_request_id)
    readers: tuple[tuple[str, Handler], ...] = (
        ("/health", about.health),
        ("/v1/health", about.health),
        ("/ping", about.health),
        ("/metrics", about.metrics),
        ("/v1/metrics", about.metrics),
        ("/version", about.version),
        ("/props", about.props),
        ("/openapi.json", about.openapi),
        ("/v1/models", about.models),
        ("/v1/models/{id:.+}", about.model),
    )
    writers: tuple[tuple[str, Handler], ...] = (
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
        ("/tokenize", tokenize),
        ("/v1/tokenize", tokenize),
        ("/detokenize", detokenize),
        ("/v1/detokenize", detokenize),
    )
    for path, handler in readers:
        app.router.add_get(path, handler)
    for path, handler in writers:
        app.router.add_post(path, handler)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return _from_http(request, error).response()
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return ApiError(500, "the server made a mistake; its log has the traceback", code="internal_error").response()


@web.middleware
async def _keys(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path not in OPEN_PATHS:
        request.app[STATE].keys.check(request.headers)
    return await handler(request)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    sent = request.headers.get("x-request-id", "")
    response.headers["x-request-id"] = sent if _REQUEST_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals, which would be plain text."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[STATE].settings.body_mib
        return ApiError(413, f"the body is larger than {limit} MiB (--body-mib)", code="request_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"there is no {request.path} here; /openapi.json lists what there is", code="not_found")
    return ApiError(error.status, error.reason, code="http_error")
