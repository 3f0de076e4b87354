"""The connection under a link: a DEALER socket that is connected to the worker's address, or to the one that the
worker's name has now, and connected anew whenever that may help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common.contract.codec import MAX_FRAME_BYTES
from common.contract.ids import Incarnation
from common.runtime.channel.ends import result
from common.runtime.clock import Pulse
from common.runtime.curve import CurveKeys
from common.runtime.resolver import Resolver, is_address

log = logging.getLogger(__name__)

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NO_SUCH_NAME = "%s cannot be looked up: %r"
_LOOK_UP_PAUSE_S = 1.0
"""Pause before the name of a worker to which there is no connection is looked up again."""


class Connection:
    """One client's connection to one worker."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        me: Incarnation,
        pulse: Pulse,
        keys: CurveKeys | None,
        endpoint: str | None,
        resolver: Resolver | None,
    ) -> None:
        """`endpoint` and `resolver` as in `ControlClient`."""
        self.address = address
        self.needed = False
        """Whether a session depends on this connection. While it stands, it then stays with its host, wherever the name
        points."""
        self._resolver = resolver
        self._unconnected = asyncio.Event()
        """Set while there is no connection, as far as ZeroMQ knows."""
        self._unconnected.set()
        self._told: set[str] = set()
        """Reasons, logged since the last connection that was good, why there is none."""
        self._endpoint: str | None = None
        """What to connect to; None until it is known."""
        self._socket = context.socket(zmq.DEALER)
        if keys is not None:
            keys.client(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, me.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1e3 * min(pulse.timeout_s, 600)))
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _HANDSHAKE_FAILED
        )
        if endpoint is not None or is_address(address.rpartition(":")[0]):
            self._connect(endpoint or address)

    async def watch(self, on_broken: Callable[[], None], on_found: Callable[[], None]) -> None:
        """Call `on_broken` whenever the connection breaks, and follow the worker's name: call `on_found` whenever it is
        another address. Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(on_broken))
            if self._endpoint is None:
                tasks.create_task(self._follow_name(on_found))

    def close(self) -> None:
        """Close the socket, once what was sent has left, or 0.1 s have passed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=100)

    async def receive(self) -> bytes:
        """The next frame. Does not yield to other tasks while frames are queued."""
        return await self._socket.recv()

    def send(self, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ, which keeps it until there is a connection. False at the high-water mark, and while
        no address is known."""
        try:
            result(self._socket.send(frame, flags=zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True

    @property
    def has_frames(self) -> bool:
        """Whether frames wait unread."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def renew(self) -> None:
        """Connect anew. On a connection whose packets were lost for some time TCP tries again only after as long a time
        once more; after a handshake that failed ZeroMQ never does; and what waits for a connection, such as Hellos, is
        out of date."""
        if self._endpoint is not None:
            self._unconnected.set()
            self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def tell_unanswered(self) -> None:
        """Log that there is no connection, unless there is one, or a reason for its absence was logged."""
        if self._unconnected.is_set() and self._endpoint is not None and not self._told:
            self._tell("no connection with %s: nothing answers there yet", self.address)

    async def _watch(self, on_broken: Callable[[], None]) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_CONNECTED:
                self._unconnected.clear()
            elif event == zmq.EVENT_DISCONNECTED:
                self._unconnected.set()
                on_broken()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._told.clear()
            else:
                self._tell("%s breaks the handshake off: it may have no --curve-keys, or others", self.address)

    async def _follow_name(self, on_found: Callable[[], None]) -> None:
        """Connect to the address that the worker's name has now, whenever there is no connection."""
        assert self._resolver is not None
        host, _, port = self.address.rpartition(":")
        while True:
            await self._unconnected.wait()
            try:
                found = await self._resolver.find(host)
            except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be one
                self._tell(_NO_SUCH_NAME, host, error)
            else:
                self._told.discard(_NO_SUCH_NAME)
                has_connected = self.needed and not self._unconnected.is_set()
                if not has_connected and self._connect(f"{found}:{port}"):
                    on_found()
            await asyncio.sleep(_LOOK_UP_PAUSE_S)

    def _tell(self, what: str, *about: object) -> None:
        """Log why there is no connection: each reason once until there is one."""
        if what not in self._told:
            self._told.add(what)
            log.warning(what, *about)

    def _connect(self, endpoint: str) -> bool:
        """Connect to `host:port`, and no longer to another one. Returns whether it is another one."""
        before, self._endpoint = self._endpoint, f"tcp://{endpoint}"
        if before == self._endpoint:
            return False
        if before is not None:
            log.info("%s is at %s now", self.address, endpoint)
            self._socket.disconnect(before)
        self._unconnected.set()
        self._socket.connect(self._endpoint)
        return True
