"""Around every handler: who may ask, how many at once, and that each end has a status, a shape and a count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.contract.errors import Cause
from gateway.access.callers import CALLER, Callers
from gateway.access.cors import Cors
from gateway.access.hosts import Hosts
from gateway.api_settings import ApiSettings
from gateway.dashboard import assets
from gateway.observability.metrics import GatewayMetrics
from gateway.serving.generation import GenerationFailed
from gateway.web.ending import Ending
from gateway.web.http_errors import CLIENT_CLOSED_REQUEST, ApiError, from_failure, from_http, internal_error

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"}) | assets.PATHS.keys()
"""What probes and scrapers read, which have no key; and the page in which a person gives one."""

_LOG = logging.getLogger(__name__)


class Slot:
    """A request's place among those in flight. It is taken once the body is there: until then the request costs a
    connection, and nothing that others wait for."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._taken = False

    def take(self) -> None:
        """Raises `ApiError`, a 429, where there is none."""
        assert not self._taken
        self._guard.check_room()
        self._taken = True
        self._guard.count(1)

    def leave(self) -> None:
        """The request has ended, with a slot or without."""
        if self._taken:
            self._taken = False
            self._guard.count(-1)


SLOT: Final = web.RequestKey("slot", Slot)
"""Where a POST has its slot."""


class Guard:
    """Authentication, the bounds on requests, errors, and the headers that every answer has."""

    def __init__(self, settings: ApiSettings, metrics: GatewayMetrics, callers: Callers, ending: Ending) -> None:
        self._limits = settings.limits
        self._cors = Cors(settings.cors_origins)
        self._callers = callers
        self._metrics = metrics
        self._hosts = Hosts(settings.allowed_hosts)
        self._ending = ending
        self.num_in_flight = 0
        """Requests that have a slot."""

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

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called before the head of any answer is sent, a stream's and an error's included."""
        response.headers.update(self._cors.headers(request))
        if CALLER in request:
            response.headers.update(request[CALLER].headers())

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = {}
        try:
            if self._hosts.refuses(request.headers.get("Host")):
                message = "this gateway is not known by the name in Host (--allowed-hosts)"
                raise ApiError(403, message, code="foreign_host")
            if self._cors.is_preflight(request):
                return self._cors.preflight(request)
            if request.path in OPEN_PATHS:
                return await handler(request)
            caller = request[CALLER] = self._callers.identify(request)
            if request.method != "POST":
                return await handler(request)
            if self._cors.refuses(request):
                raise ApiError(403, "requests of this web page are not taken", code="foreign_origin")
            self.check_room()  # rather than read a body for nothing
            self._ending.follow()
            with caller.request(), closing_slot(request, Slot(self)):
                return await handler(request)
        except web.HTTPException as error:
            if "Allow" in error.headers:
                headers["Allow"] = error.headers["Allow"]
            answer = from_http(error, request.path, self._limits.max_body_bytes)
        except asyncio.CancelledError:
            if not self._ending.is_reason():
                raise
            answer = as_api_error(has_ended())
        except Exception as error:  # noqa: BLE001 (logged where it is worded)
            answer = ApiError(CLIENT_CLOSED_REQUEST, "client gone") if is_gone(request) else as_api_error(error)
        return answer.response(self._limits.retry_after_s, headers)

    def check_room(self) -> None:
        """Raise `ApiError`, a 429, if as many requests are in flight as may."""
        if self.num_in_flight >= self._limits.max_in_flight:
            raise ApiError(429, f"{self.num_in_flight} requests are in flight, as many as may", code=Cause.CAPACITY)

    def count(self, change: int) -> None:
        """A slot is taken, or free again."""
        self.num_in_flight += change
        self._metrics.requests_in_flight.inc(change)


@contextmanager
def closing_slot(request: web.Request, slot: Slot) -> Iterator[None]:
    """Give the request its slot to take."""
    request[SLOT] = slot
    try:
        yield
    finally:
        slot.leave()


def is_gone(request: web.Request) -> bool:
    """Whether the client's connection is closed, so that nobody reads an answer."""
    return request.transport is None or request.transport.is_closing()


def has_ended() -> GenerationFailed:
    """What becomes of a request that is under way when a gateway's time to end is over."""
    return GenerationFailed(Cause.DRAINING, "this gateway ends, and the request was not done in time")


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
