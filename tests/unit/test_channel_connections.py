"""The connections of a link: when it connects anew, and that nothing waits in the old ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from channel_bench import WAIT_S, Net
from waiting import eventually

from common.contract.errors import Cause
from common.contract.messages.session import Hello, HelloRefused
from common.runtime.channel import LinkState, connection
from common.runtime.channel import client as client_end
from common.runtime.clock import Pulse, monotonic
from common.runtime.curve import CurveKeys
from common.runtime.resolver import Resolver

BRISK = Pulse(interval_s=0.03, timeout_s=0.4)


@pytest.fixture
async def net(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Net]:
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 0.05)
    monkeypatch.setattr(client_end, "_HELLO_RETRY_MAX_S", 0.1)
    net = Net()
    yield net
    await net.close()


async def test_a_worker_that_gets_keys_later_is_found(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """After a handshake that failed, ZeroMQ connects no more."""
    keys = CurveKeys(*zmq.curve_keypair())
    before = net.worker()
    client = net.client(before.address, BRISK, clock=monotonic, keys=keys)

    def told() -> list[str]:
        return [each.message for each in caplog.records if "--curve-keys" in each.message]

    async with asyncio.timeout(WAIT_S):
        while client.num_lost < 3:
            await asyncio.sleep(0.01)
    assert len(told()) == 1, "once, not at each handshake"
    assert before.address in told()[0]
    await before.stop()
    after = net.worker(port=before.port, keys=keys)
    await client.opened()
    assert client.workers == [after.me]


def unanswered(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if "nothing answers" in each.message]


async def test_that_nothing_answers_is_logged_once_until_there_is_a_connection(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong address, or a closed port, would not show else."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))  # does not listen
        port = taken.getsockname()[1]
        line = f"no connection with 127.0.0.1:{port}: nothing answers there yet"
        client = net.client(f"127.0.0.1:{port}", BRISK, clock=monotonic)
        await client.events.until(lambda: client.num_lost >= 3)
        assert unanswered(caplog) == [line]
        worker = net.worker(port=port)
    await client.opened()
    await worker.stop()
    await client.events.until(lambda: len(unanswered(caplog)) == 2)
    num_lost = client.num_lost
    await client.events.until(lambda: client.num_lost >= num_lost + 2)
    assert unanswered(caplog) == [line, line]


async def test_a_worker_that_loads_its_model_is_not_one_where_nothing_answers(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    """It has bound its port."""
    worker = net.worker(begins=False)
    client = net.client(worker.address, BRISK)
    await eventually(lambda: not client.link._connection._unconnected.is_set())
    net.clock.now_s += 2 * BRISK.timeout_s
    assert (await client.loss())[0].startswith("no answer")
    assert unanswered(caplog) == []
    worker.begin()
    await client.opened()


async def test_another_reason_why_there_is_no_connection_is_logged_too(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        keys = CurveKeys(*zmq.curve_keypair())
        client = net.client(f"127.0.0.1:{port}", BRISK, clock=monotonic, keys=keys)
        await client.events.until(lambda: len(unanswered(caplog)) == 1)
        net.worker(port=port)
    await eventually(lambda: "--curve-keys" in caplog.text)


async def test_that_nothing_answers_is_logged_where_the_name_was_unknown_before(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    known = False

    def getaddrinfo(*_: object) -> list[tuple[object, ...]]:
        if not known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolver = Resolver(WAIT_S)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        client = net.client(f"decode-0.test:{taken.getsockname()[1]}", BRISK, clock=monotonic, resolver=resolver)
        await eventually(lambda: "cannot be looked up" in caplog.text)
        known = True
        await client.events.until(lambda: len(unanswered(caplog)) == 1)
    resolver.close()


async def test_a_worker_that_refuses_and_falls_silent_is_connected_to_anew(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may be gone, and TCP would not tell for a quarter of an hour. Its name may be another host's by then."""
    monkeypatch.setattr(connection, "_LOOK_UP_PAUSE_S", 0.01)
    raw = net.raw_worker()
    port = int(raw.address.rpartition(":")[2])
    host = "127.0.0.1"

    def getaddrinfo(*_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolver = Resolver(WAIT_S)
    client = net.client(f"decode-0.test:{port}", BRISK, clock=monotonic, resolver=resolver)
    while client.link.state is not LinkState.REFUSED:
        peer, _ = await raw.expect(Hello)
        await raw.send(peer, HelloRefused(cause=Cause.CAPACITY, message="full"))
        await asyncio.sleep(0.02)
    successor = net.worker(port=port, host="127.0.0.2")
    host = "127.0.0.2"
    await client.opened()
    assert client.workers == [successor.me]
    resolver.close()


async def test_a_worker_that_goes_on_refusing_keeps_its_connection(net: Net) -> None:
    raw = net.raw_worker()
    monitor = raw._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
    client = net.client(raw.address, BRISK)

    async def num_accepted() -> int:
        number = 0
        while await monitor.poll(0):
            await monitor.recv_multipart()
            number += 1
        return number

    async def refuse() -> None:
        peer, _ = await raw.expect(Hello)
        await raw.send(peer, HelloRefused(cause=Cause.CAPACITY, message="full"))

    while client.link.state is not LinkState.REFUSED:
        await refuse()
        await asyncio.sleep(0.02)
    assert await num_accepted() >= 1
    for _ in range(6):
        net.clock.now_s += BRISK.timeout_s  # the time between two Hellos
        await refuse()
        await eventually(lambda: client.link._heard_at == net.clock.now_s)
    assert await num_accepted() == 0
    raw._socket.disable_monitor()


async def test_hellos_do_not_wait_for_a_connection_that_cannot_be_made(net: Net) -> None:
    """The worker would answer every one of them, with all that it has cached."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))  # does not listen
        port = taken.getsockname()[1]
        client = net.client(f"127.0.0.1:{port}", BRISK, clock=monotonic)
        async with asyncio.timeout(WAIT_S):
            while client.link._hellos < 40:
                await asyncio.sleep(0.01)
        worker = net.worker(port=port)
    await client.opened()
    first = worker.hellos[0].number
    assert first > 20, f"{first} was sent long ago"


async def test_a_connection_whose_host_is_gone_does_not_stay(net: Net) -> None:
    """The worker has nothing to say to it, so its system has to look whether somebody is there."""
    worker = net.worker()
    port = int(worker.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.readexactly(1)  # ZeroMQ's greeting: it has set its connection up

    def timers() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [row for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "01"]
        return {row[5].partition(":")[0] for row in mine}

    async with asyncio.timeout(WAIT_S):
        while timers() != {"02"}:  # that of keepalive
            await asyncio.sleep(0.05)
    writer.close()
