"""The operators' port: pages of this host may use it from a browser, foreign ones may not."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway_fixtures import assert_error

from gateway.access.connections import ConnectionBounds, Listener
from gateway.operators.admin import create_admin_app
from gateway.operators.admin_guard import is_own

WORKER = "10.0.0.7:7001"


class FakeDispatcher:
    """One worker, and what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self.broken = False
        self.reaches = True

    def workers(self) -> list[dict[str, Any]]:
        if self.broken:
            raise ValueError("a secret of the inside")
        return [{"id": WORKER}]

    def tell(self, worker: str, *, drain: bool) -> bool:
        self.told.append((worker, drain))
        return self.reaches


@asynccontextmanager
async def admin(
    dispatcher: FakeDispatcher, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    runner = web.AppRunner(create_admin_app(dispatcher, host))  # type: ignore[arg-type]
    await runner.setup()
    listener = Listener(runner, ConnectionBounds())
    try:
        listener.listen(socket.create_server(("127.0.0.1", 0)))
        async with aiohttp.ClientSession() as session:
            yield f"http://127.0.0.1:{listener.port}", session
    finally:
        await listener.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:9000", True),
        ("https://127.0.0.1", "127.0.0.1:9000", True),
        ("http://localhost:8000", "localhost:9000", True),
        ("http://LOCALHOST:8000", "localhost", True),
        ("http://[::1]:8000", "[::1]:9000", True),
        ("http://10.0.0.5:8000", "10.0.0.5:9000", True),
        ("http://127.0.0.1:8000", "localhost:9000", False),
        ("http://evil.net", "127.0.0.1:9000", False),
        ("http://evil.net:9000", "evil.net:9000", False),
        ("http://localhost.evil.net", "localhost.evil.net", False),
        ("http://127.0.0.1.evil.net", "127.0.0.1.evil.net", False),
        ("http://0x7f000001", "0x7f000001", False),
        ("http://10.0.0.5:8000", "10.0.0.6:9000", False),
        ("file://127.0.0.1", "127.0.0.1:9000", False),
        ("null", "127.0.0.1:9000", False),
        ("null", "", False),
        ("", "", False),
        ("", "127.0.0.1:9000", False),
        ("http://", "", False),
        ("http://127.0.0.1", "", False),
        ("http://[::1", "[::1", False),
        ("http://user@127.0.0.1", "evil.net", False),
        ("*", "127.0.0.1", False),
    ],
)
def test_whose_page_it_is(origin: str, host: str, own: bool) -> None:
    assert is_own(origin, host) is own


async def test_without_an_origin_everything_works() -> None:
    dispatcher = FakeDispatcher()
    async with admin(dispatcher) as (url, session):
        async with session.get(f"{url}/workers") as response:
            assert (response.status, await response.json()) == (200, {"workers": [{"id": WORKER}]})
            assert "Access-Control-Allow-Origin" not in response.headers
        async with session.post(f"{url}/workers/{WORKER}/drain") as response:
            assert response.status == 202
    assert dispatcher.told == [(WORKER, True)]


async def test_a_page_of_this_host() -> None:
    dispatcher = FakeDispatcher()
    async with admin(dispatcher) as (url, session):
        page = "http://127.0.0.1:8000"
        headers = {"Origin": page}
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        async with session.options(f"{url}/workers/{WORKER}/resume", headers=headers | ask) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == page
            assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
        async with session.post(f"{url}/workers/{WORKER}/resume", headers=headers) as response:
            assert response.status == 202
            assert response.headers["Access-Control-Allow-Origin"] == page
            assert response.headers["Vary"] == "Origin"
        async with session.post(f"{url}/workers/nobody/resume", headers=headers) as response:
            assert response.status == 404
            assert response.headers["Access-Control-Allow-Origin"] == page
    assert dispatcher.told == [(WORKER, False)]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.net"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://evil.net", "Host": "evil.net"},
        {"Origin": "http://admin.internal:9000", "Host": "admin.internal:9000"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_a_foreign_page(headers: dict[str, str], method: str) -> None:
    dispatcher = FakeDispatcher()
    async with admin(dispatcher) as (url, session):
        path = "/workers" if method == "GET" else f"/workers/{WORKER}/drain"
        ask = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
        async with session.request(method, url + path, headers=headers | ask) as response:
            assert response.status == 403
            assert_error(await response.json(), None, "foreign_origin")
            assert "Access-Control-Allow-Origin" not in response.headers
    assert dispatcher.told == []


async def test_every_error_is_json() -> None:
    dispatcher = FakeDispatcher()
    async with admin(dispatcher) as (url, session):
        for method, path, status in [
            ("GET", "/", 404),
            ("POST", "/workers", 405),
            ("GET", f"/workers/{WORKER}/drain", 405),
            ("POST", "/workers/nobody:1/drain", 404),
        ]:
            async with session.request(method, url + path) as response:
                assert response.status == status
                answer = await response.json()
                assert set(answer["error"]) == {"message", "type", "param", "code"}
                assert ("Allow" in response.headers) == (status == 405)
        dispatcher.broken = True
        async with session.get(f"{url}/workers") as response:
            assert response.status == 500
            assert "secret" not in json.dumps(await response.json())
    assert dispatcher.told == []


async def test_a_worker_that_cannot_be_reached_now_may_be_later() -> None:
    dispatcher = FakeDispatcher()
    dispatcher.reaches = False
    async with admin(dispatcher) as (url, session):
        async with session.post(f"{url}/workers/{WORKER}/drain") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert (await response.json())["error"] == {
                "message": f"{WORKER} cannot be reached now",
                "type": "service_unavailable_error",
                "param": None,
                "code": None,
            }


@pytest.mark.parametrize(
    ("listens_at", "named", "status"),
    [
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "evil.example:9000", 403),
        ("127.0.0.1", "localhost:9000", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("localhost", "[::1]:9000", 200),
        ("0.0.0.0", "gateway-0.internal:9000", 200),
    ],
)
async def test_a_page_whose_name_is_made_this_machines_reads_nothing(listens_at: str, named: str, status: int) -> None:
    """Its requests are of its own origin, and so have no `Origin`."""
    async with (
        admin(FakeDispatcher(), listens_at) as (url, session),
        session.get(f"{url}/workers", headers={"Host": named}) as response,
    ):
        assert response.status == status
        if status == 403:
            assert_error(await response.json(), None, "foreign_host")
