"""A client's end of a control channel: a link to one worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Protocol

import zmq.asyncio

from common.contract.codec import decode, encode
from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Welcome,
)
from common.runtime.channel.connection import Connection
from common.runtime.channel.ends import (
    BACKPRESSURE_RETRY_S,
    GOODBYE,
    TURN_BYTES,
    Outbox,
    Traffic,
    after_reconnect_time,
    rest,
    sleep,
    turns,
)
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.resolver import Resolver

log = logging.getLogger(__name__)

_HELLO_RETRY_S = 0.25
_HELLO_RETRY_MAX_S = 1.0
"""The interval between Hellos doubles up to this: the answer to a Hello is ignored once the next Hello was sent."""
_FRAMES_AT_ONCE = 8
"""Most small frames that a client handles in one turn of the event loop, if they have arrived: the code behind it can
then forward their messages together."""
_DEAF_SHARE = 0.7
"""Share of the timeout after which missing echoes count as a link broken towards the worker. Below 1, so that the
client notices before the worker ends the session."""

_OWN_MESSAGES = frozenset({Welcome, HelloRefused, HelloRequired, Goodbye, Heartbeat})
"""Messages that are the link's, all or in part."""


class LinkState(StrEnum):
    """A client's view of its worker."""

    GREETING = "greeting"
    """No session yet, or none any more; Hello is repeated."""
    OPEN = "open"
    REFUSED = "refused"
    """The worker refused the Hello. It is repeated once per timeout, since another worker may take this one's place."""
    CLOSED = "closed"
    """The owner of the link has closed it: it sends and accepts nothing any more."""


class ClientHandler(Protocol):
    """The client's callbacks for one worker. Called on the event loop; must not block."""

    def hello(self, link: ControlClient) -> Hello:
        """Return the Hello, except its `number`, with the requests that the client holds open at this worker."""

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """A session with this incarnation opens."""

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """The same session continues after lost messages: give up requests that `welcome` does not list, and ask for
        missing tokens."""

    def on_message(self, link: ControlClient, message: Message) -> None:
        """A message within the session, heartbeats included."""

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """The session has ended, or none was opened in time: the worker is dead, restarted or silent.

        `crashed` is true if its process seems to have died: its connection broke and nobody answers at its address, or
        another incarnation does.
        """

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """The worker refused the Hello."""


