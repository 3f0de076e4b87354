"""The dashboard over HTTP: what is served to whom, under which policy, and that watching has bounds and an end."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from dashboard_bench import DashboardServer, num_watchers, serve_dashboard
from gateway_fixtures import COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, assert_error, keyring_of, serve, settings
from waiting import eventually

from common.contract.errors import Cause
from common.contract.tiers import Target, Tier
from gateway.answer.chunk_encoder import encode
from gateway.dashboard import assets, handlers
from gateway.dashboard.admin_link import AdminLink
from gateway.dashboard.handlers import MAX_WATCHERS
from gateway.dashboard.pool_view import LatestHandoffs
from gateway.serving.generation import GenerationFailed


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@asynccontextmanager
async def watching(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Callable[[], Any]]:
    """Watch the pools; call for the next event."""
    async with session.get(f"{url}/pools/events") as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"

        async def next_event() -> Any:
            async with asyncio.timeout(10):
                line = await response.content.readline()
                assert await response.content.readline() == b"\n"
            return json.loads(line.removeprefix(b"data: "))

        yield next_event


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", assets.PATHS)
async def test_every_file_of_the_page_is_open_and_guarded(session: aiohttp.ClientSession, path: str) -> None:
    async with serve_dashboard(keyring=keyring_of("sesame")) as server:
        async with session.get(server.url + path) as response:
            assert response.status == 200
            body, headers = await response.read(), response.headers
        assert body == assets.PATHS[path].read_bytes()
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-cache"
        policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        async with session.get(server.url + path, headers={"If-None-Match": headers["ETag"]}) as response:
            assert (response.status, await response.read()) == (304, b"")
            assert response.headers["ETag"] == headers["ETag"]
        async with session.get(server.url + path, headers={"If-None-Match": '"old"'}) as response:
            assert response.status == 200
        async with session.post(server.url + path) as response:
            assert response.status in (401, 405)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No address but its own, no script or style in the text of the page, and every file that is named is there."""
    for path, file in assets.PATHS.items():
        text = file.read_text()
        urls = set(re.findall(r"https?://[^\s'\"`)]+", text))
        assert urls <= {
            "http://www.w3.org/2000/svg",
            "http://${location.hostname}:${this.adminPort}/workers/${encodeURIComponent(id",
        }, path
        named = re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text) + [
            f"/dashboard/{name}" for name in re.findall(r"from '\./([^']+)'", text)
        ]
        assert set(named) <= assets.PATHS.keys(), path
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
    page = assets.PATHS["/"].read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)


async def test_without_a_dashboard_there_is_nothing(session: aiohttp.ClientSession) -> None:
    async with serve(ScriptedGenerator()) as server:
        for path in ("/", "/dashboard/app.js", "/pools", "/pools/events"):
            async with session.get(server.url + path) as response:
                assert response.status == 404
                assert_error(await response.json(), None, "not_found")


# --- what it reads ---------------------------------------------------------------------------------------------------


async def test_the_pools_need_a_key(session: aiohttp.ClientSession) -> None:
    async with serve_dashboard(keyring=keyring_of("sesame")) as server:
        for path in ("/pools", "/pools/events"):
            async with session.get(server.url + path) as response:
                assert response.status == 401
        headers = {"Authorization": "Bearer sesame"}
        async with session.get(server.url + "/pools", headers=headers) as response:
            assert response.status == 200
            assert response.headers["Cache-Control"] == "no-store"


async def test_the_pools_of_this_moment(session: aiohttp.ClientSession) -> None:
    targets = dict.fromkeys(Tier, Target(ttft_s=2.0))
    async with serve_dashboard(api_settings=replace(settings(), targets=targets)) as server:
        await server.bench.request()
        async with session.get(server.url + "/pools") as response:
            view = json.loads(await response.text(), parse_constant=pytest.fail)
    assert [worker["role"] for worker in view["workers"]] == ["prefill", "decode"]
    assert [request["stage"] for request in view["requests"]] == ["prefill"]
    assert view["in_flight"] == 1
    assert view["admin_port"] is None
    assert view["targets"]["standard"] == {"ttft_s": 2.0, "itl_s": None}


