"""A worker's end of its control channel: sessions with its clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import zmq
import zmq.asyncio

from common.contract.codec import MAX_FRAME_BYTES, decode, encode
from common.contract.errors import Cause, FingerprintMismatchError, OperatorError, ProtocolError
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Role,
    Welcome,
)
from common.runtime.channel.ends import (
    BACKPRESSURE_RETRY_S,
    GOODBYE,
    TURN_BYTES,
    Outbox,
    Traffic,
    after_reconnect_time,
    rest,
    result,
    sleep,
    turns,
)
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
"""Most gateways, and most other workers, that are clients of one worker. A worker that is a client stays one while its
link is idle; gateways have a bound of their own, so that such links keep no gateway out."""
_CALM_BEATS = 8
"""Heartbeats without any message between them, after which every second heartbeat is left out."""
_GOODBYE_S = 0.05
"""Seconds for clients to read the last frames before the connections close; frames unread by then may be dropped."""


class ServerHandler(Protocol):
    """The worker's callbacks for its clients. Called on the event loop; must not block."""

    def welcome(self) -> Welcome:
        """Return the Welcome, except its `number` and `open_requests`."""

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens, or opens again: give up the peer's requests that `hello` does not list, and return the
        peer's requests that are open here."""

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """The session is open, or open again: from now on messages can be sent to the peer."""

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message within a session."""

    def on_peer_lost(self, peer: Incarnation) -> None:
        """The session has ended: give up everything that was open for this peer."""

    def heartbeat(self, number: int) -> Heartbeat:
        """The worker's present state, which is sent to every client."""


@dataclass(slots=True)
class _Session:
    role: Role
    heard_at: float
    outbox: Outbox
    echoed: int
    """Number of the last heartbeat that was echoed."""
    received: int = 0
    sent: int = 0
    broken: bool = False
    """Whether the connection has broken since the peer's last Hello. No queued message is sent until its next Hello,
    after which both sides agree again on the open requests."""