class ControlClient:
    """A link to one worker. It keeps trying to open a session until it is cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        me: Incarnation,
        handler: ClientHandler,
        clock: Clock,
        pulse: Pulse,
        keys: CurveKeys | None = None,
        *,
        endpoint: str | None = None,
        resolver: Resolver | None = None,
        on_broken: Callable[[ControlClient], None] = lambda _: None,
    ) -> None:
        """If `address` has a name, either the caller has resolved it, and `endpoint` is the result, or `resolver` looks
        it up whenever there is no connection, since another host may have got the name. `on_broken` is called when the
        connection of an open session breaks; the handler's `on_resync` or `on_lost` follows, unless the link is
        closed."""
        self.address = address
        self.state = LinkState.GREETING
        self.worker: Incarnation | None = None
        """The worker's incarnation in the open session, or in the last one."""
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
        """Set to send a Hello at once: the session has ended, or must be opened again."""
        self._disconnected = False
        """Whether the connection has broken and no Welcome has come since. No queued message is sent until then,
        because another worker may answer."""
        self._tell_broken = on_broken
        self._breaks = 0
        """Number of times that the connection has broken."""
        self._unheard: tuple[int, float] | None = None
        """The first echo that the worker has not confirmed: (its number, the time at which it was sent)."""
        self._heard = 0
        """Messages that the worker has received, according to its last heartbeat."""
        self._hellos = 0
        self._hello_wait_s = _HELLO_RETRY_S / 2
        self._connection = Connection(context, address, me, pulse, keys, endpoint, resolver)

    async def run(self) -> None:
        """Serve until cancelled; closes the socket."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch())
                tasks.create_task(self._connection.watch(self._on_broken, self._greets.set))
        finally:
            self.retire()
            self._connection.close()

    def retire(self) -> None:
        """Say Goodbye in an open session; send and accept nothing any more.

        The code that cancels `run` calls this first: `run` takes some turns of the event loop to end, and by then
        another worker may be at this address, or another link to it may exist.
        """
        if self.state is LinkState.OPEN:
            self._connection.send(encode(self._me, [Goodbye()]))
        self.state = LinkState.CLOSED
        self._resyncing = False

    def send(self, message: Message) -> None:
        """Send within the session; no effect without one (`on_lost` was called, or will be)."""
        if self.state is not LinkState.OPEN:
            return
        self._outbox.append(message)
        self._flush_soon()

    @property
    def num_sent(self) -> int:
        """Messages of this session that were sent or wait to be sent; heartbeats say how many have arrived."""
        return self._sent + len(self._outbox)

    @property
    def unsent_work(self) -> frozenset[RequestKey]:
        """Requests whose first message is still unsent, so that the worker cannot know them. If a Hello lists them and
        the worker does not, they are not lost."""
        return self._outbox.unsent_work

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _watch(self) -> None:
        while True:
            self._greets.clear()
            if self.state is LinkState.GREETING or self._resyncing:
                self._greet()
                self._hello_wait_s = min(2 * self._hello_wait_s, _HELLO_RETRY_MAX_S)
                stall_s = await sleep(self._hello_wait_s, self._pulse, self._greets)
            elif self.state is LinkState.REFUSED:
                stall_s = await sleep(self._pulse.timeout_s, self._pulse, self._greets)
                if self.state is LinkState.REFUSED:  # a session may have opened meanwhile
                    if self._clock() - self._heard_at - stall_s > 1.5 * self._pulse.timeout_s:
                        self._renew_connection()  # the last Hello was not answered
                    self._greet()
            else:  # an idle link wakes its process only for heartbeats
                left_s = self._heard_at + self._pulse.timeout_s - self._clock()
                stall_s = await sleep(max(self._pulse.interval_s, left_s), self._pulse, self._greets)
            now = self._clock()
            self._heard_at = min(now, self._heard_at + stall_s)
            silent_s = now - self._heard_at
            if silent_s <= self._pulse.timeout_s or self._disconnected:  # a broken connection is judged by itself
                continue
            if self.state is LinkState.OPEN:
                self._lose(f"silent for {silent_s:.1f} s")
                self._renew_connection()
            elif self.state is LinkState.GREETING:
                self._heard_at = self._clock()
                self._connection.tell_unanswered()
                self._handler.on_lost(self, f"no answer for {silent_s:.1f} s", crashed=False)
                self._renew_connection()

    def _on_broken(self) -> None:
        """On a broken connection, send a Hello at once: it shows the end of a process much sooner than silence does."""
        if self.state is LinkState.OPEN and not self._disconnected:
            self._disconnected = self._resyncing = True
            self._breaks += 1
            self._hello_wait_s = _HELLO_RETRY_S / 2
            self._greets.set()
            self._tell_broken(self)
            after_reconnect_time(partial(self._judge_connection, self._breaks))

    def _judge_connection(self, breaks: int) -> None:
        if self._disconnected and self.state is LinkState.OPEN and breaks == self._breaks:
            self._lose("its connection broke, and nobody answers", crashed=True)

    def _greet(self) -> None:
        """Send a Hello, unless too many wait for a connection."""
        self._hellos += 1
        hello = replace(self._handler.hello(self), number=self._hellos)
        if self._connection.send(encode(self._me, [hello])):
            self._sent = 0

    async def _receive(self) -> None:
        while True:
            for _ in range(_FRAMES_AT_ONCE):
                frame = await self._connection.receive()
                await self._take(frame)
                if len(frame) > TURN_BYTES:
                    break
            await asyncio.sleep(0)  # `recv` does not yield to other tasks while frames are queued

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
        if self.state is LinkState.OPEN and sender == self.worker and type(message) not in _OWN_MESSAGES:
            self._received += 1
            self._handler.on_message(self, message)
            return
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
            # While more frames wait unread, this heartbeat may be old, and a later one may confirm the echoes.
            if self._is_deaf(message) and not self._connection.has_frames:
                self._lose("it does not hear what is sent to it")
                self._renew_connection()
                return
            if message.sent != self._received:
                self._resync(sender)
                return
            self._connection.send(encode(self._me, [HeartbeatEcho(number=message.number, sent=self._sent)]))
            self._unheard = self._unheard or (message.number, self._clock())
            self._handler.on_message(self, message)

    def _open(self, sender: Incarnation, welcome: Welcome) -> None:
        if welcome.number != self._hellos:
            return  # the answer to an earlier Hello: its list of requests and its message counts are out of date
        same_session = self.state is LinkState.OPEN and sender == self.worker
        if self.state is LinkState.OPEN and not same_session:
            self._lose("restarted", crashed=True)
            return  # the handler may have closed this link; if not, the next Hello opens the next session
        self.state = LinkState.OPEN
        self._connection.needed = True
        self.worker = sender
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
        """Whether echoes have been missing for too long, both by the worker's heartbeat count and by our clock.

        Both are needed: heartbeats that lay unread here, or that the worker was too busy to send, prove nothing. Nor do
        echoes that wait at the worker behind large messages, as long as its count of received messages grows.
        """
        heard, self._heard = heartbeat.received != self._heard, heartbeat.received
        if heard or self._unheard is None or heartbeat.echoed >= self._unheard[0]:
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
            self._greets.set()

    def _renew_connection(self) -> None:
        """Connect anew, unless the link is closed."""
        if self.state is not LinkState.CLOSED:
            self._connection.renew()

    def _lose(self, why: str, *, crashed: bool = False) -> None:
        self.traffic.sessions_lost += 1
        self._end(why, crashed=crashed)

    def _end(self, why: str, *, crashed: bool = False) -> None:
        self.state = LinkState.GREETING
        self._connection.needed = False
        self._greets.set()
        self._heard_at = self._clock()
        self._outbox = Outbox(self._me)
        self._resyncing = self._disconnected = False
        log.log(logging.INFO if why == GOODBYE else logging.WARNING, "worker at %s is gone: %s", self.address, why)
        self._handler.on_lost(self, why, crashed=crashed)

    def _flush(self) -> None:
        """Send one frame; the next frame is sent in a later turn of the event loop."""
        self._flush_scheduled = False
        if self._outbox and self.state is LinkState.OPEN and not self._disconnected:
            try:
                frame = self._outbox.frame()
            except ProtocolError as error:
                self._lose(f"a message that cannot travel: {error}")
                return
            if self._connection.send(frame):
                self._sent += self._outbox.left()
                if self._outbox:
                    self._flush_soon()
                return
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(BACKPRESSURE_RETRY_S, self._flush)
        if self._outbox.overfull:
            self._lose(f"{len(self._outbox)} messages unread")
