"""Which workers a gateway is told of: by Kubernetes over real HTTP, whatever the API server does, and by DNS."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from kubernetes_api import DECODE, NAMESPACE, PREFILL, FakeApi, Pod, running_api
from kubernetes_asyncio import config
from kubernetes_asyncio.client import Configuration
from prometheus_client import CollectorRegistry
from waiting import StandingClock

from common.contract.messages.session import Role
from common.runtime.clock import Clock, monotonic
from common.runtime.resolver import Resolver
from gateway.workers import discovery, endpoint_slices
from gateway.workers.discovery import Discovery, DnsSource, Endpoint, SourceError
from gateway.workers.endpoint_slices import EndpointSliceSource

WAIT_S = 30
"""After this a test hangs."""
A, B = Pod("10.0.0.1", "uid-a"), Pod("10.0.0.2", "uid-b")


def at(pod: Pod, *, serving: bool = True, port: int = 7000) -> Endpoint:
    return Endpoint(address=f"{pod.host}:{port}", identity=pod.uid, serving=serving)


@dataclass
class Told:
    """What the gateway was told last, of each role."""

    last: dict[Role, set[Endpoint]] = field(default_factory=dict)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, role: Role, endpoints: Collection[Endpoint]) -> None:
        assert len({each.address for each in endpoints}) == len(endpoints), endpoints
        self.last[role] = set(endpoints)
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()

    async def decode(self, *endpoints: Endpoint) -> None:
        """Wait until these are the decode workers."""
        await self.until(lambda: self.last.get(Role.DECODE) == set(endpoints))

    async def failed(self, number: int) -> None:
        """Wait until so many attempts at the list of the decode workers have failed."""
        async with asyncio.timeout(WAIT_S):
            while (self.counted("discovery_errors_total") or 0) < number:
                await asyncio.sleep(0.01)

    def counted(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"baton_gateway_{name}", {"role": "decode"})


@asynccontextmanager
async def following(api: FakeApi, *, resync_s: float = 60.0, clock: Clock = monotonic) -> AsyncIterator[Told]:
    told = Told()
    async with api.client() as client:
        sources = {
            role: EndpointSliceSource(client, NAMESPACE, service, resync_s=resync_s)
            for role, service in ((Role.PREFILL, PREFILL), (Role.DECODE, DECODE))
        }
        task = asyncio.create_task(Discovery(sources, told.registry, clock).run(told))
        try:
            yield told
            assert not task.done(), task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(discovery, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(discovery, "_SHORTEST_ROUND_S", 0.02)


async def watched(api: FakeApi, num_before: int = 0) -> None:
    """Wait until both roles have a watch of theirs, begun after so many."""
    async with asyncio.timeout(WAIT_S):
        while api.num_watches < num_before + 2 or len(api.watches) < 2:
            await asyncio.sleep(0.01)


async def test_workers_come_change_and_go() -> None:
    async with running_api() as api, following(api) as told:
        await told.decode()
        await watched(api)
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        api.put("d-1", DECODE, [A, B])
        await told.decode(at(A), at(B))
        api.put("d-1", DECODE, [A, Pod(B.host, B.uid, ready=False)])
        await told.decode(at(A), at(B, serving=False))
        assert told.counted("discovered_workers") == 1, "nobody is to use the other one"
        api.put("d-1", DECODE, [A, B])
        await told.decode(at(A), at(B))
        api.put("d-1", DECODE, [Pod(A.host, A.uid, terminating=True), B])
        await told.decode(at(A, serving=False), at(B))
        api.put("d-1", DECODE, [B])
        await told.decode(at(B))
        api.delete("d-1")
        await told.decode()
        assert told.last[Role.PREFILL] == set()
        assert api.num_lists == 2, "all of it by the watches"
        assert told.counted("discovered_workers") == 0


async def test_an_endpoint_that_says_nothing_of_its_readiness_is_ready() -> None:
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [Pod(A.host, A.uid, ready=None)])
        await told.decode(at(A))


async def test_the_slices_of_a_service_are_one_list() -> None:
    """An endpoint that moves from one slice to another stands in both for a moment."""
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [A])
        api.put("d-2", DECODE, [B, Pod(A.host, A.uid, ready=False)])
        await told.decode(at(A), at(B))
        api.put("d-1", DECODE, [])
        await told.decode(at(A, serving=False), at(B))


async def test_an_address_that_is_used_again_is_another_worker() -> None:
    again = Pod(A.host, "uid-c")
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        api.put("d-1", DECODE, [Pod(A.host, A.uid, terminating=True), again])
        await told.decode(at(again))


async def test_a_pool_of_no_pods_is_a_list_of_no_workers(caplog: pytest.LogCaptureFixture) -> None:
    """The slice of a Service without pods stays, with endpoints and ports that are null."""
    async with running_api() as api:
        api.put("d-1", DECODE, [])
        assert api.slices["d-1"]["endpoints"] is api.slices["d-1"]["ports"] is None
        async with following(api) as told:
            await told.decode()
            await watched(api)
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            api.put("d-1", DECODE, [])
            await told.decode()
            assert told.counted("discovery_errors_total") == 0
            assert api.num_lists == 2
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


async def test_a_service_of_another_address_type_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api:
        api.put("d-1", DECODE, [Pod("fd00::1", "uid-a")], address_type="IPv6")
        async with following(api) as told:
            for _ in range(3):
                before = api.num_watches
                await told.decode()
                await watched(api, before)
                api.cut()
            assert caplog.text.count("addresses of type IPv6 alone") == 1
            api.put("d-2", DECODE, [A])
            await told.decode(at(A))


async def test_of_a_service_with_both_families_the_ipv4_addresses_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api:
        api.put("d-1", DECODE, [Pod("fd00::1", "uid-a")], address_type="IPv6")
        api.put("d-2", DECODE, [A])
        async with following(api) as told:
            await told.decode(at(A))
    assert "addresses of type" not in caplog.text


async def test_slices_without_the_port_name_have_no_workers() -> None:
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [A], port_name="http")
        api.put("d-2", DECODE, [B], port=7001)
        await told.decode(at(B, port=7001))


@pytest.mark.parametrize("in_pod", [True, False], ids=["in a pod", "elsewhere"])
async def test_in_a_pod_the_api_server_is_asked_past_a_proxy(
    in_pod: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`NO_PROXY` has the cluster's network there, which says nothing to the client."""

    def load(client_configuration: Configuration) -> None:
        client_configuration.host = api.url

    async def load_elsewhere(client_configuration: Configuration) -> None:
        load(client_configuration)

    namespace = tmp_path / "namespace"
    namespace.write_text(NAMESPACE)
    monkeypatch.setattr(endpoint_slices, "_NAMESPACE_FILE", namespace)
    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.setattr(config, "load_kube_config", load_elsewhere)
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))  # connections to it are refused
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8,.svc,.cluster.local")
        async with running_api() as api:
            api.put("d-1", DECODE, [A])
            opened, own = await endpoint_slices.open_api(None)
            async with opened:
                source = EndpointSliceSource(opened, own, DECODE)
                if in_pod:
                    assert own == NAMESPACE
                    assert await source.list_once() == [at(A)]
                else:
                    with pytest.raises(SourceError, match="Cannot connect"):
                        await source.list_once()


