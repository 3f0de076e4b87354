"""Links from a worker to those that it pulls from: opened at first need, closed when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

import zmq.asyncio

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.messages import Hello, HelloRefused, Message, Role, Welcome
from common.runtime.channel import ControlClient, LinkState
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys

log = logging.getLogger(__name__)


class SourceEvents(Protocol):
    """What the sink does about its sources."""

    def open_pulls(self, address: str) -> Collection[RequestKey]:
        """The pulls from this address that are not over."""

    def on_source_open(self, address: str, source: Incarnation, welcome: Welcome) -> None:
        """A source can be attached to; also after lost messages, when every open pull must attach again."""

    def on_source_message(self, source: Incarnation, message: Message) -> None:
        """A message from a source."""

    def on_died(self, error: BaseException) -> None:
        """A link has died of a bug."""

    def on_source_lost(self, address: str, source: Incarnation | None, cause: Cause, why: str) -> None:
        """A source is gone, refuses us, or never answered; `source` is None if there was never a session."""


class SourceLinks:
    """One link for each address. A link that is lost or refused is closed; the next need opens another."""

    def __init__(
        self,
        me: Incarnation,
        role: Role,
        fingerprint: Fingerprint,
        events: SourceEvents,
        clock: Clock,
        pulse: Pulse,
        keys: CurveKeys | None = None,
    ) -> None:
        self._me = me
        self._role = role
        self._fingerprint = fingerprint
        self._events = events
        self._clock = clock
        self._pulse = pulse
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._links: dict[str, tuple[ControlClient, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def need(self, address: str) -> Incarnation | None:
        """Make sure that a link to `address` exists; the incarnation at its other end, if it is open already."""
        if address not in self._links:
            link = ControlClient(self._context, address, self._me, self, self._clock, self._pulse, self._keys)
            task = asyncio.create_task(link.run())
            task.add_done_callback(self._watch)
            self._links[address] = (link, task)
        return self.at(address)

    def at(self, address: str) -> Incarnation | None:
        """The incarnation at the other end of the link to `address`, if there is one and it is open."""
        if address not in self._links:
            return None
        link = self._links[address][0]
        return link.worker if link.state is LinkState.OPEN else None

    def send(self, address: str, message: Message) -> None:
        """Send to the source at `address`; inert without an open link."""
        if address in self._links:
            self._links[address][0].send(message)

    def welcome(self, address: str) -> Welcome:
        """What the source at `address`, whose link is open, has said of itself."""
        welcome = self._links[address][0].welcome
        assert welcome is not None
        return welcome

    async def close(self) -> None:
        """Close every link."""
        for address in tuple(self._links):
            self._close(address)
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._context.destroy(linger=100)

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.on_died(error)

    def _close(self, address: str) -> None:
        if address not in self._links:
            return
        _, task = self._links.pop(address)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.cancel()

    # --- what a ControlClient tells ------------------------------------------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """This worker's fingerprint and the pulls that are not over."""
        pulls = tuple(self._events.open_pulls(link.address))
        return Hello(role=self._role, fingerprint=self._fingerprint, open_requests=pulls)

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """A session opens."""
        assert link.worker is not None
        self._events.on_source_open(link.address, link.worker, welcome)

    on_resync = on_open

    def on_message(self, link: ControlClient, message: Message) -> None:
        """A message within the session."""
        assert link.worker is not None
        self._events.on_source_message(link.worker, message)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """The session is over."""
        self._close(link.address)
        self._events.on_source_lost(link.address, link.worker, Cause.WORKER_LOST, why)

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """The source refuses us."""
        log.error("%s refuses this worker: %s", link.address, refused.message)
        self._close(link.address)
        self._events.on_source_lost(link.address, None, refused.cause, refused.message)
