"""The gateway with its dashboard: pools that the test plays, answers from a script, a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from dispatcher_bench import Bench, P
from gateway_fixtures import MODEL, ScriptedGenerator, settings, tokenizer

from common.runtime.clock import Clock, monotonic
from gateway.access.api_keys import Keyring
from gateway.api import create_app, create_runner
from gateway.api_settings import ApiSettings
from gateway.dashboard.handlers import Dashboard
from gateway.observability.metrics import GatewayMetrics


@dataclass
class DashboardServer:
    """A running server."""

    url: str
    metrics: GatewayMetrics
    dashboard: Dashboard
    bench: Bench


@asynccontextmanager
async def serve_dashboard(
    generator: ScriptedGenerator | None = None,
    api_settings: ApiSettings | None = None,
    *,
    clock: Clock = monotonic,
    period_s: float = 0.02,
    shutdown_timeout_s: float = 0.2,
    prefill: tuple[str, ...] = (P,),
    keyring: Keyring | None = None,
) -> AsyncIterator[DashboardServer]:
    """Serve on a free port of loopback; afterwards nobody watches any more."""
    api_settings = api_settings or settings()
    metrics, bench = GatewayMetrics(MODEL), Bench(prefill=prefill)
    dashboard = Dashboard(bench.dispatcher, api_settings, metrics, clock=clock, period_s=period_s)
    generator = generator or ScriptedGenerator()
    app = create_app(generator, tokenizer(), api_settings, metrics, keyring=keyring, clock=clock, dashboard=dashboard)
    runner = create_runner(app, shutdown_timeout_s=shutdown_timeout_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield DashboardServer(f"http://{host}:{port}", metrics, dashboard, bench)
    finally:
        await runner.cleanup()
        await bench.close()
    assert num_watchers(metrics) == 0
    assert generator.num_open == 0


def num_watchers(metrics: GatewayMetrics) -> float:
    """Event streams that are open."""
    value = metrics.registry.get_sample_value("baton_gateway_dashboard_watchers")
    assert value is not None
    return value