async def test_a_ca_without_key_identifiers_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As EKS makes them. The contexts of Python 3.13 and later are strict, and refuse them."""

    async def load(client_configuration: Configuration) -> None:
        client_configuration.host = "https://127.0.0.1"

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: context)
    monkeypatch.setattr(config, "load_kube_config", load)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    opened, _ = await endpoint_slices.open_api(None)
    await opened.close()
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


# --- what goes wrong ---------------------------------------------------------------------------------------------


async def test_a_deletion_that_no_watch_has_told_is_found_by_the_next_list() -> None:
    """The outage of 22 hours: the watch reconnects, the event that fell in between is never sent again, and the gone
    worker would stay in the list for ever."""
    async with running_api() as api, following(api, resync_s=1.0) as told:
        api.put("d-1", DECODE, [A])
        api.put("d-2", DECODE, [B])
        await told.decode(at(A), at(B))
        await watched(api)
        api.delete("d-1", silently=True)
        api.cut()
        await told.decode(at(B))
        api.delete("d-2", silently=True)  # and the watch goes on, and tells nothing
        await told.decode()


async def test_a_watch_that_is_cut_begins_again_with_a_list() -> None:
    async with running_api() as api, following(api) as told:
        for number in range(5):
            before = api.num_watches
            api.put("d-1", DECODE, [A] if number % 2 else [A, B])
            await told.decode(*([at(A)] if number % 2 else [at(A), at(B)]))
            await watched(api, before)
            api.cut()
        assert told.counted("discovery_errors_total") in (None, 0.0), "a watch that ends is no error"


async def test_a_watch_reads_no_list_of_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 30 ms, in which no token is passed on."""
    read: list[Any] = []
    true = ssl.create_default_context

    def counted(**options: Any) -> ssl.SSLContext:
        read.append(options)
        return true(**options)

    async with running_api() as api, following(api) as told:
        await watched(api)
        monkeypatch.setattr(ssl, "create_default_context", counted)
        for number in range(3):
            before = api.num_watches
            api.cut()
            await watched(api, before)
            api.put("d-1", DECODE, [A] if number % 2 else [A, B])
            await told.decode(*([at(A)] if number % 2 else [at(A), at(B)]))
    assert not read


