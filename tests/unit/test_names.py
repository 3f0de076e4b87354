"""Names of workers: they are looked up in threads, and a link follows its worker's name to another host."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from channel_bench import WAIT_S, Net

from common.runtime import names as names_module
from common.runtime.channel import connection
from common.runtime.names import HostNames


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
def names() -> Iterator[HostNames]:
    names = HostNames(WAIT_S)
    yield names
    names.close()


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


async def until_asked(server: NameServer, times: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(server.asked) < times:
            await asyncio.sleep(0.01)


async def test_an_address_is_not_looked_up(server: NameServer, names: HostNames) -> None:
    assert await names.find("127.0.0.1") == "127.0.0.1"
    assert server.asked == []


@pytest.mark.parametrize("name", ["nobody.test", "a..b", "x" * 70, "[::1]", ""])
async def test_a_name_that_cannot_be_found(names: HostNames, name: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        await names.find(name)


async def test_slow_names_delay_no_other_and_take_one_thread_each(server: NameServer) -> None:
    """However often they are looked up: each time is given up before the lookup ends."""
    server.slow = {"a.test", "b.test", "c.test"}
    server.known = {"a.test": "127.0.0.3", "quick.test": "127.0.0.2"}
    names = HostNames(0.05)
    for _ in range(4):
        found = await asyncio.gather(*map(names.find, sorted(server.slow)), return_exceptions=True)
        assert list(map(type, found)) == [TimeoutError] * 3
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert await names.find("quick.test") == "127.0.0.2"
                break
            except TimeoutError:  # this machine was slow
                pass
    assert sorted(server.asked[:3]) == sorted(server.slow)
    assert set(server.asked[3:]) == {"quick.test"}
    names.close()


async def ended(names: HostNames, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not names._lookups[name].found.done():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("known", [True, False])
async def test_what_takes_longer_than_anybody_waits_is_found_by_the_next(server: NameServer, known: bool) -> None:
    """Else a name whose first name server is silent would never be found: each lookup would end between two waits."""
    server.slow, server.known = {"a.test"}, {"a.test": "127.0.0.3"} if known else {}
    names = HostNames(0.05)
    with pytest.raises(TimeoutError):
        await names.find("a.test")
    server.answer.set()
    await ended(names, "a.test")
    if known:
        assert await names.find("a.test") == "127.0.0.3"
    else:
        with pytest.raises(socket.gaierror):
            await names.find("a.test")
    assert server.asked == ["a.test"]
    names = HostNames(WAIT_S)
    server.known["a.test"] = "127.0.0.4"
    assert await names.find("a.test") == "127.0.0.4"
    server.known["a.test"] = "127.0.0.5"
    assert await names.find("a.test") == "127.0.0.5", "what was taken is not kept"


async def test_what_nobody_has_taken_for_long_is_dropped(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.slow, server.known = {"a.test", "b.test"}, {"a.test": "127.0.0.3", "quick.test": "127.0.0.2"}
    names = HostNames(0.05)
    for name in ("a.test", "b.test"):
        with pytest.raises(TimeoutError):
            await names.find(name)
    server.answer.set()
    await ended(names, "a.test")
    await ended(names, "b.test")
    server.known["a.test"] = "127.0.0.4"
    monkeypatch.setattr(names_module, "_KEPT_S", -1.0)
    names._timeout_s = WAIT_S
    assert await names.find("a.test") == "127.0.0.4"
    assert not names._lookups


async def test_a_thread_that_cannot_start_fails_one_lookup(server: NameServer, names: HostNames) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server.known["a.test"] = "127.0.0.1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(OSError, match="can't start new thread"):
            await names.find("a.test")
    assert await names.find("a.test") == "127.0.0.1"


async def test_a_link_finds_its_worker_by_name(net: Net, server: NameServer, names: HostNames) -> None:
    """ZeroMQ itself cannot look this one up, and is not asked."""
    worker = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{worker.port}", names=names).opened()
    assert client.link.worker == worker.me


async def test_a_name_that_is_not_known_yet_is_looked_up_again(
    net: Net, server: NameServer, names: HostNames, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    worker = net.worker()
    client = net.client(f"decode-0.test:{worker.port}", names=names)
    await until_asked(server, 3)
    server.known["decode-0.test"] = "127.0.0.1"
    await client.opened()
    told = [each.message for each in caplog.records if "does not resolve" in each.message]
    assert len(told) == 1, "once, not at each lookup"
    assert told[0].startswith("decode-0.test does not resolve: ")


async def test_a_link_follows_its_worker_to_another_host(
    net: Net, server: NameServer, names: HostNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    before = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{before.port}", names=names).opened()
    await client.beats(1)
    looked_up = len(server.asked)
    await client.beats(3)
    assert len(server.asked) == looked_up, "a name is not looked up while there is a connection"
    after = net.worker(port=before.port, host="127.0.0.2")
    await before.stop(goodbye=False)
    server.known["decode-0.test"] = "127.0.0.2"
    await client.opened(2)
    assert client.link.worker == after.me


async def test_a_slow_name_stops_no_link(net: Net, server: NameServer, names: HostNames) -> None:
    worker = net.worker()
    server.slow = {"slow.test"}
    server.known["quick.test"] = "127.0.0.1"
    slow = net.client(f"slow.test:{worker.port}", names=names)
    await until_asked(server, 1)
    await net.client(f"quick.test:{worker.port}", names=names).opened()
    assert slow.events == []