async def test_events_follow_what_happens(session: aiohttp.ClientSession) -> None:
    async with serve_dashboard() as server, watching(session, server.url) as next_event:
        first = await next_event()
        assert first["in_flight"] == 0
        key, _ = await server.bench.request()
        async with asyncio.timeout(10):
            while (view := await next_event())["in_flight"] == 0:
                pass
        assert view["requests"][0]["stage"] == "prefill"
        server.bench.tokens("p:1", key, 0, 10)
        async with asyncio.timeout(10):
            while (view := await next_event())["requests"][0]["stage"] == "prefill":
                pass
        assert view["requests"][0]["stage"] == "handoff"
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
            assert response.status == 200
        async with asyncio.timeout(10):
            while not (view := await next_event())["recent"]["slots"]:
                pass
        assert sum(slot["finished"] for slot in view["recent"]["slots"]) == 1


async def test_the_first_event_has_the_past_and_the_others_what_is_new(session: aiohttp.ClientSession) -> None:
    now = 1000.0
    async with serve_dashboard(clock=lambda: now) as server:
        for _ in range(20):
            server.metrics.recent.finished(now, met=True)
            now += 10.0
        async with watching(session, server.url) as next_event:
            assert len((await next_event())["recent"]["slots"]) == 20
            now += 1.0
            assert len((await next_event())["recent"]["slots"]) < 3


async def test_an_event_lists_only_the_pairs_with_handoffs_of_late(session: aiohttp.ClientSession) -> None:
    async with serve_dashboard() as server:
        handoffs = server.bench.dispatcher.handoffs
        handoffs.update({(f"p:{p}", f"d:{d}"): 1000 for p in range(100) for d in range(100)})
        async with watching(session, server.url) as next_event:
            assert (await next_event())["handoffs"] == []
            handoffs["p:7", "d:8"] += 2
            async with asyncio.timeout(10):
                while not (view := await next_event())["handoffs"]:
                    pass
            assert view["handoffs"] == [{"prefill": "p:7", "decode": "d:8", "before": 1000, "count": 1002}]
            assert len(json.dumps(view)) < 2**16
            async with asyncio.timeout(10):
                while (await next_event())["handoffs"]:
                    pass
        async with session.get(server.url + "/pools") as response:
            listed = (await response.json())["handoffs"]
        assert len(listed) == 10_000, "a single look lists all"
        assert {"prefill": "p:7", "decode": "d:8", "count": 1002} in listed
        await eventually(lambda: num_watchers(server.metrics) == 0)
        handoffs["p:1", "d:1"] += 1
        async with watching(session, server.url) as next_event:
            for _ in range(3):
                assert (await next_event())["handoffs"] == [], "nobody watched when it was made"


def test_a_pair_is_listed_for_four_looks_after_a_handoff() -> None:
    handoffs, counts = LatestHandoffs(), Counter({("p", "d"): 5, ("p", "e"): 9})
    handoffs.begin(counts)
    assert handoffs.look(counts) == []

    def seen() -> list[tuple[object, object, object]]:
        return [(each["decode"], each["before"], each["count"]) for each in handoffs.look(counts)]

    counts["p", "d"] += 1
    assert seen() == [("d", 5, 6)]
    counts["p", "new"] += 3
    assert sorted(seen(), key=str) == [("d", 5, 6), ("new", 0, 3)]
    counts["p", "d"] += 1
    assert ("d", 5, 7) in seen()
    assert ("d", 5, 7) in seen()
    assert sorted(seen(), key=str) == [("d", 6, 7), ("new", 0, 3)]
    assert seen() == [("d", 6, 7)]
    assert seen() == []
    counts["p", "e"] += 1
    assert seen() == [("e", 9, 10)]
    del counts["p", "e"]
    assert seen() == [], "one of the two is forgotten"
    counts["p", "e"] += 1
    handoffs.begin(counts)
    assert seen() == []


