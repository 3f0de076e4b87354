"""Names of workers: they are looked up in threads, and a link follows its worker's name to another host."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from channel_bench import WAIT_S, Net

from common.runtime.channel import client as client_end
from common.runtime.names import Names


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
def names() -> Iterator[Names]:
    names = Names(WAIT_S)
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


async def test_an_address_is_not_looked_up(server: NameServer, names: Names) -> None:
    assert await names.find("127.0.0.1") == "127.0.0.1"
    assert server.asked == []


@pytest.mark.parametrize("name", ["nobody.test", "a..b", "x" * 70, "[::1]", ""])
async def test_a_name_that_cannot_be_found(names: Names, name: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        await names.find(name)


async def test_slow_names_delay_no_other_and_take_one_thread_each(server: NameServer) -> None:
    """However often they are looked up: each time is given up before the lookup ends."""
    server.slow = {"a.test", "b.test", "c.test"}
    server.known = {"a.test": "127.0.0.3", "quick.test": "127.0.0.2"}
    names = Names(0.05)
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
    server.answer.set()
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert await names.find("a.test") == "127.0.0.3"
                break
            except TimeoutError:  # its first lookup is still about to end
                pass
    names.close()


async def test_a_link_finds_its_worker_by_name(net: Net, server: NameServer, names: Names) -> None:
    """ZeroMQ itself cannot look this one up, and is not asked."""
    worker = net.worker()
    server.known["decode-0.test"] = "127.0.0.1"
    client = await net.client(f"decode-0.test:{worker.port}", names=names).opened()
    assert client.link.worker == worker.me


async def test_a_name_that_is_not_known_yet_is_looked_up_again(
    net: Net, server: NameServer, names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_end, "_LOOK_UP_PAUSE_S", 0.01)
    worker = net.worker()
    client = net.client(f"decode-0.test:{worker.port}", names=names)
    await until_asked(server, 3)
    server.known["decode-0.test"] = "127.0.0.1"
    await client.opened()
    told = [each.message for each in caplog.records if "does not resolve" in each.message]
    assert len(told) == 1, "once, not at each lookup"
    assert told[0].startswith("decode-0.test does not resolve: ")


async def test_a_link_follows_its_worker_to_another_host(
    net: Net, server: NameServer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_end, "_LOOK_UP_PAUSE_S", 0.01)
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


async def test_a_slow_name_stops_no_link(net: Net, server: NameServer, names: Names) -> None:
    worker = net.worker()
    server.slow = {"slow.test"}
    server.known["quick.test"] = "127.0.0.1"
    slow = net.client(f"slow.test:{worker.port}", names=names)
    await until_asked(server, 1)
    await net.client(f"quick.test:{worker.port}", names=names).opened()
    assert slow.events == []
