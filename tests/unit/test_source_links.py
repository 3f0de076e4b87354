"""A sink's links to its sources, over real ZeroMQ, against a source that the test plays by hand."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection
from ipaddress import IPv4Network

import pytest
import zmq
from channel_bench import hello_once
from played_source import FINGERPRINT, WAIT_S, PlayedSource

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.messages.handoff import Attach, Detach
from common.contract.messages.session import Goodbye, Hello, HelloRefused, HelloRequired, Role, Welcome
from common.runtime.clock import Pulse
from common.runtime.peer_networks import PeerNetworks
from kv_transfer.events import SourceLost, SourceOpened, SourceReceived, TransferEvent
from kv_transfer.source_links import SourceLinks

PEERS = PeerNetworks((IPv4Network("127.0.0.0/8"),))
KEY = RequestKey(RequestId("r1"), 1)
ATTACH = Attach(request=KEY.request, attempt=KEY.attempt, offered=KEY.attempt)
REFUSED = HelloRefused(cause=Cause.FINGERPRINT, message="other weights")


class Events:
    """What the sink was told."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.pulls: tuple[RequestKey, ...] = ()
        self.welcomes: list[Welcome] = []
        self.num_hellos = 0

    def open_pulls(self, address: str) -> Collection[RequestKey]:
        self.num_hellos += 1
        return self.pulls

    def report(self, event: TransferEvent) -> None:
        match event:
            case SourceOpened():
                self._told.put_nowait(("open", event.address, event.source))
                self.welcomes.append(event.welcome)
            case SourceReceived():
                self._told.put_nowait(("message", event.source, event.message))
            case SourceLost():
                self._told.put_nowait(("lost", event.address, event.source, event.cause))
                self.num_hellos_until_lost = self.num_hellos

    def on_died(self, error: BaseException) -> None:
        self._told.put_nowait(("died", repr(error)))

    def links_of(self, sink: Incarnation, role: Role, clock: Callable[[], float], pulse: Pulse) -> SourceLinks:
        """Links whose events these are."""
        return SourceLinks(
            sink, role, FINGERPRINT, clock, pulse, PEERS, None, self.report, self.open_pulls, self.on_died
        )

    async def next(self) -> tuple[object, ...]:
        async with asyncio.timeout(WAIT_S):
            return await self._told.get()

    @property
    def empty(self) -> bool:
        return self._told.empty()

    async def none(self) -> None:
        await asyncio.sleep(0.2)
        assert self.empty, self._told.get_nowait()


class Net:
    """The links under test and the source at their other end."""

    def __init__(self) -> None:
        self.now = 100.0
        sink = new_incarnation()
        self.events = Events()
        pulse = Pulse(interval_s=0.05, timeout_s=20.0)
        self.links = self.events.links_of(sink, Role.PREFILL, lambda: self.now, pulse)
        self.source = PlayedSource(sink)
        self.address = self.source.address

    async def opened(self) -> Net:
        self.links.need(self.address)
        await self.source.welcome()
        assert await self.events.next() == ("open", self.address, self.source.incarnation)
        return self

    async def close(self) -> None:
        await self.links.close()
        self.source.close()


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    subject = Net()
    yield subject
    await subject.close()


async def test_a_link_opens_at_first_need_and_is_kept(net: Net) -> None:
    net.events.pulls = (KEY,)
    net.links.need(net.address)
    net.links.need(net.address)
    hello = await net.source.welcome()
    assert (hello.role, hello.fingerprint, hello.open_requests) == (Role.PREFILL, FINGERPRINT, (KEY,))
    assert await net.events.next() == ("open", net.address, net.source.incarnation)
    net.links.need(net.address)
    assert [welcome.transport_metadata for welcome in net.events.welcomes] == [b"how to"]
    net.links.send(net.address, ATTACH)
    assert await net.source.expect(Attach) == ATTACH
    await net.source.send(Detach(request=KEY.request, attempt=KEY.attempt))
    assert await net.events.next() == (
        "message",
        net.source.incarnation,
        Detach(request=KEY.request, attempt=KEY.attempt),
    )