async def test_a_version_that_is_too_old_is_listed_anew() -> None:
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        await watched(api)
        api.put("d-1", DECODE, [B], silently=True)
        api.forget_history()
        await told.decode(at(B))
        await watched(api)
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))


async def test_a_watch_that_is_refused_for_its_age_at_once_is_listed_anew() -> None:
    async with running_api() as api:
        api.refuses_watches = 410
        async with following(api) as told:
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            api.put("d-1", DECODE, [B])
            await told.decode(at(B))


async def test_bookmarks_show_that_the_list_is_up_to_date() -> None:
    clock = StandingClock()
    async with running_api() as api, following(api, clock=clock) as told:
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        await watched(api)
        clock.now += 100
        assert told.counted("discovery_age_seconds") == 100
        api.bookmark()
        await told.until(lambda: told.counted("discovery_age_seconds") == 0)
        assert told.last[Role.DECODE] == {at(A)}
        api.put("d-1", DECODE, [A, B])
        await told.decode(at(A), at(B))
        assert api.num_lists == 2


@pytest.mark.parametrize("refuses", [True, False], ids=["connections are refused", "503"])
async def test_a_server_that_is_down_for_a_minute_takes_nothing_away(refuses: bool) -> None:
    clock = StandingClock()
    async with running_api() as api, following(api, clock=clock) as told:
        api.put("d-1", DECODE, [A, B])
        await told.decode(at(A), at(B))
        await watched(api)
        lists = api.num_lists
        if refuses:
            await api.stop()
        else:
            api.down = True
            api.cut()
        clock.now += 60
        async with asyncio.timeout(WAIT_S):
            while (told.counted("discovery_errors_total") or 0) < 6:
                assert told.last == {Role.PREFILL: set(), Role.DECODE: {at(A), at(B)}}
                await asyncio.sleep(0.01)
        assert refuses == (api.num_lists == lists), "nobody is there to be asked"
        assert told.counted("discovered_workers") == 2
        assert told.counted("discovery_age_seconds") == 60
        api.put("d-1", DECODE, [B], silently=True)
        api.down = False
        if refuses:
            await api.start()
        await told.decode(at(B))
        assert told.counted("discovery_age_seconds") == 0


async def test_a_server_that_is_down_from_the_start_is_asked_until_it_answers() -> None:
    async with running_api() as api:
        api.down = True
        async with following(api) as told:
            await told.failed(3)
            assert (told.counted("discovery_age_seconds") or 0) > 0, "no alert without it"
            assert told.counted("discovered_workers") is None
            assert told.last == {}, "nothing is known, which is not that there are none"
            api.put("d-1", DECODE, [A])
            api.down = False
            await told.decode(at(A))


async def test_a_server_that_does_not_answer_in_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "_REQUEST_TIMEOUT_S", 0.2)
    async with running_api() as api:
        api.delay_s = 60.0
        async with following(api) as told:
            await told.failed(2)
            api.delay_s = 0.0
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))


async def test_a_watch_that_does_not_begin_in_time_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when it should have ended."""
    monkeypatch.setattr(endpoint_slices, "_REQUEST_TIMEOUT_S", 0.2)
    async with running_api() as api:
        api.watch_delay_s = 60.0
        async with following(api, resync_s=600.0) as told:
            await told.failed(2)
            assert "does not answer in time" in caplog.text
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            api.watch_delay_s = 0.0
            await watched(api)
            lists = api.num_lists
            api.put("d-1", DECODE, [B])
            await told.decode(at(B))
            await asyncio.sleep(0.5)
            assert api.num_lists == lists, "one that has begun may be silent for longer"


async def test_a_watch_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is half open: neither events come, nor its end."""
    monkeypatch.setattr(endpoint_slices, "_WATCH_GRACE_S", 0.2)
    async with running_api() as api, following(api, resync_s=1.0) as told:
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        await watched(api)
        api.deaf = True
        api.put("d-1", DECODE, [B])
        await told.decode(at(B))


