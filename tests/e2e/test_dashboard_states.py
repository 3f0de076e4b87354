"""The states of workers on the dashboard, in a real browser, as the gateway may tell them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from chromium import visit
from playwright.async_api import Browser

from common.contract.messages.session import Role
from gateway.dashboard import assets
from gateway.workers.worker_view import WorkerView

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOW = """async (workers) => {
    const { Relay } = await import(new URL('relay.js', document.querySelector('script[type=module]').src));
    new Relay().show({ admin_port: null, workers, requests: [], in_flight: 0, handoffs: [] });
    return [...document.querySelectorAll('.worker .state')].map((each) => each.textContent.replace(/^\\S+ /, ''));
}"""


async def page_of(request: web.Request, path: str) -> web.FileResponse:
    return assets.response(path, None)


async def test_a_worker_that_gets_no_work_does_not_show_as_serving(browser: Browser) -> None:
    told = WorkerView("d:1", Role.DECODE).described() | {"connected": True, "phase": "serving"}
    states: list[tuple[dict[str, Any], str]] = [
        ({}, "serving"),
        ({"ready": False}, "not ready"),
        ({"listed": False}, "not ready"),
        ({"ready": False, "phase": "draining"}, "draining"),
        ({"ready": False, "phase": "drained"}, "drained"),
        ({"ready": False, "stalled": True}, "stalled"),
        ({"ready": False, "refused": "why"}, "refused"),
        ({"ready": False, "connected": False}, "lost"),
    ]
    app = web.Application()
    for path in assets.PATHS:
        app.router.add_get(path, partial(page_of, path=path))
    workers = [told | {"id": f"d:{number}"} | change for number, (change, _) in enumerate(states)]
    async with TestServer(app) as server, visit(browser, str(server.make_url("/")), expected=["404"]) as seen:
        assert await seen.page.evaluate(SHOW, workers) == [state for _, state in states]
        assert await seen.accessibility() == []
