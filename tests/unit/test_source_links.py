"""A sink's links to its sources, over real ZeroMQ, against a source that the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest
from played_source import FINGERPRINT, WAIT_S, PlayedSource

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.messages import (
    Attach,
    Detach,
    Goodbye,
    Hello,
    HelloRefused,
    HelloRequired,
    Message,
    Role,
    Welcome,
)
from common.runtime.clock import Pulse
from kv_transfer.source_links import SourceLinks

KEY = RequestKey(RequestId("r1"), 1)
ATTACH = Attach(request=KEY.request, attempt=KEY.attempt, offered=KEY.attempt)
REFUSED = HelloRefused(cause=Cause.FINGERPRINT, message="other weights")


class Events:
    """What the sink was told."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.pulls: tuple[RequestKey, ...] = ()

    def open_pulls(self, address: str) -> Collection[RequestKey]:
        return self.pulls

    def on_source_open(self, address: str, source: Incarnation, welcome: Welcome) -> None:
        self._told.put_nowait(("open", address, source))

    def on_source_message(self, source: Incarnation, message: Message) -> None:
        self._told.put_nowait(("message", source, message))

    def on_died(self, error: BaseException) -> None:
        self._told.put_nowait(("died", repr(error)))

    def on_source_lost(self, address: str, source: Incarnation | None, cause: Cause, why: str) -> None:
        self._told.put_nowait(("lost", address, source, cause))

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
        self.links = SourceLinks(sink, Role.PREFILL, FINGERPRINT, self.events, lambda: self.now, pulse)
        self.source = PlayedSource(sink)
        self.address = self.source.address

    async def opened(self) -> Net:
        assert self.links.need(self.address) is None
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
    assert net.links.need(net.address) is None
    assert net.links.need(net.address) is None, "it is on its way"
    hello = await net.source.welcome()
    assert (hello.role, hello.fingerprint, hello.open_requests) == (Role.PREFILL, FINGERPRINT, (KEY,))
    assert await net.events.next() == ("open", net.address, net.source.incarnation)
    assert net.links.need(net.address) == net.links.at(net.address) == net.source.incarnation
    assert net.links.welcome(net.address).transport_metadata == b"how to"
    net.links.send(net.address, ATTACH)
    assert await net.source.expect(Attach) == ATTACH
    await net.source.send(Detach(request=KEY.request, attempt=KEY.attempt))
    assert await net.events.next() == (
        "message",
        net.source.incarnation,
        Detach(request=KEY.request, attempt=KEY.attempt),
    )


async def test_a_source_that_goes_is_lost_and_found_at_the_next_need(net: Net) -> None:
    await net.opened()
    await net.source.send(Goodbye())
    assert await net.events.next() == ("lost", net.address, net.source.incarnation, Cause.WORKER_LOST)
    net.links.send(net.address, ATTACH)  # inert
    assert net.links.at(net.address) is None
    await net.events.none()
    net.source.incarnation = new_incarnation()
    await net.opened()
    assert net.links.need(net.address) == net.source.incarnation


async def test_a_source_that_dies_is_lost_without_any_timeout(net: Net) -> None:
    await net.opened()
    net.source.close()
    assert await net.events.next() == ("lost", net.address, net.source.incarnation, Cause.WORKER_LOST)
    assert net.now == 100.0


async def test_a_source_that_never_answers_is_lost(net: Net) -> None:
    assert net.links.need(net.address) is None
    await net.source.expect(Hello)
    net.now += 21.0
    assert await net.events.next() == ("lost", net.address, None, Cause.WORKER_LOST)
    await net.opened()


async def test_after_lost_messages_the_source_is_open_again(net: Net) -> None:
    await net.opened()
    await net.source.send(HelloRequired())
    await net.source.welcome()
    assert await net.events.next() == ("open", net.address, net.source.incarnation)


async def test_a_source_that_refuses_is_told_of_and_asked_again_at_the_next_need(net: Net) -> None:
    assert net.links.need(net.address) is None
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