@pytest.mark.parametrize(
    "status", [401, 403, 404, 429, 500], ids=["no token", "no role", "no such path", "too many", "a bug"]
)
async def test_what_the_server_refuses_is_logged_and_asked_again(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api:
        api.refuses_watches = status
        async with following(api) as told:
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            await told.failed(2)
            assert f"the API server answers {status}" in caplog.text
            api.put("d-1", DECODE, [B])
            await told.decode(at(B))


@pytest.mark.parametrize(
    "body",
    ['{"message": "no healthy upstream"}', "no healthy upstream", "<html></html>", "null", ""],
    ids=["JSON", "text", "HTML", "null", "nothing"],
)
async def test_a_proxy_that_answers_watches_for_the_server(body: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api:
        api.refuses_watches, api.refusal = 503, body
        async with following(api) as told:
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            await told.failed(2)
            assert "the API server answers 503" in caplog.text
            api.put("d-1", DECODE, [B])
            api.refuses_watches = None
            await told.decode(at(B))


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "7",
        "[]",
        "{}",
        "no event",
        '{"type": "ADDED", "object": null}',
        '{"type": "ADDED", "object": {"metadata": null}}',
        '{"type": "BOOKMARK", "object": {}}',
        '{"type": "ERROR", "object": {}}',
        '{"type": null, "object": {}}',
    ],
)
async def test_a_watch_that_says_what_is_no_event(line: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api:
        api.says = line
        async with following(api) as told:
            api.put("d-1", DECODE, [A])
            await told.decode(at(A))
            await told.failed(2)
            assert "the 1 known last go on being used" in caplog.text
            assert told.last[Role.DECODE] == {at(A)}
            api.says = None
            api.put("d-1", DECODE, [B])
            await told.decode(at(B))


@dataclass
class Unwatchable:
    """A source that can be listed, and fails as soon as its changes are asked for."""

    fails: bool = True
    tells: bool = False
    num_lists: int = 0

    async def list_once(self) -> Collection[Endpoint]:
        self.num_lists += 1
        return [at(A)]

    async def changes(self, tell: Callable[[Collection[Endpoint]], None]) -> None:
        if self.tells:
            tell([at(A), at(B)])
        if self.fails:
            raise SourceError("no")


@pytest.mark.parametrize("tells", [False, True], ids=["ends in order", "tells something"])
async def test_lists_that_come_do_not_hurry_watches_that_fail(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(discovery, "asyncio", SimpleNamespace(sleep=sleep, TaskGroup=asyncio.TaskGroup))
    monkeypatch.setattr(discovery, "_FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(discovery, "_LONGEST_PAUSE_S", 15.0)
    source, told = Unwatchable(), Told()
    task = asyncio.create_task(Discovery({Role.DECODE: source}, told.registry, monotonic).run(told))
    await told.failed(8)
    for pause_s, most_s in zip(pauses, (0.5, 1, 2, 4, 8, 15, 15), strict=False):
        assert most_s / 2 <= pause_s <= most_s
    before = source.num_lists
    source.fails, source.tells = tells, tells  # the watch that follows works, and then, if it tells, fails
    await told.until(lambda: source.num_lists > before + 1)
    source.fails, source.tells = True, False
    errors = int(told.counted("discovery_errors_total") or 0)
    pauses.clear()
    await told.failed(errors + 5)
    assert max(pauses[:3]) <= 4, "the pauses begin anew: they went on at 7.5 s or more"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("body", ["null", "[]", "7", "{}", '{"items": null}', '{"items": [null]}', "<html></html>", ""])
async def test_a_list_that_makes_no_sense(body: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api, following(api) as told:
        api.put("d-1", DECODE, [A])
        await told.decode(at(A))
        await watched(api)
        api.lists_as = body
        api.cut()
        await told.failed(2)
        assert "the 1 known last go on being used" in caplog.text
        assert told.last[Role.DECODE] == {at(A)}
        api.put("d-1", DECODE, [B], silently=True)
        api.lists_as = None
        await told.decode(at(B))


async def test_what_is_wrong_with_the_gateway_is_not_taken_for_the_source() -> None:
    async with running_api() as api, api.client() as client:
        api.put("d-1", DECODE, [A])
        source = EndpointSliceSource(client, NAMESPACE, DECODE)
        await source.list_once()
        api.put("d-1", DECODE, [B])

        def fail(_: Collection[Endpoint]) -> None:
            raise LookupError("a bug")

        with pytest.raises(LookupError, match="a bug"):
            await source.changes(fail)


async def test_a_watch_that_is_cancelled_is_not_a_source_that_fails() -> None:
    async with running_api() as api, api.client() as client:
        for seconds in (0.0, 60.0):
            api.watch_delay_s = seconds
            source = EndpointSliceSource(client, NAMESPACE, DECODE)
            await source.list_once()
            before = api.num_watches
            task = asyncio.create_task(source.changes(lambda _: None))
            async with asyncio.timeout(WAIT_S):
                while api.num_watches == before:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


# --- DNS -----------------------------------------------------------------------------------------------------------


async def test_all_addresses_of_a_name_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] | None = ["10.0.0.2", "10.0.0.1", "10.0.0.1"]

    def resolve(host: str, port: None, *_: int) -> list[Any]:
        assert host == "workers.models"
        if hosts is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = DnsSource("workers.models", 7000, 0.01, Resolver(WAIT_S))
    addresses = [each.address for each in await source.list_once()]
    assert addresses == ["10.0.0.1:7000", "10.0.0.2:7000"]

    told = Told()
    task = asyncio.create_task(Discovery({Role.DECODE: source}, told.registry, monotonic).run(told))
    await told.until(lambda: len(told.last.get(Role.DECODE, ())) == 2)
    hosts = None
    await told.failed(3)
    assert len(told.last[Role.DECODE]) == 2, "a name that does not resolve for a while takes nothing away"
    hosts = ["10.0.0.3"]
    await told.decode(Endpoint(address="10.0.0.3:7000"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_name_that_has_no_addresses_any_more_is_a_list_of_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a Service without ready pods. One such answer may be a moment in which the Service is made again."""
    answers: list[Any] = []

    def resolve(*_: object) -> list[Any]:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise socket.gaierror(answer, "no address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in answer]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = DnsSource("workers.models", 7000, 1.0, Resolver(WAIT_S))

    async def listed(answer: Any) -> list[str]:
        answers.append(answer)
        return sorted(each.address for each in await source.list_once())

    for none in (socket.EAI_NONAME, socket.EAI_NODATA):
        with pytest.raises(SourceError, match="does not resolve"):
            await listed(none)
    both = ["10.0.0.1:7000", "10.0.0.2:7000"]
    for none in (socket.EAI_NONAME, socket.EAI_NODATA):
        assert await listed(["10.0.0.1", "10.0.0.2"]) == both
        assert await listed(none) == both, "for a moment"
        assert await listed(["10.0.0.1", "10.0.0.2"]) == both
        assert await listed(none) == both, "two in a row"
        with pytest.raises(SourceError, match="does not resolve"):
            await listed(socket.EAI_AGAIN)
        assert await listed(none) == []
        assert await listed(none) == []
        with pytest.raises(SourceError, match="does not resolve"):
            await listed(socket.EAI_AGAIN)


async def test_an_empty_pool_is_no_source_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BatonDiscoveryStale` and `BatonWorkersNotUsed` would report it."""
    hosts = ["10.0.0.1"]

    def resolve(*_: object) -> list[Any]:
        if not hosts:
            raise socket.gaierror(socket.EAI_NODATA, "no address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    told, clock = Told(), StandingClock()
    source = DnsSource("workers.models", 7000, 0.01, Resolver(WAIT_S))
    task = asyncio.create_task(Discovery({Role.DECODE: source}, told.registry, clock).run(told))
    await told.decode(Endpoint(address="10.0.0.1:7000"))
    clock.now += 100
    hosts.clear()
    await told.decode()
    assert told.counted("discovered_workers") == told.counted("discovery_age_seconds") == 0
    assert told.counted("discovery_errors_total") == 0
    hosts.append("10.0.0.2")
    await told.decode(Endpoint(address="10.0.0.2:7000"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_exit_waits_for_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup of the event loop cannot be cancelled, and the end of the loop would wait for it."""
    asked, answer, answered = threading.Event(), threading.Event(), threading.Event()

    def resolve(*_: object) -> list[Any]:
        asked.set()
        answer.wait(WAIT_S)
        answered.set()
        raise socket.gaierror("nobody has answered")

    async def look_up() -> None:
        task = asyncio.create_task(DnsSource("workers.models", 7000, 1.0, Resolver(WAIT_S)).list_once())
        assert await asyncio.to_thread(asked.wait, WAIT_S)
        task.cancel()
        await asyncio.wait([task])

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    uvloop.run(look_up())
    assert not answered.is_set()
    answer.set()


async def test_a_name_that_does_not_exist() -> None:
    for name in ("nowhere.invalid", "a..b", "x" * 64):
        with pytest.raises(SourceError, match=f"{re.escape(name)} does not resolve"):
            await DnsSource(name, 7000, 1.0, Resolver(WAIT_S)).list_once()