async def test_those_who_watch_together_share_what_is_computed_and_encoded(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def noted(value: object) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(handlers, "encode", noted)
    async with serve_dashboard(clock=lambda: 5.0) as server:
        looks = 0
        open_flows = server.bench.dispatcher.open_flows

        def counted() -> Any:
            nonlocal looks
            looks += 1
            return open_flows()

        server.bench.dispatcher.open_flows = counted  # type: ignore[method-assign]
        async with watching(session, server.url) as one, watching(session, server.url) as other:
            for _ in range(5):
                await one()
                await other()
        assert looks == 3, "the first event of each, and one more for both: time stands still"
        assert sum("workers" in value for value in encoded) == 3
        await eventually(lambda: num_watchers(server.metrics) == 0)
        before = looks
        await asyncio.sleep(0.1)
        assert looks == before, "nobody watches"


# --- bounds and ends -------------------------------------------------------------------------------------------------


async def test_watchers_are_bounded_and_one_who_leaves_makes_room(session: aiohttp.ClientSession) -> None:
    async with serve_dashboard() as server, AsyncExitStack() as stack:
        for _ in range(MAX_WATCHERS - 1):
            await stack.enter_async_context(watching(session, server.url))
        async with watching(session, server.url) as next_event:
            await next_event()
            assert num_watchers(server.metrics) == MAX_WATCHERS
            async with session.get(server.url + "/pools/events") as response:
                assert response.status == 429
                assert response.headers["Retry-After"]
                assert_error(await response.json(), None, "capacity")
            async with session.get(server.url + "/pools") as response:
                assert response.status == 200, "a single look is no watching"
        await eventually(lambda: num_watchers(server.metrics) < MAX_WATCHERS)
        async with watching(session, server.url) as next_event:
            await next_event()


async def test_a_gateway_that_ends_does_not_wait_for_watchers(session: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        server: DashboardServer = await stack.enter_async_context(serve_dashboard(shutdown_timeout_s=600))
        response = await session.get(server.url + "/pools/events")
        await response.content.readline()
        async with asyncio.timeout(20):
            await stack.aclose()
        await response.content.read()  # raises if the stream broke off
        assert response.content.at_eof()


# --- what counts -----------------------------------------------------------------------------------------------------


async def counts(session: aiohttp.ClientSession, server: DashboardServer) -> dict[str, int]:
    async with session.get(server.url + "/pools") as response:
        slots = (await response.json())["recent"]["slots"]
    return {name: sum(slot[name] for slot in slots) for name in ("finished", "met", "refused", "failed")}


async def test_refusals_and_failures_count_once(session: aiohttp.ClientSession) -> None:
    generator = ScriptedGenerator()
    async with serve_dashboard(generator) as server:

        async def ask(**body: Any) -> int:
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION | body) as response:
                await response.read()
                return response.status

        assert await ask() == 200
        assert await ask(max_tokens=-1) == 400
        generator.failure = GenerationFailed(Cause.CAPACITY, "full")
        assert await ask() == await ask(stream=True) == 429
        generator.failure = GenerationFailed(Cause.DEADLINE, "late")
        assert await ask() == 504
        generator.num_before = 1
        assert await ask(stream=True) == 200
        assert await counts(session, server) == {"finished": 1, "met": 1, "refused": 2, "failed": 2}


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(ttft_s=2.5, itl_s=1.5), 1),
        (Target(ttft_s=0.5), 0),
        (Target(itl_s=0.5), 0),
    ],
)
async def test_goodput_is_what_met_its_tiers_targets(session: aiohttp.ClientSession, target: Target, met: int) -> None:
    """With a clock that goes on by a second with each reading: two to the first token, one from token to token."""
    ticks = iter(range(10_000))
    api_settings = replace(
        settings(), targets={Tier.INTERACTIVE: target, Tier.STANDARD: Target(), Tier.BATCH: Target()}
    )
    async with serve_dashboard(ScriptedGenerator(), api_settings, clock=lambda: float(next(ticks))) as server:
        body = COMPLETION | {"service_tier": "interactive", "max_tokens": 2}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 2
        assert await counts(session, server) == {"finished": 1, "met": met, "refused": 0, "failed": 0}


# --- the admin port --------------------------------------------------------------------------------------------------


async def test_the_admin_port_is_named_where_it_can_be_reached(session: aiohttp.ClientSession) -> None:
    async with serve_dashboard() as server:
        server.dashboard.admin = AdminLink("127.0.0.1", 9000)

        async def told(host: str) -> tuple[Any, str]:
            async with session.get(server.url + "/pools", headers={"Host": host}) as response:
                port = (await response.json())["admin_port"]
            async with session.get(server.url + "/", headers={"Host": host}) as response:
                policy = response.headers["Content-Security-Policy"]
            return port, policy.split("; ")[1]

        assert await told("localhost:1") == (9000, "connect-src 'self' http://localhost:9000")
        for host in ("baton.example", "10.0.0.1", "evil; script-src *"):
            assert await told(host) == (None, "connect-src 'self'")
