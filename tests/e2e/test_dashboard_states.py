"""What the dashboard shows, in a real browser, of workers and of gateways that the test makes up."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from chromium import visit
from playwright.async_api import Browser

from common.contract.messages.session import Role
from gateway.dashboard import assets
from gateway.observability.recent import Recent
from gateway.workers.worker_view import WorkerView

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOW = """async (workers) => {
    const { Relay } = await import(new URL('relay.js', document.querySelector('script[type=module]').src));
    new Relay().show({ admin_port: null, workers, requests: [], in_flight: 0, handoffs: [] });
    return [...document.querySelectorAll('.worker .state')].map((each) => each.textContent.replace(/^\\S+ /, ''));
}"""

HAND_OVER = """async (workers) => {
    const { Relay } = await import(new URL('relay.js', document.querySelector('script[type=module]').src));
    const handoffs = [{ prefill: 'p:0', decode: 'd:0', before: 0, count: 1 }];
    new Relay().show({ admin_port: null, workers, requests: [], in_flight: 0, handoffs });
    const frame = document.getElementById('relay').getBoundingClientRect();
    const card = document.querySelector('#decode-workers .worker').getBoundingClientRect();
    const ends = [...document.querySelectorAll('#batons .baton')].map((baton) => {
        const [x] = baton.style.offsetPath.match(/[\\d.]+/g).map(Number).slice(-2);
        return Math.abs(frame.left + x - card.left) < 1;
    });
    return [document.querySelectorAll('#lines path').length, ends];
}"""
NUM_REQUESTS = """() => [...document.querySelectorAll('#table-rows tr')]
    .reduce((sum, row) => sum + Number(row.cells[1].textContent), 0)"""


def application(events: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None) -> web.Application:
    """The files of the page; and `events`, the handler of the pools' stream."""
    app = web.Application()
    for path in assets.PATHS:
        app.router.add_get(path, partial(page_of, path=path))
    if events is not None:
        app.router.add_get("/pools/events", events)
    return app


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
    workers = [told | {"id": f"d:{number}"} | change for number, (change, _) in enumerate(states)]
    async with TestServer(application()) as server, visit(browser, str(server.make_url("/")), expected=["404"]) as seen:
        assert await seen.page.evaluate(SHOW, workers) == [state for _, state in states]
        assert await seen.accessibility() == []


@pytest.mark.parametrize(("num_each", "num_lines"), [(2, 4), (20, 400), (21, 0)])
async def test_no_lines_are_drawn_between_very_many_workers_and_batons_travel_all_the_same(
    browser: Browser, num_each: int, num_lines: int
) -> None:
    workers = [
        WorkerView(f"{role.value[0]}:{number}", role).described() | {"connected": True, "phase": "serving"}
        for role in (Role.PREFILL, Role.DECODE)
        for number in range(num_each)
    ]
    viewport = {"width": 1440, "height": 900}
    async with (
        TestServer(application()) as server,
        visit(browser, str(server.make_url("/")), expected=["404"], viewport=viewport) as seen,
    ):
        assert await seen.page.evaluate(HAND_OVER, workers) == [num_lines, [True]]


async def test_plots_show_nothing_of_the_gateway_of_an_earlier_stream(browser: Browser) -> None:
    """A page that comes back may reach another gateway, whose slots have numbers of its own."""

    def seen_by(model: str, num_finished: int, now_s: float) -> dict[str, Any]:
        recent = Recent()
        for _ in range(num_finished):
            recent.finished(now_s - 2, met=True)
        pools = {"workers": [], "requests": [], "handoffs": [], "in_flight": 0, "admin_port": None}
        return {"model": model, "summary": recent.summary(now_s), "recent": recent.slots(now_s), **pools}

    views = [seen_by("one", 5, 202.0), seen_by("two", 7, 206.0)]

    async def events(request: web.Request) -> web.StreamResponse:
        """Each stream has one event, and ends: of the first gateway, and then of the second."""
        view = views.pop(0) if len(views) > 1 else views[0]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(view)}\n\n".encode())
        return response

    async with TestServer(application(events)) as server, visit(browser, str(server.make_url("/"))) as seen:
        await seen.page.wait_for_function("() => document.getElementById('model').textContent === 'two'")
        assert await seen.page.evaluate(NUM_REQUESTS) == 7
