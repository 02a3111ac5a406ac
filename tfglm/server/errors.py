"""Errors as OpenAI clients expect them: an HTTP status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tfglm.engine.api import ContextLengthError, NotServingError, QueueFullError
from tfglm.errors import TfglmError
from tfglm.server.jsontext import dump_bytes

TYPES = {
    401: "authentication_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
RETRY_SECONDS = 5
"""Retry-After of an answer that will be different soon: loading, draining."""


class ApiError(Exception):
    """A request that gets an error instead of a reply. `param` names the field of the body at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return web.Response(
            body=dump_bytes(self.payload()),
            status=self.status,
            content_type="application/json",
            charset="utf-8",
            headers=self.headers,
        )


def invalid(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="unsupported_parameter", param=param)


def unavailable(code: str, message: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def from_engine(error: TfglmError) -> ApiError:
    """The HTTP form of an error that `EnginePort.submit` raised."""
    if isinstance(error, QueueFullError):
        return ApiError(429, error.message, code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, NotServingError):
        return unavailable("not_serving", error.message)
    if isinstance(error, ContextLengthError):
        return ApiError(400, error.message, code="context_length_exceeded", param="prompt")
    return ApiError(500, str(error), code="engine_error")
