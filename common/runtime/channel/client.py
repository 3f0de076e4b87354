"""A client's end of a control channel: a link to one worker."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common.contract.codec import MAX_FRAME_BYTES, decode, encode
from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Message,
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

_HELLO_RETRY_S = 0.25
_HELLO_RETRY_MAX_S = 1.0
"""Hellos are repeated ever more slowly: an answer counts only until the next one is said."""
_FRAMES_AT_ONCE = 8
"""Frames that a client takes in one turn of the event loop if they are there, and are small: whoever is behind passes
on together what has come together."""
_DEAF_SHARE = 0.7
"""Of the timeout: missing echoes show a cut in one direction before the worker ends the session."""


class LinkState(StrEnum):
    """A client's view of its worker."""

    GREETING = "greeting"
    """Not (yet, or any more) in a session; Hello is repeated."""
    OPEN = "open"
    REFUSED = "refused"
    """The worker will not have us; we ask again now and then, since another may take its place."""
    CLOSED = "closed"
    """Whoever runs the link has done with it: nothing is said or taken any more."""


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
        endpoint: str | None = None,
    ) -> None:
        """`endpoint` is what `address` resolves to, where the caller has seen to that."""
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
        self._outbox = Outbox(me)
        self._flush_scheduled = False
        self._sent = 0
        self._received = 0
        self._heard_at = clock()
        self._resyncing = False
        self._greets = asyncio.Event()
        """Set when a Hello is to be said at once: the session has ended, or is to be opened again."""
        self._disconnected = False
        """Whether the connection has broken, and nobody has answered since. Nothing is sent until then:
        another worker may answer."""
        self._breaks = 0
        """Connections that have broken."""
        self._unheard: tuple[int, float] | None = None
        """The first echo that the worker has not confirmed: its number, and when it was sent."""
        self._heard = 0
        """Messages that the worker has taken, as its last heartbeat says."""
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
        self._socket.connect(f"tcp://{endpoint or address}")

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

    def retire(self) -> None:
        """Say and take nothing any more, but for the Goodbye of an open session. To be called by whoever cancels `run`,
        which takes some turns of the loop to end: somebody else may be at this address by then, or another link."""
        if self.state is not LinkState.OPEN:
            self.state = LinkState.CLOSED

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

    @property
    def unsent_work(self) -> frozenset[RequestKey]:
        """Requests of this session that the worker cannot know of yet; those that a Hello meanwhile lists may be
        unknown to it without having been lost."""
        return self._outbox.unsent_work

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _watch(self) -> None:
        while True:
            self._greets.clear()
            if self.state is LinkState.GREETING or self._resyncing:
                said = self._greet()
                self._hello_wait_s = min(2 * self._hello_wait_s, _HELLO_RETRY_MAX_S) if said else _HELLO_RETRY_S
                stall_s = await sleep(self._hello_wait_s, self._pulse, self._greets)
            elif self.state is LinkState.REFUSED:
                stall_s = await sleep(self._pulse.timeout_s, self._pulse)
                if self.state is LinkState.REFUSED:  # it may have opened meanwhile
                    self._greet()
            else:  # an idle link wakes its process for heartbeats alone
                left_s = self._heard_at + self._pulse.timeout_s - self._clock()
                stall_s = await sleep(max(self._pulse.interval_s, left_s), self._pulse, self._greets)
            now = self._clock()
            self._heard_at = min(now, self._heard_at + stall_s)
            silent_s = now - self._heard_at
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
                self._greets.set()
                after_reconnect_time(self._pulse, partial(self._judge_connection, self._breaks))

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
                frame = await self._socket.recv()
                await self._take(frame)
                if len(frame) > TURN_BYTES:
                    break
            await asyncio.sleep(0)  # while frames are queued, nothing else here waits

    async def _take(self, frame: bytes) -> None:
        try:
            sender, messages = decode(frame)
        except ProtocolError as error:
            self.traffic.frames_refused += 1
            log.warning("frame from %s refused: %s", self.address, error)
            return
        self._heard_at = self._clock()
        for number, turn in enumerate(turns(messages, len(frame))):
            if number:
                await rest()
            for message in turn:
                self._accept(sender, message)

    def _accept(self, sender: Incarnation, message: Message) -> None:
        if self.state is LinkState.CLOSED:
            return
        if isinstance(message, Welcome):
            self._open(sender, message)
        elif isinstance(message, HelloRefused):
            if self.state is LinkState.OPEN:
                self._end(f"refused: {message.message}")
            if self.state not in (LinkState.REFUSED, LinkState.CLOSED):
                self.state = LinkState.REFUSED
                self._handler.on_refused(self, message)
        elif isinstance(message, HelloRequired):
            if self.state is LinkState.OPEN:
                self._resync(sender)
        elif self.state is not LinkState.OPEN or sender != self.worker:
            self.traffic.frames_refused += 1
        elif isinstance(message, Goodbye):
            self._end(GOODBYE)
        elif isinstance(message, Heartbeat):
            if self._is_deaf(message) and not self._is_behind:
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
        or that the worker was too busy to send, prove nothing. Nor do echoes that lie there behind large messages, of
        which it takes one after another."""
        heard, self._heard = heartbeat.received != self._heard, heartbeat.received
        if heard or self._unheard is None or heartbeat.echoed >= self._unheard[0]:
            self._unheard = None
            return False
        interval_s = self._pulse.interval_s
        missing_s = (heartbeat.number - heartbeat.echoed) * interval_s
        return min(missing_s, self._clock() - self._unheard[1] + interval_s) > _DEAF_SHARE * self._pulse.timeout_s

    @property
    def _is_behind(self) -> bool:
        """Whether more lies unread: what is read now may be old, and echoes are confirmed late because heartbeats are
        read late. What has come since will tell."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _resync(self, sender: Incarnation | None) -> None:
        if sender != self.worker:
            self._lose("restarted", crashed=True)
        elif not self._resyncing:
            log.warning("messages to or from %s were lost; opening the session again", self.address)
            self._resyncing = True
            self._greets.set()

    def _lose(self, why: str, *, crashed: bool = False) -> None:
        self.traffic.sessions_lost += 1
        self._end(why, crashed=crashed)

    def _end(self, why: str, *, crashed: bool = False) -> None:
        self.state = LinkState.GREETING
        self._greets.set()
        self._heard_at = self._clock()
        self._outbox = Outbox(self._me)
        self._resyncing = self._disconnected = False
        log.log(logging.INFO if why == GOODBYE else logging.WARNING, "worker at %s is gone: %s", self.address, why)
        self._handler.on_lost(self, why, crashed=crashed)

    def _flush(self) -> None:
        """Send one frame; the next one in a turn of its own."""
        self._flush_scheduled = False
        if self._outbox and self.state is LinkState.OPEN and not self._disconnected:
            try:
                frame = self._outbox.frame()
            except ProtocolError as error:
                self._lose(f"a message that cannot travel: {error}")
                return
            if self._try_send(frame):
                self._sent += self._outbox.left()
                if self._outbox:
                    self._flush_soon()
                return
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(BACKPRESSURE_RETRY_S, self._flush)
        if self._outbox.overfull:
            self._lose(f"{len(self._outbox)} messages unread")

    def _try_send(self, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; False when not connected, or at the high-water mark."""
        try:
            result(self._socket.send(frame, flags=zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True
