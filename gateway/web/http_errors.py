"""Refusals and failures as clients see them: one JSON shape, and one status for each cause."""

from __future__ import annotations

import json
import math
from typing import Final

from aiohttp import web

from common.contract.errors import BatonError, Cause
from gateway.serving.generation import GenerationFailed

CLIENT_CLOSED_REQUEST: Final = 499
"""Status of a request whose client left or that was cancelled (nginx's number); it occurs mostly in metrics."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    CLIENT_CLOSED_REQUEST: "cancelled_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_STATUSES: Final = {
    Cause.CANCELLED: CLIENT_CLOSED_REQUEST,
    Cause.CAPACITY: 429,
    Cause.INVALID: 400,
    Cause.TOO_LARGE: 400,
    Cause.DEADLINE: 504,
    Cause.DRAINING: 503,
    Cause.WORKER_LOST: 503,
    Cause.LEASE_LOST: 503,
    Cause.TRANSFER: 503,
    Cause.FINGERPRINT: 503,
    Cause.SUPERSEDED: 503,
    Cause.POISON: 500,
    Cause.INTERNAL: 500,
}
_RETRYABLE: Final = frozenset({429, 503})


class ApiError(BatonError):
    """An error that ends a request with this HTTP status and error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        """The request's field at fault."""
        self.code = code
        self.retry_after_s = retry_after_s
        """Seconds after which the client may retry; None if unknown."""

    def body(self) -> dict[str, object]:
        """The error as a JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """The error as a response. A client that may retry is told after how many seconds: `retry_after_s`, and at
        least 1. OpenAI's clients, which repeat a request after any status from 500 on, are told not to repeat one that
        crashes workers."""
        headers = dict(headers or {})
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in _RETRYABLE:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s or 0)))
        if self.code == Cause.POISON:
            headers["x-should-retry"] = "false"
        return web.Response(
            status=self.status, text=json.dumps(self.body()), content_type="application/json", headers=headers
        )


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """A 500 without details, which are in the log."""
    return ApiError(500, "internal error", code=Cause.INTERNAL)


def from_failure(failure: GenerationFailed) -> ApiError:
    """The error for a generation that did not finish."""
    if failure.cause is Cause.INTERNAL:
        return internal_error()
    param = "max_tokens" if failure.cause is Cause.TOO_LARGE else None
    return ApiError(
        _STATUSES[failure.cause],
        failure.message,
        param=param,
        code=failure.cause,
        retry_after_s=failure.retry_after_s,
    )


def from_http(error: web.HTTPException, path: str) -> ApiError:
    """The error that replaces aiohttp's own error page."""
    match error.status:
        case 404:
            return ApiError(404, f"no such path: {path}", code="not_found")
        case 405:
            return ApiError(405, f"{path} does not take this method", code="method_not_allowed")
        case status:
            return ApiError(status, error.reason, code=None)