async def test_a_link_that_cannot_be_made_fails_alone(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file descriptor is left."""

    def no_descriptors(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as scarce:
        scarce.setattr("kv_transfer.source_links.ControlClient", no_descriptors)
        net.links.need(net.address)
        assert await net.events.next() == ("lost", net.address, None, Cause.TRANSFER)
    await net.opened()


async def test_a_pull_that_ends_while_a_session_opens_is_detached(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the source would wait for its reader for ever, and never have drained."""
    hello_once(monkeypatch)  # a second one would list what is still pulled alone
    other = RequestKey(RequestId("r2"), 1)
    net.events.pulls = (KEY, other)
    net.links.need(net.address)
    hello = await net.source.expect(Hello)
    assert set(hello.open_requests) == {KEY, other}
    net.events.pulls = (other,)
    await net.source._welcome(hello, "zmq")
    detach = await net.source.expect(Detach)
    assert (detach.request, detach.attempt) == KEY
    assert await net.events.next() == ("open", net.address, net.source.incarnation)


async def test_a_source_that_goes_is_lost_and_found_at_the_next_need(net: Net) -> None:
    await net.opened()
    await net.source.send(Goodbye())
    assert await net.events.next() == ("lost", net.address, net.source.incarnation, Cause.WORKER_LOST)
    net.links.send(net.address, ATTACH)  # inert
    await net.events.none()
    net.source.incarnation = new_incarnation()
    await net.opened()


async def test_a_source_that_dies_is_lost_without_any_timeout(net: Net) -> None:
    await net.opened()
    net.source.close()
    assert await net.events.next() == ("lost", net.address, net.source.incarnation, Cause.WORKER_LOST)
    assert net.now == 100.0


async def test_a_source_that_never_answers_is_lost(net: Net) -> None:
    net.links.need(net.address)
    await net.source.expect(Hello)
    net.now += 21.0
    assert await net.events.next() == ("lost", net.address, None, Cause.WORKER_LOST)
    await net.opened()


async def test_a_link_that_is_lost_says_no_more_hello(net: Net) -> None:
    """Somebody else may have taken the source's place, or the next link may be there already."""
    await net.opened()
    await net.source.send(Goodbye())
    assert (await net.events.next())[0] == "lost"
    await net.events.none()
    assert net.events.num_hellos == net.events.num_hellos_until_lost
    assert await net.source.hear_all() == []


async def test_a_link_that_was_never_answered_says_no_more_hello(net: Net) -> None:
    net.links.need(net.address)
    await net.source.expect(Hello)
    net.now += 21.0
    assert (await net.events.next())[0] == "lost"
    await net.events.none()
    assert net.events.num_hellos == net.events.num_hellos_until_lost


@pytest.mark.parametrize("late", ["welcome", "refusal"])
async def test_what_comes_with_a_goodbye_is_inert(net: Net, late: str) -> None:
    """The link is closed, but its frame is not at its end."""
    await net.opened()
    assert net.source.hello is not None
    answer = REFUSED if late == "refusal" else net.source.answer(net.source.hello)
    await net.source.send(Goodbye(), answer)
    assert await net.events.next() == ("lost", net.address, net.source.incarnation, Cause.WORKER_LOST)
    await net.events.none()
    await net.opened()


async def test_after_lost_messages_the_source_is_open_again(net: Net) -> None:
    await net.opened()
    await net.source.send(HelloRequired())
    await net.source.welcome()
    assert await net.events.next() == ("open", net.address, net.source.incarnation)


async def test_a_source_that_refuses_is_told_of_and_asked_again_at_the_next_need(net: Net) -> None:
    net.links.need(net.address)
    await net.source.expect(Hello)
    await net.source.send(REFUSED)
    assert await net.events.next() == ("lost", net.address, None, Cause.FINGERPRINT)
    await net.opened()


async def test_a_source_that_refuses_within_a_session_does_not_end_the_worker(net: Net) -> None:
    """Another worker has taken its place, or its places are taken, while messages were lost."""
    await net.opened()
    await net.source.send(HelloRequired())
    await net.source.expect(Hello)
    await net.source.send(REFUSED)
    assert (await net.events.next())[:3] == ("lost", net.address, net.source.incarnation)
    await asyncio.sleep(0.2)
    while not net.events.empty:
        told = await net.events.next()
        assert told[0] != "died", told
    await net.opened()


async def test_closing_says_goodbye(net: Net) -> None:
    await net.opened()
    await net.links.close()
    assert await net.source.expect(Goodbye) == Goodbye()


# --- where it may connect to -----------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names resolve to; all others do not."""
    known: dict[str, str] = {}

    def resolve(host: str, port: object, family: int, kind: int) -> list[tuple[object, ...]]:
        assert (family, kind) == (socket.AF_INET, socket.SOCK_STREAM)
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 6, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.mark.parametrize("address", ["128.0.0.1:7000", "0.0.0.0:7000", "10.0.0.1:7000"])
async def test_an_address_of_no_peer_is_refused(net: Net, address: str) -> None:
    net.links.need(address)
    assert await net.events.next() == ("lost", address, None, Cause.TRANSFER)
    assert net.links.num_refused == 1
    net.links.need(address)
    assert await net.events.next() == ("lost", address, None, Cause.TRANSFER)
    assert net.links.num_refused == 2
    await net.opened()  # the others go on


async def test_a_name_is_resolved_once_and_what_was_checked_is_connected_to(net: Net, names: dict[str, str]) -> None:
    """ZeroMQ itself cannot resolve this one."""
    port = net.address.rpartition(":")[2]
    names |= {"worker-7.test": "127.0.0.1", "elsewhere.test": "10.0.0.1"}
    net.address = f"worker-7.test:{port}"
    await net.opened()
    net.links.send(net.address, ATTACH)
    assert await net.source.expect(Attach) == ATTACH
    net.links.need(f"elsewhere.test:{port}")
    assert await net.events.next() == ("lost", f"elsewhere.test:{port}", None, Cause.TRANSFER)
    assert net.links.num_refused == 1


@pytest.mark.parametrize("name", ["nobody.test", "a..b", "x" * 70, "[::1]"])
async def test_a_name_that_does_not_resolve_is_nobody(net: Net, name: str) -> None:
    net.links.need(f"{name}:7000")
    assert await net.events.next() == ("lost", f"{name}:7000", None, Cause.WORKER_LOST)
    assert net.links.num_refused == 0


async def test_a_name_that_takes_too_long_is_given_up_and_closing_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    def resolve(*_: object) -> None:
        asked.release()
        answered.wait(WAIT_S)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    events, pulse = Events(), Pulse(interval_s=0.05, timeout_s=3.0)
    links = events.links_of(new_incarnation(), Role.PREFILL, lambda: 0.0, pulse)
    links.need("slow.test:7000")
    assert await asyncio.to_thread(asked.acquire, timeout=WAIT_S)
    assert await events.next() == ("lost", "slow.test:7000", None, Cause.WORKER_LOST)
    links.need("slow.test:7000")
    await links.close()
    assert events.empty
    answered.set()


async def test_a_name_that_takes_for_ever_delays_no_other(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = threading.Event(), threading.Event()

    def resolve(host: str, port: object, family: int, kind: int) -> list[tuple[object, ...]]:
        if host == "slow.test":
            asked.set()
            answer.wait()
        return [(family, kind, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        net.links.need("slow.test:7000")
        async with asyncio.timeout(WAIT_S):
            while not asked.is_set():
                await asyncio.sleep(0.01)
        net.address = f"quick.test:{net.address.rpartition(':')[2]}"
        await net.opened()
    finally:
        answer.set()
