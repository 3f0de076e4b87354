"""Around every handler: who may ask, how many at once, and that each end has a status, a shape and a count."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.contract.errors import Cause
from gateway.api_settings import ApiSettings
from gateway.generation import GenerationFailed
from gateway.http_errors import CLIENT_CLOSED_REQUEST, ApiError, from_failure, from_http, internal_error, invalid
from gateway.metrics import GatewayMetrics

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What probes and scrapers read, which have no key."""
MAX_TENANT_CHARS: Final = 256
"""Longest name of a tenant, as on the wire."""

_LOG = logging.getLogger(__name__)


class Guard:
    """Authentication, the bound on concurrency, and errors."""

    def __init__(self, settings: ApiSettings, metrics: GatewayMetrics) -> None:
        self._limits = settings.limits
        self._keys = [key.encode() for key in settings.api_keys]
        self._metrics = metrics
        self._num_in_flight = 0

    @property
    def middleware(self) -> Middleware:
        """To be installed in the application."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            code = CLIENT_CLOSED_REQUEST
            try:
                response = await self._respond(request, handler)
                code = response.status
            finally:
                self._metrics.answered(_endpoint(request), code)
            return response

        return guard

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = {}
        try:
            self._authenticate(request)
            if request.method != "POST":
                return await handler(request)
            with self._slot():
                return await handler(request)
        except web.HTTPException as error:
            if "Allow" in error.headers:
                headers["Allow"] = error.headers["Allow"]
            answer = from_http(error, request.path, self._limits.max_body_bytes)
        except Exception as error:  # noqa: BLE001 (logged where it is worded)
            answer = ApiError(CLIENT_CLOSED_REQUEST, "client gone") if is_gone(request) else as_api_error(error)
        return answer.response(self._limits.retry_after_s, headers)

    def _authenticate(self, request: web.Request) -> None:
        if not self._keys or request.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        key = given.strip().encode(errors="surrogateescape")
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer ...", code="invalid_api_key")

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self._num_in_flight >= self._limits.max_in_flight:
            raise ApiError(429, f"{self._num_in_flight} requests are in flight, as many as may", code=Cause.CAPACITY)
        self._num_in_flight += 1
        self._metrics.requests_in_flight.inc()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self._metrics.requests_in_flight.dec()


def tenant_of(request: web.Request, header: str | None) -> str:
    """The tenant that `header` names; "" without one. Raises `ApiError`, a 400, for what is no name, or two of them:
    then somebody has added to what another wrote."""
    names = [] if header is None else request.headers.getall(header, [])
    if len(names) > 1:
        raise invalid(None, f"the header {header} must come once", code="invalid_tenant")
    tenant = names[0] if names else ""
    if len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
        message = f"the header {header} must hold at most {MAX_TENANT_CHARS} printable characters"
        raise invalid(None, message, code="invalid_tenant")
    return tenant


def is_gone(request: web.Request) -> bool:
    """Whether the client's connection is closed, so that nobody reads an answer."""
    return request.transport is None or request.transport.is_closing()


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about any error; what it is not told is logged."""
    match error:
        case ApiError():
            return error
        case GenerationFailed(cause=Cause.INTERNAL):
            _LOG.error("a generation failed: %s", error.message)
            return from_failure(error)
        case GenerationFailed():
            return from_failure(error)
        case _:
            _LOG.error("unexpected error", exc_info=error)
            return internal_error()


def _endpoint(request: web.Request) -> str:
    """The route's pattern: a label that clients cannot multiply."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
