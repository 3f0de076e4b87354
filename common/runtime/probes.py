"""A worker's small HTTP port: `/health` (the process answers), `/ready` (it accepts work), `/metrics`.

It runs on the control loop and not on the engine's thread, so a long step delays no probe. Everybody may connect: a
connection has one request and `CONNECTION_S`, and of too many the oldest is cut off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, cast

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.contract.errors import OperatorError

CONNECTION_S = 10.0
"""Seconds in which a client must have sent its request and read the answer."""
MAX_CONNECTIONS = 64
_SHUTDOWN_S = 1.0


class Probed(Protocol):
    """The state that a worker shows its operator."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """(whether new work is accepted, the counts of everything that a request can hold); JSON values."""

    def metrics(self) -> Iterable[Metric]:
        """The present metrics."""


Values: TypeAlias = Mapping[str, float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, str, str], float] | float
"""One value; or one for each value of a label, or for each tuple of values of several labels."""


def gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A gauge with these labels."""
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), values)


def counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A counter with these labels."""
    return _filled(CounterMetricFamily(name, help_text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


class _Scrape(Collector):
    def __init__(self, probed: Probed) -> None:
        self._probed = probed

    def collect(self) -> Iterable[Metric]:
        return self._probed.metrics()


class _Connection(web.RequestHandler):
    """A client's connection."""

    __slots__ = ("_bound", "_connections", "_open")

    def __init__(self, server: web.Server, connections: dict[_Connection, None]) -> None:
        """`connections` are those that are open, the oldest first."""
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=cast(Any, None))
        self._connections = connections
        self._open: asyncio.Transport | None = None  # aiohttp forgets it when it closes it, with what nobody has read
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open = cast(asyncio.Transport, transport)
        self._bound = asyncio.get_running_loop().call_later(CONNECTION_S, self.cut)
        if len(self._connections) >= MAX_CONNECTIONS:
            next(iter(self._connections)).cut()
        self._connections[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def cut(self) -> None:
        """Close it, and discard what its client has not read."""
        self._forget()
        self.force_close()
        if self._open is not None:
            self._open.abort()

    def _forget(self) -> None:
        self._connections.pop(self, None)
        if self._bound is not None:
            self._bound.cancel()


async def _last_answer(_: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"


class ProbeServer:
    """The HTTP port. `probed` is None while the worker starts: the process is then alive but not ready."""

    def __init__(self) -> None:
        self.probed: Probed | None = None
        self.stopping = False
        """Set when the process ends, as at SIGTERM: it is then alive but not ready."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: dict[_Connection, None] = {}

    async def bind(self, host: str, port: int) -> int:
        """Bind (0: to an ephemeral port) and serve; return the port. Raises `OperatorError` if it is occupied."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.on_response_prepare.append(_last_answer)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Connection(server, self._connections), host, port
            )
        except OSError as error:
            await self._runner.cleanup()
            raise OperatorError(f"cannot bind the HTTP port {host}:{port}: {error.strerror or error}") from error
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop serving. Answers that are not read by then are cut off."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, _: web.Request) -> web.Response:
        ready, state = (False, {"reason": "starting"}) if self.probed is None else self.probed.ready()
        ready = ready and not self.stopping
        return web.Response(
            text=json.dumps({"ready": ready, **state}), status=200 if ready else 503, content_type="application/json"
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        registry = CollectorRegistry()
        if self.probed is not None:
            registry.register(_Scrape(self.probed))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
