"""Client connections: how many there may be, and how long each of their steps may take.

aiohttp parses HTTP, bounds lines, fields and pipelined requests, and closes idle connections. This module adds the
missing bounds: a request's head must be complete within a time and a size, an answer must be read, and the number of
connections is limited, TLS handshakes in progress included. At that limit a new one takes the place of one that is
serving no request (`giving_way`), so that no client can keep the others out.

When the gateway ends, each connection is closed as soon as that loses no request: an idle one at once, a new one or one
in the middle of a request after that request's answer. Decision 31 says why none of this is left to aiohttp or to the
kernel.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from common.runtime.descriptors import allow_descriptors
from gateway.access.giving_way import Use, first_to_go
from gateway.access.reading import Reading
from gateway.observability.metrics import GatewayMetrics
from gateway.web.ending import ENDING
from gateway.web.http_errors import ApiError, from_http, internal_error

_BACKLOG: Final = 1024
_ACCEPT_PAUSE_S: Final = 1.0
"""Pause before accepting again after `accept` has failed: the process is out of descriptors or memory."""
_LOOK_AGAIN_S: Final = 0.05
"""Seconds before a connection that could give way is looked for again, where there was none."""
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Seconds of silence after which the client's machine is probed, seconds between probes, and the number of unanswered
probes that ends the connection; as in the control channel. Linux's own first number is two hours."""
_SPARE_DESCRIPTORS: Final = 256 + 4 * 1024
"""File descriptors reserved for what are no client connections: four for each of 1,024 workers, and others."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds on client connections."""

    max_connections: int = 4096
    header_timeout_s: float = 10.0
    """Time limit of a TLS handshake; of a request's head, counted from the start of the connection or, for later
    requests, from the head's first byte; and of reading the rest of a body that has been answered already and is
    discarded."""
    idle_timeout_s: float = 75.0
    """Time between an answer and the next head. It must be longer than whoever connects keeps an idle connection: a
    request that is sent while the gateway closes its connection is lost."""
    stall_timeout_s: float = 60.0
    """Time in which the client must read at least one byte of an answer that waits for it."""
    reading_timeout_s: float = 1800.0
    """Time in which the client must read an answer that is no stream, which waits for it as a whole; and the longest
    time for which a stream waits for its client without a break, in which some 64 KiB have to be read. What is left of
    an answer when its end is written is bounded by `stall_timeout_s` and, over TLS, by this time again."""
    max_head_bytes: int = 64 * 2**10
    """All lines of a head together, in bytes."""


