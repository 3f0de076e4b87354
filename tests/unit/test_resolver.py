"""Names of workers: they are looked up in threads, and a link follows its worker's name to another host."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from channel_bench import WAIT_S, Net

from common.runtime import resolver as resolver_module
from common.runtime.channel import client as client_end
from common.runtime.channel import connection
from common.runtime.resolver import Resolver


class NameServer:
    """Answers for `socket.getaddrinfo`, while `slow` names wait for `answer`."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.slow: set[str] = set()
        self.answer = threading.Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: object, family: int, kind: int) -> list[tuple[object, ...]]:
        assert (family, kind) == (socket.AF_INET, socket.SOCK_STREAM)
        self.asked.append(host)
        if host in self.slow:
            assert self.answer.wait(WAIT_S)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 6, "", (self.known[host], 0))]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.answer.set()


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver(WAIT_S)
    yield resolver
    resolver.close()


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


async def until_asked(server: NameServer, times: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(server.asked) < times:
            await asyncio.sleep(0.01)


async def test_an_address_is_not_looked_up(server: NameServer, resolver: Resolver) -> None:
    assert await resolver.find("127.0.0.1") == "127.0.0.1"
    assert server.asked == []


@pytest.mark.parametrize("name", ["nobody.test", "a..b", "x" * 70, "[::1]", ""])
async def test_a_name_that_cannot_be_found(resolver: Resolver, name: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        await resolver.find(name)


async def test_slow_names_delay_no_other_and_take_one_thread_each(server: NameServer) -> None:
    """However often they are looked up: each time is given up before the lookup ends."""
    server.slow = {"a.test", "b.test", "c.test"}
    server.known = {"a.test": "127.0.0.3", "quick.test": "127.0.0.2"}
    resolver = Resolver(0.05)
    for _ in range(4):
        found = await asyncio.gather(*map(resolver.find, sorted(server.slow)), return_exceptions=True)
        assert list(map(type, found)) == [TimeoutError] * 3
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert await resolver.find("quick.test") == "127.0.0.2"
                break
            except TimeoutError:  # this machine was slow
                pass
    assert sorted(server.asked[:3]) == sorted(server.slow)
    assert set(server.asked[3:]) == {"quick.test"}
    resolver.close()


async def ended(resolver: Resolver, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while resolver._lookups[name].ended_at is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("known", [True, False])
async def test_what_takes_longer_than_anybody_waits_is_found_by_the_next(server: NameServer, known: bool) -> None:
    """Else a name whose first name server is silent would never be found: each lookup would end between two waits."""
    server.slow, server.known = {"a.test"}, {"a.test": "127.0.0.3"} if known else {}
    resolver = Resolver(0.05)
    with pytest.raises(TimeoutError):
        await resolver.find("a.test")
    server.answer.set()
    await ended(resolver, "a.test")
    resolver._timeout_s = 0.0  # what is there is taken without waiting
    if known:
        assert await resolver.find("a.test") == "127.0.0.3"
    else:
        with pytest.raises(socket.gaierror):
            await resolver.find("a.test")
    assert server.asked == ["a.test"]
    resolver = Resolver(WAIT_S)
    server.known["a.test"] = "127.0.0.4"
    assert await resolver.find("a.test") == "127.0.0.4"
    server.known["a.test"] = "127.0.0.5"
    assert await resolver.find("a.test") == "127.0.0.5", "what was taken is not kept"


async def test_what_nobody_has_taken_for_long_is_dropped(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.slow, server.known = {"a.test", "b.test"}, {"a.test": "127.0.0.3", "quick.test": "127.0.0.2"}
    resolver = Resolver(0.05)
    for name in ("a.test", "b.test"):
        with pytest.raises(TimeoutError):
            await resolver.find(name)
    server.answer.set()
    await ended(resolver, "a.test")
    await ended(resolver, "b.test")
    server.known["a.test"] = "127.0.0.4"
    monkeypatch.setattr(resolver_module, "_KEPT_S", -1.0)
    resolver._timeout_s = WAIT_S
    assert await resolver.find("a.test") == "127.0.0.4"
    assert not resolver._lookups


async def test_a_thread_that_cannot_start_fails_one_lookup(server: NameServer, resolver: Resolver) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server.known["a.test"] = "127.0.0.1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(OSError, match="can't start new thread"):
            await resolver.find("a.test")
    assert await resolver.find("a.test") == "127.0.0.1"


async def test_a_link_finds_its_worker_by_name(net: Net, server: NameServer, resolver: Resolver) -> None:
    """ZeroMQ itself cannot look this one up, and is not asked."""
    worker = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{worker.port}", resolver=resolver).opened()
    assert client.link.worker == worker.me


async def test_a_name_that_is_not_known_yet_is_looked_up_again(
    net: Net, server: NameServer, resolver: Resolver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    worker = net.worker()
    client = net.client(f"decode-0.test:{worker.port}", resolver=resolver)
    await until_asked(server, 3)
    server.known["decode-0.test"] = "127.0.0.1"
    await client.opened()
    told = [each.message for each in caplog.records if "cannot be looked up" in each.message]
    assert len(told) == 1, "once, not at each lookup"
    assert told[0].startswith("decode-0.test cannot be looked up: ")


async def test_a_link_follows_its_worker_to_another_host(
    net: Net, server: NameServer, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    before = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{before.port}", resolver=resolver).opened()
    await client.beats(1)
    looked_up = len(server.asked)
    await client.beats(3)
    assert len(server.asked) == looked_up, "a name is not looked up while there is a connection"
    after = net.worker(port=before.port, host="127.0.0.2")
    await before.stop(goodbye=False)
    server.known["decode-0.test"] = "127.0.0.2"
    await client.opened(2)
    assert client.link.worker == after.me


async def test_a_slow_name_stops_no_link(net: Net, server: NameServer, resolver: Resolver) -> None:
    worker = net.worker()
    server.slow = {"slow.test"}
    server.known["quick.test"] = "127.0.0.1"
    slow = net.client(f"slow.test:{worker.port}", resolver=resolver)
    await until_asked(server, 1)
    await net.client(f"quick.test:{worker.port}", resolver=resolver).opened()
    assert slow.events == []


async def test_an_error_that_nobody_waits_for_any_more_is_not_logged(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.slow = {"a.test"}
    resolver = Resolver(0.05)
    with pytest.raises(TimeoutError):
        await resolver.find("a.test")
    server.answer.set()
    await ended(resolver, "a.test")
    await asyncio.sleep(0.02)  # the loop hears of it
    gc.collect()
    assert caplog.records == []


async def test_the_first_hello_goes_out_as_soon_as_the_name_is_found(
    net: Net, server: NameServer, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before could not be sent, and waited for nothing."""
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 7200.0)
    monkeypatch.setattr(client_end, "_HELLO_RETRY_MAX_S", 7200.0)
    worker = net.worker()
    server.slow, server.known = {"decode-0.test"}, {"decode-0.test": "127.0.0.1"}
    client = net.client(f"decode-0.test:{worker.port}", resolver=resolver)
    await until_asked(server, 1)
    server.answer.set()
    await client.opened()


async def test_a_session_stays_where_it_is_while_its_connection_stands(
    net: Net, server: NameServer, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have several addresses in turn, and a lookup may end after ZeroMQ has connected again."""
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    worker = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{worker.port}", resolver=resolver).opened()
    await client.beats(1)
    server.slow = {"decode-0.test"}
    looked_up = len(server.asked)
    client.link._connection._unconnected.set()  # it breaks for a moment
    await until_asked(server, looked_up + 1)
    client.link._connection._unconnected.clear()
    server.known["decode-0.test"] = "127.0.0.2"
    server.answer.set()
    await client.beats(5)
    await asyncio.sleep(0.05)
    assert client.link._connection._endpoint == f"tcp://127.0.0.1:{worker.port}"
    assert client.events == ["open"]
