"""HTTP handlers of the dashboard: the page, `GET /pools` (current state) and `GET /pools/events` (stream of states).

Nothing is computed while nobody watches, and concurrent watchers share one computation.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from aiohttp import web
from prometheus_client import Gauge

from common.contract.errors import Cause
from common.runtime.clock import Clock, monotonic
from gateway.answer.chunk_encoder import encode
from gateway.api_settings import ApiSettings
from gateway.dashboard import assets
from gateway.dashboard.admin_link import AdminLink
from gateway.dashboard.pool_view import Names, pool_view
from gateway.observability.metrics import GatewayMetrics
from gateway.serving.flow import Flow
from gateway.web.event_stream import EventStream
from gateway.web.http_errors import ApiError
from gateway.workers.worker_view import WorkerView

PERIOD_S: Final = 0.4
"""Seconds between two events."""
MAX_WATCHERS: Final = 16
"""Most concurrent event streams. The next one is refused with 429, or replaces one of the client that has most."""
_LATEST_SLOTS: Final = 4
"""Slots in each event except the first, which has all."""


class Pools(Protocol):
    """The dispatcher's view of workers and requests."""

    @property
    def handoffs(self) -> Mapping[tuple[str, str], int]:
        """Completed handoffs, by (address of the prefill worker, address of the decode worker)."""
        ...

    def worker_views(self) -> Collection[WorkerView]:
        """All workers that this gateway knows."""
        ...

    def open_flows(self) -> Iterable[Flow]:
        """The open requests, oldest first."""
        ...


class Dashboard:
    """The page and its data; `create_app` takes it."""

    def __init__(
        self,
        pools: Pools,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        *,
        clock: Clock = monotonic,
        period_s: float = PERIOD_S,
        process: tuple[int, int] | None = None,
    ) -> None:
        """`clock` is the application's. `process` is (number of this process from 1, number of the gateway's
        processes)."""
        self._pools = pools
        self._model_name = settings.model_name
        self._targets = {
            tier.value: {"ttft_s": _finite(target.ttft_s), "itl_s": _finite(target.itl_s)}
            for tier, target in settings.targets.items()
        }
        self._stall_timeout_s = settings.limits.stall_timeout_s
        self._recent = metrics.recent
        self._clock = clock
        self._period_s = period_s
        self._process = process
        self._names = Names(secrets.token_bytes(16))
        self._assets = {path: assets.Asset(file) for path, file in assets.PATHS.items()}
        self._latest: tuple[float, dict[str, object]] = (float("-inf"), {})
        self._open: dict[str, list[asyncio.Event]] = {}
        """Client → end signals of its event streams, oldest first; setting one ends its stream."""
        self._closing = False
        self._watchers = Gauge(
            "baton_gateway_dashboard_watchers", "Event streams of the pools.", registry=metrics.registry
        )
        self.admin: AdminLink | None = None
        """Set once the admin port is bound, if there is one."""

    def add_to(self, app: web.Application, client_of: Callable[[web.Request], str]) -> None:
        """Add the routes, the count of refusals, and the closing of all event streams at the application's shutdown.

        `client_of` returns the client identity of an admitted request.
        """
        self._client_of = client_of
        for path in self._assets:
            app.router.add_get(path, self._asset)
        app.router.add_get("/pools", self._state)
        app.router.add_get("/pools/events", self._events, allow_head=False)
        app.on_shutdown.append(self._close)

    # --- handlers ------------------------------------------------------------------------------------------------

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        return self._assets[request.path].response(request, self._admin_origin(request))

    async def _state(self, request: web.Request) -> web.StreamResponse:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.json_response(self._whole() | self._admin_fields(request), headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        with self._watching(request) as end:
            events = EventStream(request, self._stall_timeout_s)
            admin = self._admin_fields(request)
            await events.send(encode(self._whole() | admin))
            while not await _is_set_within(end, self._period_s):
                await events.send(encode(self._shared() | admin))
            return await events.close()

    # --- answers -------------------------------------------------------------------------------------------------

    def _whole(self) -> dict[str, object]:
        """The current state, with all slots."""
        now = self._clock()
        return self._view(now) | {"recent": self._recent.slots(now)}

    def _shared(self) -> dict[str, object]:
        """The current state with the latest slots, computed once for all watchers."""
        now = self._clock()
        at, latest = self._latest
        if now - at >= self._period_s / 2:
            latest = self._view(now) | {"recent": self._recent.slots(now, _LATEST_SLOTS)}
            self._latest = now, latest
        return latest

    def _view(self, now: float) -> dict[str, object]:
        pools = self._pools
        return {
            "model": self._model_name,
            "process": self._process,
            **pool_view(pools.worker_views(), pools.open_flows(), pools.handoffs, now, self._names),
            "summary": self._recent.summary(now),
            "targets": self._targets,
        }

    def _admin_fields(self, request: web.Request) -> dict[str, object]:
        origin = self._admin_origin(request)
        return {"admin_port": None if origin is None else int(origin.rpartition(":")[2])}

    def _admin_origin(self, request: web.Request) -> str | None:
        if self.admin is None or request.secure:  # a page loaded over TLS may not call a port without TLS
            return None
        return self.admin.origin(request.headers.get("Host", ""))

    # --- event streams -------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, request: web.Request) -> Iterator[asyncio.Event]:
        """Register an event stream; yields the signal that ends it."""
        client, end = self._client_of(request), asyncio.Event()
        self._make_room(client)
        self._open.setdefault(client, []).append(end)
        if self._closing:
            end.set()
        self._watchers.inc()
        try:
            yield end
        finally:
            self._watchers.dec()
            self._leave(client, end)

    def _make_room(self, client: str) -> None:
        """End the oldest stream of the client with most, if it has more than this client would have; else raise a 429.
        So no client can keep the others out."""
        if sum(map(len, self._open.values())) < MAX_WATCHERS:
            return
        most = max(self._open, key=lambda each: len(self._open[each]))
        if len(self._open[most]) <= len(self._open.get(client, ())) + 1:
            raise ApiError(429, f"{MAX_WATCHERS} watch already, as many as may", code=Cause.CAPACITY)
        oldest = self._open[most][0]
        oldest.set()
        self._leave(most, oldest)

    def _leave(self, client: str, end: asyncio.Event) -> None:
        """Unregister a stream; inert if it is not registered."""
        streams = self._open.get(client, [])
        if end in streams:
            streams.remove(end)
            if not streams:
                del self._open[client]

    async def _close(self, _: web.Application) -> None:
        """End all event streams, so that the shutdown does not wait for them."""
        self._closing = True
        for streams in self._open.values():
            for end in streams:
                end.set()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _finite(seconds: float) -> float | None:
    """`seconds`, or None for infinity, which JSON does not have."""
    return seconds if math.isfinite(seconds) else None
