"""The control channel: one ROUTER at each worker, one DEALER at each of its clients (gateways and peer workers).

ZeroMQ drops silently: at its high-water mark, for a peer it cannot route to, across a reconnect. So a session counts.
Every heartbeat says how many messages the worker has sent in this session, its echo how many the client has; FIFO
order makes "fewer received" mean "lost", and the client says Hello again. At each Hello both sides name the requests
that they hold open, and each gives up what the other does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common.contract.codec import MAX_FRAME_BYTES, MAX_MESSAGES_PER_FRAME, decode, encode, encode_some
from common.contract.errors import Cause, FingerprintMismatchError, OperatorError, ProtocolError
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Message,
    Role,
    Welcome,
)
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys

log = logging.getLogger(__name__)

MAX_OUTBOX_MESSAGES = 65_536
"""Messages waiting for one peer that does not read; one more and the peer counts as lost."""
MAX_SESSIONS = 1024
"""Clients of one worker."""
_BACKPRESSURE_RETRY_S = 0.01
_GOODBYE = "said goodbye"
_GOODBYE_S = 0.05
"""Time for the last frames to be read before the connections go: what is unread then may be dropped."""
_HELLO_RETRY_S = 0.25
_HELLO_RETRY_MAX_S = 1.0
"""Hellos are repeated ever more slowly: an answer counts only until the next one is said."""
_FRAMES_AT_ONCE = 8
"""Frames that a client takes in one turn of the event loop if they are there: whoever is behind passes on together
what has come together."""
_DEAF_SHARE = 0.7
"""Of the timeout: missing echoes show a cut in one direction before the worker ends the session."""
RECONNECT_S = 0.4
"""Time in which a worker must answer again after its connection has broken: a process that has died never does."""


@dataclass(slots=True)
class Traffic:
    """Counters of one end of a channel."""

    frames_refused: int = 0
    """Frames that were malformed, or from a sender with no session."""
    sessions_lost: int = 0
    resyncs: int = 0
    """Sessions that were opened again because messages had been lost."""


class ServerHandler(Protocol):
    """What a worker does with its clients. Called on the event loop; must not block."""

    def welcome(self) -> Welcome:
        """This worker's side of a handshake, but for `number` and `open_requests`."""

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens, or opens again: give up what `hello` does not list; return what is open for this peer."""

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """The session is open, or open again: from now on the peer can be told things."""

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message within a session."""

    def on_peer_lost(self, peer: Incarnation) -> None:
        """The session is over: give up everything that was open for this peer."""

    def heartbeat(self, number: int, sent: int) -> Heartbeat:
        """The worker's state of this moment."""


@dataclass(slots=True)
class _Session:
    role: Role
    heard_at: float
    received: int = 0
    sent: int = 0
    echoed: int = 0
    """Number of the last heartbeat that was echoed."""
    outbox: deque[Message] = field(default_factory=deque)
    frame: tuple[bytes, int] | None = None
    """The first messages of the outbox, encoded and counted, that the peer was not ready to take."""

    def next_messages(self) -> list[Message]:
        """As many unsent messages as one frame may hold."""
        return list(itertools.islice(self.outbox, MAX_MESSAGES_PER_FRAME))


