"""HTTP handlers of the dashboard: the page, `GET /pools` (current state) and `GET /pools/events` (stream of states).

Nothing is computed while nobody watches, and concurrent watchers share one computation and its encoding.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from prometheus_client import Gauge

from common.contract.errors import Cause
from common.runtime.clock import Clock, monotonic
from gateway.answer.chunk_encoder import encode
from gateway.api_settings import ApiSettings
from gateway.dashboard import assets
from gateway.dashboard.admin_link import AdminLink
from gateway.dashboard.pool_view import LatestHandoffs, Names, pool_view
from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import GatewayMetrics
from gateway.web.event_stream import EventStream
from gateway.web.http_errors import ApiError

PERIOD_S: Final = 0.4
"""Seconds between two events."""
MAX_WATCHERS: Final = 16
"""Most concurrent event streams; further ones are refused with 429."""
_LATEST_SLOTS: Final = 4
"""Slots in each event except the first, which has all."""


class Dashboard:
    """The page and its data; `create_app` takes it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        *,
        clock: Clock = monotonic,
        period_s: float = PERIOD_S,
    ) -> None:
        """`clock` is the application's."""
        self._dispatcher = dispatcher
        self._model_name = settings.model_name
        self._targets = {
            tier.value: {"ttft_s": _finite(target.ttft_s), "itl_s": _finite(target.itl_s)}
            for tier, target in settings.targets.items()
        }
        self._recent = metrics.recent
        self._clock = clock
        self._period_s = period_s
        self._names = Names(secrets.token_bytes(16))
        self._handoffs = LatestHandoffs()
        self._latest: tuple[float, bytes] = (float("-inf"), b"")
        """When `_shared` was computed last, and its result."""
        self._num_watchers = 0
        """Open event streams."""
        self._ends = asyncio.Event()
        """Set when the application shuts down: all event streams end, so that the shutdown does not wait for them."""
        watchers = Gauge("baton_gateway_dashboard_watchers", "Event streams of the pools.", registry=metrics.registry)
        watchers.set_function(lambda: self._num_watchers)
        self.admin: AdminLink | None = None
        """Set once the admin port is bound, if there is one."""

    def add_to(self, app: web.Application) -> None:
        """Add the routes, and the end of all event streams at the application's shutdown."""
        for path in assets.PATHS:
            app.router.add_get(path, self._asset)
        app.router.add_get("/pools", self._state)
        app.router.add_get("/pools/events", self._events, allow_head=False)
        app.on_shutdown.append(self._close)

    # --- handlers ------------------------------------------------------------------------------------------------

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        return assets.response(request.path, self._admin_origin(request))

    async def _state(self, request: web.Request) -> web.StreamResponse:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.json_response(self._whole(self._dispatcher.handoffs) | self._admin_fields(request), headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        with self._watching():
            events = EventStream(request)
            admin = self._admin_fields(request)
            await events.send(encode(self._whole({}) | admin))
            end = b"," + encode(admin)[1:]
            while not await _is_set_within(self._ends, self._period_s):
                await events.send(self._shared() + end)
            return await events.close()

    # --- answers -------------------------------------------------------------------------------------------------

    def _whole(self, handoffs: Mapping[tuple[str, str], int]) -> dict[str, object]:
        """The current state, with all slots and these handoffs."""
        now = self._clock()
        return self._view(now, handoffs) | {"recent": self._recent.slots(now)}

    def _shared(self) -> bytes:
        """The current state with the latest slots and handoffs, computed and encoded once for all watchers. It is a
        JSON object without its closing brace, because each watcher's admin fields follow."""
        now = self._clock()
        at, latest = self._latest
        if now - at >= self._period_s / 2:
            handoffs = self._handoffs.look(self._dispatcher.handoffs)
            recent = self._recent.slots(now, _LATEST_SLOTS)
            latest = encode(self._view(now, {}) | {"recent": recent, "handoffs": handoffs})[:-1]
            self._latest = now, latest
        return latest

    def _view(self, now: float, handoffs: Mapping[tuple[str, str], int]) -> dict[str, object]:
        dispatcher = self._dispatcher
        return {
            "model": self._model_name,
            **pool_view(dispatcher.worker_views(), dispatcher.open_flows(), handoffs, now, self._names),
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
    def _watching(self) -> Iterator[None]:
        """Count an event stream. Raises `ApiError`, a 429, if there are as many as may be."""
        if self._num_watchers >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} watch already, as many as may", code=Cause.CAPACITY)
        if not self._num_watchers:
            self._handoffs.begin(self._dispatcher.handoffs)
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    async def _close(self, _: web.Application) -> None:
        self._ends.set()


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