class _Connection(web.RequestHandler):
    """aiohttp's connection, with deadlines. Its own errors have the API's shape and quote no received bytes."""

    __slots__ = (
        "_body",
        "_bounds",
        "_ends",
        "_head_bytes",
        "_head_timer",
        "_listener",
        "_num_answered",
        "_reading",
    )

    def __init__(self, server: web.Server, bounds: ConnectionBounds, listener: Listener) -> None:
        # Nothing is inflated: `request_body` refuses compressed bodies, and others are discarded.
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=bounds.idle_timeout_s,
            lingering_time=bounds.header_timeout_s,
            access_log=cast(Any, None),
            auto_decompress=False,
        )
        self._bounds = bounds
        self._listener = listener
        self._ends = False
        """Whether the connection is to be closed after the requests that are under way."""
        self._num_answered = 0
        self._body: aiohttp.StreamReader | None = None
        """Body of the last request whose head has come; it may still be arriving."""
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading: Reading
        """The client's reading, which also keeps the transport. aiohttp forgets a transport that it closes, but that
        keeps its socket until the client has read all that was written."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reading = Reading(
            cast(asyncio.Transport, transport),
            stall_timeout_s=self._bounds.stall_timeout_s,
            reading_timeout_s=self._bounds.reading_timeout_s,
            refused=self._listener.refused,
        )
        self._listener.opened(self)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.closed(self)
        self._reading.stop()
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    async def start(self) -> None:
        """Process requests until the connection is closed or lost. A closed one then has to be read to its end."""
        try:
            await super().start()
        finally:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()  # aiohttp's `close` leaves the transport of an idle connection open
            self._reading.watch()

    def close(self) -> None:
        """Close the connection at once if it is between requests; otherwise, or if its first request has not come yet,
        after the last answer.

        aiohttp calls this when the gateway ends, before open requests get their time. Its own method would ignore all
        bytes that come from then on, of bodies and heads too.
        """
        self._ends = True
        under_way = self._request_count != self._num_answered or self._head_timer is not None
        if not under_way:
            super().close()
        if not self._reading.is_over and (under_way or not self._reading.is_done):
            self._listener.hold(self)

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """End the request that is being answered, and close: the time of open requests is over."""
        super().close()  # else aiohttp would wait for a request that has not come
        await super().shutdown(timeout)

    def data_received(self, data: bytes) -> None:
        num_heads, busy = self._request_count, self._busy
        super().data_received(data)
        if self._request_count != num_heads:
            self._body = self._messages[-1][1]
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif data and not busy:
            if self._head_timer is None:
                self._expect_head()
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.max_head_bytes:
                self._refuse("large_head", 431, f"a request's head has at most {self._bounds.max_head_bytes} bytes")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer and get ready for the next request; aiohttp's own error answers are given the API's shape."""
        if isinstance(resp, web.HTTPException):
            resp = from_http(resp, request.path).response()
        timer = asyncio.get_running_loop().call_later(
            self._bounds.reading_timeout_s, self._reading.cut_off, "slow_reader"
        )
        try:
            end = await super().finish_response(request, resp, start_time)
        finally:
            timer.cancel()
        if self.is_at_last_answer:
            end[0].force_close()
        self._body = self._messages[-1][1] if self._messages else request.content
        self._num_answered += 1
        return end

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not valid HTTP, or a handler's failure. aiohttp would log the request and echo it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way, and cannot become another one")
        if status >= 500:
            _LOG.error("unexpected error", exc_info=exc)
            error = internal_error()
        elif isinstance(exc, LineTooLong):
            error = ApiError(431, f"a line of a request's head has at most {self.max_field_size} bytes")
        else:
            error = ApiError(400, "the request is not valid HTTP", code="invalid_http")
        self._listener.refused("malformed")
        response = error.response()
        response.force_close()
        return response

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.pause()

    def resume_writing(self) -> None:
        self._reading.resume()
        super().resume_writing()

    def cancel(self) -> None:
        """Close the connection, and discard what its client has not read."""
        self.force_close()
        self._reading.transport.abort()

    @property
    def use(self) -> Use:
        """What the connection is used for."""
        if self._request_count != self._num_answered:
            is_one = self._request_count == self._num_answered + 1
            return Use.ARRIVING if is_one and self._body is not None and not self._body.is_eof() else Use.SERVING
        is_idle = self._head_timer is None and not self._busy and self._reading.is_done
        return Use.IDLE if is_idle else Use.UNSERVED

    @property
    def is_at_last_answer(self) -> bool:
        """While a request is being answered: whether the connection is to be closed, and no other request has come."""
        return self._ends and self._request_count == self._num_answered + 1

    @property
    def _busy(self) -> bool:
        """Whether incoming bytes are, or may be, part of a request's body, or wait behind one."""
        return self._request_count != self._num_answered or not (self._body is None or self._body.is_eof())

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = asyncio.get_running_loop().call_later(self._bounds.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse("slow_head", 408, f"a request's head must come within {self._bounds.header_timeout_s:g} s")
        else:
            self._listener.refused("slow_head")
            self.force_close()

    def _refuse(self, reason: str, status: int, message: str) -> None:
        """Send an error before there is a request to answer, and close."""
        self._listener.refused(reason)
        if self.transport is not None:
            self.transport.write(_raw_response(ApiError(status, message)))
        self.force_close()


class Listener:
    """Accepts connections for a runner's application, within bounds. Close it before cleaning up the runner."""

    def __init__(
        self,
        runner: web.AppRunner,
        bounds: ConnectionBounds,
        metrics: GatewayMetrics | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`runner` must have been set up. `metrics` counts these connections."""
        assert runner.server is not None
        self._server = runner.server
        self._bounds = bounds
        self._metrics = metrics
        self._tls = tls
        self._ending = runner.app.get(ENDING)
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._clients: dict[_Connection | asyncio.Task[None], str] = {}
        """Connection, or task of a handshake in progress → address of its client, oldest first."""
        self._full_until = -math.inf
        """Until when no connection is looked for that could give way; the loop's time."""

    @property
    def port(self) -> int:
        """The port of the first socket."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from a bound socket, which `close` closes too."""
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        for option, value in _KEEPALIVE:  # accepted sockets inherit them, and aiohttp turns probes on
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sockets.append(listener)
        self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def close(self) -> None:
        """Accept no more connections, and cancel handshakes in progress. The runner's `cleanup` closes connections."""
        tasks = [*self._accepting, *(each for each in self._clients if isinstance(each, asyncio.Task))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._sockets:
            listener.close()

    def opened(self, connection: _Connection) -> None:
        """Record a connection that has been made."""
        assert connection.transport is not None
        self._clients[connection] = _host(connection.transport.get_extra_info("peername"))
        self._count()

    def closed(self, connection: _Connection | asyncio.Task[None]) -> None:
        """Record a connection that has been lost, or a handshake that has ended."""
        self._clients.pop(connection, None)
        if self._ending is not None:
            self._ending.release(connection)
        self._count()

    def hold(self, connection: _Connection) -> None:
        """Let the end of the gateway wait until the connection is lost."""
        if self._ending is not None:
            self._ending.hold(connection)

    def refused(self, reason: str) -> None:
        """Count a connection that was refused or closed, by reason."""
        if self._metrics is not None:
            self._metrics.connection_refused(reason)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                _LOG.error("cannot accept connections: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            client = _host(address)
            if len(self._clients) >= self._bounds.max_connections and not self._make_room(client):
                self._turn_away(connection)
                continue
            task = asyncio.create_task(self._connect(connection))
            self._clients[task] = client
            self._count()
            task.add_done_callback(self.closed)

    async def _connect(self, connection: socket.socket) -> None:
        """Return once the connection is made, after the TLS handshake if TLS is used."""
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {
                "ssl": self._tls,
                "ssl_handshake_timeout": self._bounds.header_timeout_s,
                "ssl_shutdown_timeout": self._bounds.reading_timeout_s,  # `Reading` ends it before, if nothing is read
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self._server, self._bounds, self), connection, **options
            )
        except OSError as error:  # includes SSLError
            _LOG.debug("no connection with a client: %s", error)
            self.refused("handshake")

    def _make_room(self, client: str) -> bool:
        """Close the connection that gives way to a new one of `client`. False if there is none, or was none a moment
        ago: to look through all of them takes milliseconds."""
        now = asyncio.get_running_loop().time()
        if now < self._full_until:
            return False
        found = first_to_go(
            self._clients, client, lambda each: Use.UNSERVED if isinstance(each, asyncio.Task) else each.use
        )
        if found is None:
            self._full_until = now + _LOOK_AGAIN_S
            return False
        found.cancel()
        self.closed(found)
        self.refused("crowded_out")
        return True

    def _turn_away(self, connection: socket.socket) -> None:
        self.refused("full")
        with connection, suppress(OSError):  # the client may have gone already
            if self._tls is None:
                connection.setblocking(False)
                connection.send(_raw_response(ApiError(503, "too many connections", code="connections")))

    def _count(self) -> None:
        if self._metrics is not None:
            self._metrics.connections.set(len(self._clients))


def _host(address: Any) -> str:
    """The address of a socket's peer; empty for a UNIX socket, which has none."""
    return str(address[0]) if address else ""


async def announce_close(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client in an answer's head if its connection is closed after this answer; for `on_response_prepare`. A
    request that comes later is not answered."""
    connection = request.protocol
    if isinstance(connection, _Connection) and connection.is_at_last_answer:
        response.force_close()
        response.headers["Connection"] = "close"


def allow_connections(max_connections: int) -> None:
    """Let the process have as many files open as `max_connections` need; warn if the system does not."""
    needed = max_connections + _SPARE_DESCRIPTORS
    allowed = allow_descriptors(needed)
    if allowed < needed:
        _LOG.warning("%d connections need %d open files, and the system allows %d", max_connections, needed, allowed)


def _raw_response(error: ApiError) -> bytes:
    """A complete HTTP response, for errors before aiohttp has a request to answer."""
    body = json.dumps(error.body()).encode()
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json; charset=utf-8\r\nConnection: close\r\n"
    if error.status == 503:
        head += "Retry-After: 1\r\n"
    return head.encode() + b"\r\n" + body
