"""Links from a worker to the sources that it pulls from: opened at first need, closed when lost.

Addresses come with messages, so a worker connects only to those within its `PeerNetworks`. A name is resolved once for
each link. The address that results is the one that is checked and connected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.messages.fields import Message
from common.contract.messages.handoff import Detach
from common.contract.messages.session import Hello, HelloRefused, Role, Welcome
from common.runtime.channel import ControlClient, channel_context
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import PeerNetworks
from common.runtime.resolver import Resolver
from kv_transfer.events import SourceLost, SourceOpened, SourceReceived, TransferEvent

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Link:
    task: asyncio.Task[None]
    client: ControlClient | None = None
    """None until the address to connect to is known."""
    listed: frozenset[RequestKey] = frozenset()
    """The pulls that the last Hello has listed."""


class SourceLinks:
    """One link per address. A link that is lost or refused is closed; the next call of `need` opens another."""

    def __init__(
        self,
        me: Incarnation,
        role: Role,
        fingerprint: Fingerprint,
        clock: Clock,
        pulse: Pulse,
        peers: PeerNetworks,
        keys: CurveKeys | None,
        report: Callable[[TransferEvent], None],
        open_pulls: Callable[[str], Collection[RequestKey]],
        on_died: Callable[[BaseException], None],
    ) -> None:
        """`report` takes what sources do and say, `on_died` the error of a link that has died of a bug. `open_pulls`
        returns the pulls from an address that are not over."""
        self.num_refused = 0
        """Number of addresses, named by messages, that were refused because they are outside the peers' networks."""
        self._me = me
        self._role = role
        self._fingerprint = fingerprint
        self._clock = clock
        self._pulse = pulse
        self._peers = peers
        self._keys = keys
        self._report = report
        self._open_pulls = open_pulls
        self._on_died = on_died
        self._context = channel_context()
        self._resolver = Resolver(pulse.timeout_s)
        self._links: dict[str, _Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def need(self, address: str) -> None:
        """Make sure that a link to `address` exists."""
        if address not in self._links:
            task = asyncio.create_task(self._run(address))
            task.add_done_callback(self._watch)
            self._links[address] = _Link(task)

    def send(self, address: str, message: Message) -> None:
        """Send to the source at `address`; inert without an open link."""
        link = self._links.get(address)
        if link is not None and link.client is not None:
            link.client.send(message)

    async def close(self) -> None:
        """Close every link."""
        for address in tuple(self._links):
            self._close(address)
        try:
            await asyncio.gather(*self._closing, return_exceptions=True)
        finally:
            self._resolver.close()
            self._context.destroy(linger=100)

    async def _run(self, address: str) -> None:
        """Resolve `address` and, if this worker may connect to it, keep the link until cancelled."""
        host, _, port = address.rpartition(":")
        try:
            found = await self._resolver.find(host)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be one
            self._give_up(address, Cause.WORKER_LOST, f"its name does not resolve: {error!r}")
            return
        if not self._peers.admit(found):
            self.num_refused += 1
            log.warning("refused to connect to %s (%s), which is not within %s", address, found, self._peers)
            self._give_up(address, Cause.TRANSFER, "its address is not within --peer-networks")
            return
        try:
            client = ControlClient(
                self._context, address, self._me, self, self._clock, self._pulse, self._keys, endpoint=f"{found}:{port}"
            )
        except zmq.ZMQError as error:  # no file descriptor is left
            log.warning("no link to %s can be made: %s", address, error)
            self._give_up(address, Cause.TRANSFER, f"no link to it can be made: {error}")
            return
        self._links[address].client = client
        await client.run()

    def _give_up(self, address: str, cause: Cause, why: str) -> None:
        del self._links[address]
        self._report(SourceLost(address, None, cause, why))

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_died(error)

    def _close(self, address: str) -> None:
        if address not in self._links:
            return
        link = self._links.pop(address)
        if link.client is not None:
            link.client.retire()
        task = link.task
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.cancel()

    # --- events from a ControlClient -----------------------------------------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """This worker's fingerprint and the pulls that are not over."""
        pulls = tuple(self._open_pulls(link.address))
        self._links[link.address].listed = frozenset(pulls)
        return Hello(role=self._role, fingerprint=self._fingerprint, open_requests=pulls)

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """A session opens."""
        assert link.worker is not None
        for key in self._links[link.address].listed.difference(self._open_pulls(link.address)):
            link.send(Detach(request=key.request, attempt=key.attempt))  # it has ended here since the Hello
        self._report(SourceOpened(link.address, link.worker, welcome))

    on_resync = on_open

    def on_message(self, link: ControlClient, message: Message) -> None:
        """A message within the session."""
        assert link.worker is not None
        self._report(SourceReceived(link.worker, message))

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """The session is over."""
        self._close(link.address)
        self._report(SourceLost(link.address, link.worker, Cause.WORKER_LOST, why))

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """The source refuses this worker."""
        log.error("%s refuses this worker: %s", link.address, refused.message)
        self._close(link.address)
        self._report(SourceLost(link.address, None, refused.cause, refused.message))