class ControlServer:
    """A worker's ROUTER. `send` never blocks; a peer that does not read counts as lost after a bound."""

    def __init__(self, me: Incarnation, clock: Clock, pulse: Pulse, keys: CurveKeys | None = None) -> None:
        self._me = me
        self._clock = clock
        self._pulse = pulse
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.server(self._socket)
        self._sessions: dict[Incarnation, _Session] = {}
        self._unflushed: dict[Incarnation, None] = {}
        """Peers with messages to send, in the order of their first unsent message."""
        self._stalled: dict[Incarnation, None] = {}
        """Peers that do not read: a timer of their own tries them again, so that they delay no other peer."""
        self._flush_scheduled = False
        self._beat = 0
        """Intervals that have begun."""
        self._busy = asyncio.Event()
        """Set when a message comes or goes."""
        self.traffic = Traffic()

    def bind(self, host: str, port: int) -> int:
        """Bind to `host:port` (0: an ephemeral port); return the port. Raises `OperatorError` if it is occupied."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Nothing is sent to whose session is lost: without this, the connection of a host that is gone stays for good.
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 60),
            (zmq.TCP_KEEPALIVE_INTVL, 15),
            (zmq.TCP_KEEPALIVE_CNT, 4),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OperatorError(f"cannot bind the control port {host}:{port}: {error}") from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    async def run(self, handler: ServerHandler) -> None:
        """Serve until cancelled."""
        self._handler = handler
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._pulse_loop())

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send within the peer's session; no effect without one (`on_peer_lost` has then given up its requests)."""
        session = self._sessions.get(peer)
        if session is None:
            return
        session.outbox.append(message)
        self._busy.set()
        if peer in self._stalled:
            return
        self._flush_soon(peer)

    def _flush_soon(self, peer: Incarnation) -> None:
        self._unflushed[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def abandon(self) -> None:
        """Close the socket at once, without a word to anybody: to its clients the worker has crashed."""
        self._sessions.clear()
        self._context.destroy(linger=0)

    async def close(self) -> None:
        """Send the unsent messages and a Goodbye to every peer, then close the socket; after `abandon`, do nothing."""
        for peer, session in self._sessions.items():
            with contextlib.suppress(zmq.Again, ProtocolError):
                while session.outbox:
                    self._send_now(peer, session.outbox.frame())
                    session.outbox.left()
                self._send_now(peer, encode(self._me, [Goodbye()]))
        self._sessions.clear()
        if self._context.closed:
            return
        try:
            await asyncio.sleep(_GOODBYE_S)
        finally:
            self._context.destroy(linger=100)

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                sender, messages = self._open_frame(parts)
            except ProtocolError as error:
                self.traffic.frames_refused += 1
                log.warning("frame refused: %s", error)
                messages = []
            for number, turn in enumerate(turns(messages, len(parts[-1]))):
                if number:
                    await rest()
                for message in turn:
                    self._accept(sender, message)
            await (
                rest() if len(parts[-1]) > TURN_BYTES else asyncio.sleep(0)
            )  # `recv_multipart` does not yield to other tasks while frames are queued

    def _open_frame(self, parts: list[bytes]) -> tuple[Incarnation, list[Message]]:
        if len(parts) != 2:
            raise ProtocolError(f"{len(parts) - 1} parts after the routing id")
        sender, messages = decode(parts[1])
        if parts[0].startswith(b"\0") and sender.encode() != parts[0]:
            return sender, []  # ZeroMQ has renamed a connection, because its peer has made another one since
        if sender.encode() != parts[0]:
            raise ProtocolError("the sender's incarnation is not its routing id")
        return sender, messages

    def _accept(self, peer: Incarnation, message: Message) -> None:
        session = self._sessions.get(peer)
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif session is None:
            self.traffic.frames_refused += 1
            self._send_control(peer, HelloRequired())
        else:
            session.heard_at = self._clock()
            if isinstance(message, HeartbeatEcho):
                session.echoed = message.number
                if message.sent != session.received:
                    self._send_control(peer, HelloRequired())
            elif isinstance(message, Goodbye):
                self._end(peer, GOODBYE)
            else:
                session.received += 1
                self._busy.set()
                self._handler.on_message(peer, message)

    def _greet(self, peer: Incarnation, hello: Hello) -> None:
        welcome = self._handler.welcome()
        try:
            if hello.fingerprint is not None:
                welcome.fingerprint.require_equal(hello.fingerprint, f"this {welcome.role}", f"the {hello.role} peer")
        except FingerprintMismatchError as error:
            log.error("%s", error)
            self._send_control(peer, HelloRefused(cause=Cause.FINGERPRINT, message=str(error)[:4096]))
            return
        if peer not in self._sessions and self._num_clients(hello.role) >= MAX_SESSIONS:
            message = f"{MAX_SESSIONS} {'gateways' if hello.role is Role.GATEWAY else 'workers'} are clients already"
            self._send_control(peer, HelloRefused(cause=Cause.CAPACITY, message=message))
            return
        known = self._handler.on_hello(peer, hello)
        old = self._sessions.get(peer)
        outbox = old.outbox if old else Outbox(self._me)
        # What waits follows the Welcome: a request whose end is still to be told is not unknown here.
        told = outbox.told.difference(known)
        open_requests = (*known, *(key for key in hello.open_requests if key in told))
        self._sessions[peer] = _Session(hello.role, self._clock(), outbox, self._beat)
        if outbox:
            self._flush_soon(peer)
        self._send_control(peer, replace(welcome, number=hello.number, open_requests=open_requests))
        self._handler.on_open(peer, hello.role)

    def _num_clients(self, role: Role) -> int:
        """Clients of a kind: gateways or workers."""
        gateways = sum(session.role is Role.GATEWAY for session in self._sessions.values())
        return gateways if role is Role.GATEWAY else len(self._sessions) - gateways

    async def _pulse_loop(self) -> None:
        """Tell every client how this worker is, once an interval. While no message comes or goes, it is told every
        second interval, as long as three such heartbeats fit in the timeout: idle processes wake up half as often. The
        first message then is followed by a heartbeat at once."""
        num_calm = 0
        while True:
            calm = num_calm >= _CALM_BEATS and 6 * self._pulse.interval_s <= self._pulse.timeout_s
            if calm:
                stall_s = await sleep(2 * self._pulse.interval_s, self._pulse, self._busy)
            else:
                stall_s = await sleep(self._pulse.interval_s, self._pulse)
            self._beat += 2 if calm else 1
            num_calm = 0 if self._busy.is_set() else num_calm + 1
            self._busy.clear()
            now = self._clock()
            heartbeat: Heartbeat | None = None
            for peer, session in list(self._sessions.items()):
                session.heard_at = min(now, session.heard_at + stall_s)
                if now - session.heard_at > self._pulse.timeout_s:
                    self._lose(peer, f"silent for {now - session.heard_at:.1f} s")
                elif not session.outbox:
                    heartbeat = heartbeat or self._handler.heartbeat(self._beat)
                    beat = replace(heartbeat, sent=session.sent, received=session.received, echoed=session.echoed)
                    self._send_control(peer, beat)

    def _flush(self) -> None:
        self._flush_scheduled = False
        peers, self._unflushed = self._unflushed, {}
        for peer in peers:
            if peer in self._sessions:
                self._flush_peer(peer)

    def _flush_peer(self, peer: Incarnation) -> None:
        """Send one frame; the next frame is sent in a later turn of the event loop."""
        session = self._sessions[peer]
        outbox = session.outbox
        if outbox and not session.broken:
            try:
                delivered = self._send_now(peer, outbox.frame())
            except ProtocolError as error:
                log.error("to a client: %s", error)
                self._lose(peer, "a message that cannot travel")
                return
            except zmq.Again:
                self._wait_for_reader(peer)
            else:
                if delivered:
                    session.sent += outbox.left()
                    if outbox:
                        self._flush_soon(peer)
                    return
                session.broken = True
                after_reconnect_time(partial(self._judge_connection, peer, session))
        if outbox.overfull:
            self._lose(peer, f"{len(outbox)} messages unread")

    def _judge_connection(self, peer: Incarnation, session: _Session) -> None:
        if self._sessions.get(peer) is session:
            self._lose(peer, "its connection broke, and it has not come back")

    def _wait_for_reader(self, peer: Incarnation) -> None:
        if not self._stalled:
            asyncio.get_running_loop().call_later(BACKPRESSURE_RETRY_S, self._retry_stalled)
        self._stalled[peer] = None

    def _retry_stalled(self) -> None:
        peers, self._stalled = self._stalled, {}
        for peer in peers:
            if peer in self._sessions:
                self._flush_peer(peer)

    def _send_control(self, peer: Incarnation, message: Message) -> None:
        """Send a message of the link itself, which is not counted. If it cannot be sent now, it is dropped: the event
        that caused it comes again."""
        with contextlib.suppress(zmq.Again):
            self._send_now(peer, encode(self._me, [message]))

    def _send_now(self, peer: Incarnation, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; return False if the peer is not connected.

        Raises `zmq.Again` at the high-water mark.
        """
        try:
            result(self._socket.send_multipart([peer.encode(), frame], flags=zmq.NOBLOCK))
        except zmq.Again:
            raise
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _lose(self, peer: Incarnation, why: str) -> None:
        self.traffic.sessions_lost += 1
        self._end(peer, why)

    def _end(self, peer: Incarnation, why: str) -> None:
        del self._sessions[peer]
        log.info("client %s is gone: %s", peer, why)
        self._handler.on_peer_lost(peer)
