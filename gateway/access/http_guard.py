"""The guard around every handler: it authenticates, bounds requests in flight, and gives each end a status, a shape and
a count."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from common.contract.errors import Cause
from common.runtime.clock import Clock
from gateway.access.callers import CALLER, Callers
from gateway.access.cors import Cors
from gateway.access.hosts import Hosts
from gateway.api_settings import ApiSettings
from gateway.dashboard import assets
from gateway.observability.metrics import GatewayMetrics
from gateway.serving.generation import GenerationFailed
from gateway.web.ending import Ending
from gateway.web.http_errors import CLIENT_CLOSED_REQUEST, ApiError, from_failure, from_http, internal_error
from gateway.web.request_ids import ACCEPTED, REFUSAL

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"}) | assets.PATHS.keys()
"""Paths that need no key: those of probes and scrapers, and the dashboard page, where a person enters a key."""
_OWN_WORDS: Final = frozenset({401, 403, 429, 503})
"""Statuses whose messages contain nothing of what the client wrote."""

_LOG = logging.getLogger(__name__)


_IN_FLIGHT: Final = web.RequestKey("in_flight", bool)
"""Request key of a POST that counts as one of those in flight."""


class Guard:
    """Authentication, bounds on requests, errors, and the headers of every answer."""

    def __init__(
        self,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        callers: Callers,
        ending: Ending,
        clock: Clock,
    ) -> None:
        self._limits = settings.limits
        self._cors = Cors(settings.cors_origins)
        self._callers = callers
        self._metrics = metrics
        self._hosts = Hosts(settings.allowed_hosts)
        self._ending = ending
        self._clock = clock
        self.num_in_flight = 0
        """Number of POST requests whose body has been read. Until then a request occupies only a connection."""
        metrics.requests_in_flight.set_function(lambda: self.num_in_flight)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware to install in the application."""
        code = CLIENT_CLOSED_REQUEST
        try:
            response = await self._respond(request, handler)
            code = response.status
        finally:
            self._metrics.answered(_endpoint(request), code)
        if request.method == "POST" and request.path.startswith("/v1/"):
            self._note_failure(code)
        return response

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add headers to any answer before its head is sent, including streams and errors."""
        response.headers.update(self._cors.headers(request))
        if CALLER in request:
            response.headers.update(request[CALLER].headers())

    def _note_failure(self, code: int) -> None:
        """Record for the dashboard an answer that is a refusal or a failure, and not the client's fault."""
        if code in (429, 503):
            self._metrics.recent.refused(self._clock())
        elif code >= 500:
            self._metrics.recent.failed(self._clock())

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
            self._check_room()  # before a body is read in vain
            self._ending.follow()
            with caller.request():
                try:
                    return await handler(request)
                finally:
                    self.num_in_flight -= request.get(_IN_FLIGHT, False)
        except web.HTTPException as error:
            if "Allow" in error.headers:
                headers["Allow"] = error.headers["Allow"]
            answer = from_http(error, request.path)
        except asyncio.CancelledError:
            if request.writer.output_size or not self._ending.is_reason():
                raise  # after an answer, or a part of one, no other one can be sent
            answer = as_api_error(gateway_ended())
        except Exception as error:  # noqa: BLE001 (logged in as_api_error)
            answer = ApiError(CLIENT_CLOSED_REQUEST, "client gone") if is_gone(request) else as_api_error(error)
            accepted = request.get(ACCEPTED, False)  # those are counted by `RequestLife`
            if request.method == "POST" and not accepted and answer.code in (Cause.INTERNAL, Cause.CAPACITY):
                self._metrics.failed(answer.code)
        request[REFUSAL] = _described(request, answer)
        return answer.response(headers)

    def knows(self, request: web.Request) -> bool:
        """Whether a request to a path that needs no key may be told what needs one."""
        return self._callers.knows(request)

    def count(self, request: web.Request) -> None:
        """Count a POST request, whose body has been read, as in flight until it ends. Raises `ApiError`, a 429, if
        there is no room for it."""
        self._check_room()
        request[_IN_FLIGHT] = True
        self.num_in_flight += 1

    def _check_room(self) -> None:
        if self.num_in_flight >= self._limits.max_in_flight:
            raise ApiError(429, f"{self.num_in_flight} requests are in flight, as many as may", code=Cause.CAPACITY)


def is_gone(request: web.Request) -> bool:
    """Whether the client's connection is closed, so that nobody would read an answer."""
    return request.transport is None or request.transport.is_closing()


def gateway_ended() -> GenerationFailed:
    """The failure of a request that is still in flight when the gateway's shutdown grace is over."""
    return GenerationFailed(Cause.DRAINING, "this gateway ends, and the request was not done in time")


def as_api_error(error: Exception) -> ApiError:
    """The client's version of any error; details that it does not contain are logged."""
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


def _described(request: web.Request, answer: ApiError) -> dict[str, str]:
    """What the log says of a refusal: of what the client wrote, only its tenant."""
    caller = request.get(CALLER)
    fields = {
        "code": answer.code,
        "param": re.split(r"[.\[]", answer.param or "", maxsplit=1)[0],  # what follows may be the client's
        "tenant": None if caller is None else caller.tenant,
        "why": answer.message if answer.status in _OWN_WORDS else None,
    }
    return {name: value for name, value in fields.items() if value}


def _endpoint(request: web.Request) -> str:
    """The route's pattern, as a metric label: clients cannot create new values of it."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