class ControlServer:
    """A worker's ROUTER. `send` never blocks; a peer that does not read is lost, not waited for."""

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
        """Peers with messages to send, in the order of their first."""
        self._stalled: dict[Incarnation, None] = {}
        """Peers that do not read: they are tried again by a timer of their own, and delay nobody else."""
        self._flush_scheduled = False
        self._beat = 0
        self.traffic = Traffic()

    def bind(self, host: str, port: int) -> int:
        """Bind to `host:port`, an ephemeral port if 0; the bound port. Raises `OperatorError` if occupied."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
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
        """Send within the peer's session; inert if it has none (it was lost, and what it had open given up)."""
        session = self._sessions.get(peer)
        if session is None:
            return
        session.outbox.append(message)
        if peer in self._stalled:
            return
        self._unflushed[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    @property
    def peers(self) -> tuple[Incarnation, ...]:
        """The clients with a session."""
        return tuple(self._sessions)

    async def close(self) -> None:
        """Send what is unsent, say goodbye, and close the socket."""
        for peer, session in self._sessions.items():
            with contextlib.suppress(zmq.Again, ProtocolError):
                while session.outbox:
                    frame, count = encode_some(self._me, session.next_messages())
                    self._send_now(peer, frame)
                    for _ in range(count):
                        session.outbox.popleft()
                self._send_now(peer, encode(self._me, [Goodbye()]))
        self._sessions.clear()
        await asyncio.sleep(_GOODBYE_S)
        self._context.destroy(linger=100)

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                if len(parts) != 2:
                    raise ProtocolError(f"{len(parts) - 1} parts after the routing id")
                sender, messages = decode(parts[1])
                if sender.encode() != parts[0]:
                    raise ProtocolError("the sender's incarnation is not its routing id")
            except ProtocolError as error:
                self.traffic.frames_refused += 1
                log.warning("frame refused: %s", error)
            else:
                for message in messages:
                    self._accept(sender, message)
            await asyncio.sleep(0)  # while frames are queued, nothing else here waits

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
                self._end(peer, _GOODBYE)
            else:
                session.received += 1
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
        if peer not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            self._send_control(peer, HelloRefused(cause=Cause.CAPACITY, message=f"{MAX_SESSIONS} clients already"))
            return
        open_requests = self._handler.on_hello(peer, hello)
        old = self._sessions.get(peer)
        unsent = old.outbox if old else deque[Message]()
        self._sessions[peer] = _Session(role=hello.role, heard_at=self._clock(), echoed=self._beat, outbox=unsent)
        if unsent:
            self._unflushed[peer] = None
        self._send_control(peer, replace(welcome, number=hello.number, open_requests=open_requests))
        self._handler.on_open(peer, hello.role)

    async def _pulse_loop(self) -> None:
        while True:
            await asyncio.sleep(self._pulse.interval_s)
            self._beat += 1
            now = self._clock()
            for peer, session in list(self._sessions.items()):
                if now - session.heard_at > self._pulse.timeout_s:
                    self._lose(peer, f"silent for {now - session.heard_at:.1f} s")
                elif not session.outbox:
                    heartbeat = self._handler.heartbeat(self._beat, session.sent)
                    self._send_control(peer, replace(heartbeat, received=session.received, echoed=session.echoed))

    def _flush(self) -> None:
        self._flush_scheduled = False
        peers, self._unflushed = self._unflushed, {}
        for peer in peers:
            if peer in self._sessions:
                self._flush_peer(peer)

    def _flush_peer(self, peer: Incarnation) -> None:
        session = self._sessions[peer]
        while session.outbox:
            try:
                if session.frame is None:
                    session.frame = encode_some(self._me, session.next_messages())
                frame, count = session.frame
                delivered = self._send_now(peer, frame)
            except ProtocolError as error:
                log.error("to a client: %s", error)
                self._lose(peer, "a message that cannot travel")
                return
            except zmq.Again:
                self._wait_for_reader(peer, session)
                return
            if not delivered:
                self._lose(peer, "unroutable")
                return
            session.frame = None
            session.sent += count
            for _ in range(count):
                session.outbox.popleft()

    def _wait_for_reader(self, peer: Incarnation, session: _Session) -> None:
        if len(session.outbox) > MAX_OUTBOX_MESSAGES:
            self._lose(peer, f"{len(session.outbox)} messages unread")
            return
        if not self._stalled:
            asyncio.get_running_loop().call_later(_BACKPRESSURE_RETRY_S, self._retry_stalled)
        self._stalled[peer] = None

    def _retry_stalled(self) -> None:
        peers, self._stalled = self._stalled, {}
        for peer in peers:
            if peer in self._sessions:
                self._flush_peer(peer)

    def _send_control(self, peer: Incarnation, message: Message) -> None:
        """Send a message of the link itself, outside the count; one that cannot leave now is repeated by its cause."""
        with contextlib.suppress(zmq.Again):
            self._send_now(peer, encode(self._me, [message]))

    def _send_now(self, peer: Incarnation, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; False if the peer is not connected. Raises `zmq.Again` at the high-water mark."""
        try:
            _result(self._socket.send_multipart([peer.encode(), frame], flags=zmq.NOBLOCK))
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


class LinkState(StrEnum):
    """A client's view of its worker."""

    GREETING = "greeting"
    """Not (yet, or any more) in a session; Hello is repeated."""
    OPEN = "open"
    REFUSED = "refused"
    """The worker will not have us; we ask again now and then, since another may take its place."""
    CLOSED = "closed"


class ClientHandler(Protocol):
    """What a client does with one worker. Called on the event loop; must not block."""

    def hello(self, link: ControlClient) -> Hello:
        """This client's side of a handshake, but for `number`, with the requests that it holds open at this worker."""

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """A session with this incarnation opens."""

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """The same session goes on after lost messages: give up what `welcome` does not list, ask for gaps."""

    def on_message(self, link: ControlClient, message: Message) -> None:
        """A message within the session, heartbeats included."""

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """The session is over, or none has come about in time: the worker is dead, restarted or silent. `crashed` if it
        looks as if its process had died: its connection broke and nobody answers there, or somebody else does."""

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """The worker refuses us."""


class ControlClient:
    """A link to one worker. It keeps trying to be open until it is cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        me: Incarnation,
        handler: ClientHandler,
        clock: Clock,
        pulse: Pulse,
        keys: CurveKeys | None = None,
    ) -> None:
        self.address = address
        self.state = LinkState.GREETING
        self.welcome: Welcome | None = None
        self.worker: Incarnation | None = None
        """The worker's incarnation, of the session that is or last was open."""
        self.traffic = Traffic()
        self._me = me
        self._handler = handler
        self._clock = clock
        self._pulse = pulse
        self._outbox: deque[Message] = deque()
        self._frame: tuple[bytes, int] | None = None
        """The first messages of the outbox, encoded and counted, that could not leave yet."""
        self._flush_scheduled = False
        self._sent = 0
        self._received = 0
        self._heard_at = clock()
        self._resyncing = False
        self._disconnected = False
        """Whether the connection has broken, and nobody has answered since. Nothing is sent until then:
        another worker may answer."""
        self._breaks = 0
        """Connections that have broken."""
        self._unheard: tuple[int, float] | None = None
        """The first echo that the worker has not confirmed: its number, and when it was sent."""
        self._hellos = 0
        self._hello_wait_s = _HELLO_RETRY_S / 2
        self._socket = context.socket(zmq.DEALER)
        if keys is not None:
            keys.client(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, me.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{address}")

    async def run(self) -> None:
        """Serve until cancelled; closes the socket."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch())
                tasks.create_task(self._watch_connection())
        finally:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            if self.state is LinkState.OPEN:
                self._try_send(encode(self._me, [Goodbye()]))
            self.state = LinkState.CLOSED
            self._socket.close(linger=100)

    def send(self, message: Message) -> None:
        """Send within the session; inert if there is none (`on_lost` has said so, or will)."""
        if self.state is not LinkState.OPEN:
            return
        self._outbox.append(message)
        self._flush_soon()

    @property
    def num_sent(self) -> int:
        """Messages of this session that were sent, or are about to be; a heartbeat says which of them have arrived."""
        return self._sent + len(self._outbox)

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _watch(self) -> None:
        while True:
            if self.state is LinkState.GREETING or self._resyncing:
                said = self._greet()
                self._hello_wait_s = min(2 * self._hello_wait_s, _HELLO_RETRY_MAX_S) if said else _HELLO_RETRY_S
                await asyncio.sleep(self._hello_wait_s)
            elif self.state is LinkState.REFUSED:
                await asyncio.sleep(self._pulse.timeout_s)
                if self.state is LinkState.REFUSED:  # it may have opened meanwhile
                    self._greet()
            else:
                await asyncio.sleep(self._pulse.interval_s)
            silent_s = self._clock() - self._heard_at
            if silent_s <= self._pulse.timeout_s:
                continue
            if self.state is LinkState.OPEN:
                self._lose(f"silent for {silent_s:.1f} s")
            elif self.state is LinkState.GREETING:
                self._heard_at = self._clock()
                self._handler.on_lost(self, f"no answer for {silent_s:.1f} s", crashed=False)

    async def _watch_connection(self) -> None:
        """A broken connection is looked into at once: the end of a process shows much sooner than its silence."""
        while True:
            await recv_monitor_message(self._monitor)
            if self.state is LinkState.OPEN and not self._disconnected:
                self._disconnected = self._resyncing = True
                self._breaks += 1
                self._hello_wait_s = _HELLO_RETRY_S / 2
                self._greet()
                asyncio.get_running_loop().call_later(RECONNECT_S, self._judge_connection, self._breaks)

    @property
    def broken(self) -> bool:
        """Whether its connection has broken, and it is not known yet whether the worker has crashed."""
        return self._disconnected

    def _judge_connection(self, breaks: int) -> None:
        if self._disconnected and self.state is LinkState.OPEN and breaks == self._breaks:
            self._lose("its connection broke, and nobody answers", crashed=True)

    def _greet(self) -> bool:
        """Say Hello; False when not connected."""
        self._hellos += 1
        hello = replace(self._handler.hello(self), number=self._hellos)
        if not self._try_send(encode(self._me, [hello])):
            return False
        self._sent = 0
        return True

    async def _receive(self) -> None:
        while True:
            for _ in range(_FRAMES_AT_ONCE):
                self._take(await self._socket.recv())
            await asyncio.sleep(0)  # while frames are queued, nothing else here waits

    def _take(self, frame: bytes) -> None:
        try:
            sender, messages = decode(frame)
        except ProtocolError as error:
            self.traffic.frames_refused += 1
            log.warning("frame from %s refused: %s", self.address, error)
            return
        self._heard_at = self._clock()
        for message in messages:
            self._accept(sender, message)

    def _accept(self, sender: Incarnation, message: Message) -> None:
        if isinstance(message, Welcome):
            self._open(sender, message)
        elif isinstance(message, HelloRefused):
            if self.state is LinkState.OPEN:
                self._end(f"refused: {message.message}")
            if self.state is not LinkState.REFUSED:
                self.state = LinkState.REFUSED
                self._handler.on_refused(self, message)
        elif isinstance(message, HelloRequired):
            if self.state is LinkState.OPEN:
                self._resync(sender)
        elif self.state is not LinkState.OPEN or sender != self.worker:
            self.traffic.frames_refused += 1
        elif isinstance(message, Goodbye):
            self._end(_GOODBYE)
        elif isinstance(message, Heartbeat):
            if self._is_deaf(message):
                self._lose("it does not hear what is sent to it")
                return
            if message.sent != self._received:
                self._resync(sender)
                return
            self._try_send(encode(self._me, [HeartbeatEcho(number=message.number, sent=self._sent)]))
            self._unheard = self._unheard or (message.number, self._clock())
            self._handler.on_message(self, message)
        else:
            self._received += 1
            self._handler.on_message(self, message)

    def _open(self, sender: Incarnation, welcome: Welcome) -> None:
        if welcome.number != self._hellos:
            return  # an answer to an earlier Hello: what it lists, and the counts since, are out of date
        same_session = self.state is LinkState.OPEN and sender == self.worker
        if self.state is LinkState.OPEN and not same_session:
            self._lose("restarted", crashed=True)
            return  # the handler may be done with this link; if not, the next Hello opens the next session
        self.state = LinkState.OPEN
        self.worker, self.welcome = sender, welcome
        self._received = 0
        self._unheard = None
        self._resyncing = self._disconnected = False
        self._hello_wait_s = _HELLO_RETRY_S / 2
        if same_session:
            self.traffic.resyncs += 1
            self._flush_soon()
            self._handler.on_resync(self, welcome)
        else:
            self._handler.on_open(self, welcome)

    def _is_deaf(self, heartbeat: Heartbeat) -> bool:
        """Whether echoes are missing for long, by the worker's count and by our clock: heartbeats that lay unread here,
        or that the worker was too busy to send, prove nothing."""
        if self._unheard is None or heartbeat.echoed >= self._unheard[0]:
            self._unheard = None
            return False
        interval_s = self._pulse.interval_s
        missing_s = (heartbeat.number - heartbeat.echoed) * interval_s
        return min(missing_s, self._clock() - self._unheard[1] + interval_s) > _DEAF_SHARE * self._pulse.timeout_s

    def _resync(self, sender: Incarnation | None) -> None:
        if sender != self.worker:
            self._lose("restarted", crashed=True)
        elif not self._resyncing:
            log.warning("messages to or from %s were lost; opening the session again", self.address)
            self._resyncing = True
            self._greet()

    def _lose(self, why: str, *, crashed: bool = False) -> None:
        self.traffic.sessions_lost += 1
        self._end(why, crashed=crashed)

    def _end(self, why: str, *, crashed: bool = False) -> None:
        self.state = LinkState.GREETING
        self._heard_at = self._clock()
        self._outbox.clear()
        self._frame = None
        self._resyncing = self._disconnected = False
        log.log(logging.INFO if why == _GOODBYE else logging.WARNING, "worker at %s is gone: %s", self.address, why)
        self._handler.on_lost(self, why, crashed=crashed)

    def _flush(self) -> None:
        self._flush_scheduled = False
        while self._outbox and self.state is LinkState.OPEN and not self._disconnected:
            try:
                if self._frame is None:
                    messages = list(itertools.islice(self._outbox, MAX_MESSAGES_PER_FRAME))
                    self._frame = encode_some(self._me, messages)
            except ProtocolError as error:
                self._lose(f"a message that cannot travel: {error}")
                return
            frame, count = self._frame
            if not self._try_send(frame):
                if len(self._outbox) > MAX_OUTBOX_MESSAGES:
                    self._lose(f"{len(self._outbox)} messages unread")
                else:
                    self._flush_scheduled = True
                    asyncio.get_running_loop().call_later(_BACKPRESSURE_RETRY_S, self._flush)
                return
            self._frame = None
            self._sent += count
            for _ in range(count):
                self._outbox.popleft()

    def _try_send(self, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; False when not connected, or at the high-water mark."""
        try:
            _result(self._socket.send(frame, flags=zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True


def _result(sent: Awaitable[object]) -> None:
    """The outcome of a send that does not wait: pyzmq answers with a future that is done. Raises what it holds."""
    assert isinstance(sent, asyncio.Future)
    sent.result()
