"""The two ends of the control channel over real ZeroMQ on loopback, as their handlers see them; and raw sockets, whose
every frame the test decides, as peers that lose, lie or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import pytest
import zmq
import zmq.asyncio

from common.contract.codec import decode, encode
from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort
from common.contract.messages.session import Heartbeat, Hello, HelloRefused, Phase, Role, Welcome
from common.contract.messages.worker import Tokens
from common.runtime.channel import ControlClient, ControlServer, LinkState
from common.runtime.channel import client as client_end
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.resolver import Resolver

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="weights-a", layout=LAYOUT)
OTHER = replace(FINGERPRINT, weights_hash="weights-b")
PATIENT = Pulse(interval_s=0.03, timeout_s=20)
WAIT_S = 20
"""After this a test hangs; no test asks how long anything took."""
KEY = RequestKey(RequestId("r"), 1)


def heartbeat(number: int, sent: int = 0, *, echoed: int | None = None) -> Heartbeat:
    load: dict[str, Any] = {"steps": 0, "running": 0, "waiting": 0, "blocks_used": 0, "blocks_total": 1}
    echoed = number if echoed is None else echoed
    return Heartbeat(number=number, sent=sent, phase=Phase.SERVING, echoed=echoed, **load)


def welcome(number: int = 0, fingerprint: Fingerprint = FINGERPRINT) -> Welcome:
    return Welcome(
        number=number,
        role=Role.DECODE,
        fingerprint=fingerprint,
        max_sequence_tokens=1,
        transport="zmq",
        transport_metadata=b"",
        open_requests=(),
    )


def abort(attempt: int) -> Abort:
    return Abort(request=RequestId("r"), attempt=attempt)


def tokens(position: int) -> Tokens:
    return Tokens(request=RequestId("r"), attempt=1, choice=0, position=position, token_ids=(position,))


def hello_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that are made from now on repeat no Hello. Else a link that reads an answer late ignores it, since it has
    sent another Hello by then."""
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 3600.0)
    monkeypatch.setattr(client_end, "_HELLO_RETRY_MAX_S", 3600.0)


class HeldClock:
    """Time that stands still until the test moves it: however slow the machine, nobody is lost by surprise."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_looks = 0
        self._looked = asyncio.Event()

    def __call__(self) -> float:
        self._num_looks += 1
        self._looked.set()
        return self.now_s

    async def looks(self, more: int) -> None:
        """Wait until it has been read `more` times: who acts by time has had occasion to."""
        wanted = self._num_looks + more
        async with asyncio.timeout(WAIT_S):
            while self._num_looks < wanted:
                self._looked.clear()
                await self._looked.wait()


class Events(list[str]):
    """What happened, in order; wakes whoever waits for it."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def add(self, event: str) -> None:
        self.append(event)
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


class Worker:
    """A real server, which may begin later; what its handler saw."""

    def __init__(
        self,
        clock: Clock,
        pulse: Pulse,
        fingerprint: Fingerprint,
        port: int,
        begins: bool,
        host: str,
        keys: CurveKeys | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.events = Events()
        self.received: list[tuple[Incarnation, Message]] = []
        self.hellos: list[Hello] = []
        self.lost: list[Incarnation] = []
        self.beat = 0
        self.me = new_incarnation()
        self.server = ControlServer(self.me, clock, pulse, keys)
        self.port = self.server.bind(host, port)
        self.address = f"{host}:{self.port}"
        self._open = True
        if begins:
            self.begin()

    def begin(self) -> None:
        """Serve."""
        self._serving = asyncio.create_task(self.server.run(self))

    @property
    def messages(self) -> list[Message]:
        """What was received, whoever sent it."""
        return [message for _, message in self.received]

    @property
    def peers(self) -> tuple[Incarnation, ...]:
        """The clients with a session."""
        return tuple(self.server._sessions)

    def welcome(self) -> Welcome:
        return welcome(fingerprint=self.fingerprint)

    def on_open(self, peer: Incarnation, role: Role) -> None: ...

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        self.hellos.append(hello)
        self.events.add("hello")
        return (KEY,)

    def on_message(self, peer: Incarnation, message: Message) -> None:
        self.received.append((peer, message))
        self.events.add(type(message).__name__)

    def on_peer_lost(self, peer: Incarnation) -> None:
        self.lost.append(peer)
        self.events.add(f"lost {peer}")

    def heartbeat(self, number: int) -> Heartbeat:
        self.beat = number
        self.events._changed.set()
        return heartbeat(number)

    async def beats(self, more: int) -> None:
        """Wait until `more` heartbeats have been due: before the last of them, every session was looked at."""
        wanted = self.beat + more
        await self.events.until(lambda: self.beat >= wanted)

    async def stop(self, *, goodbye: bool = True) -> None:
        if not self._open:
            return
        self._open = False
        self._serving.cancel()
        await asyncio.wait([self._serving])
        if not goodbye:
            self.server.abandon()
        await self.server.close()
        if not self._serving.cancelled():
            self._serving.result()


class Client:
    """A real link; what its handler saw."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        pulse: Pulse,
        fingerprint: Fingerprint | None,
        resolver: Resolver | None,
        keys: CurveKeys | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.events = Events()
        self.received: list[Message] = []
        self.num_heartbeats = 0
        self.welcomes: list[Welcome] = []
        self.refusals: list[HelloRefused] = []
        self.workers: list[Incarnation | None] = []
        self.losses: list[tuple[str, bool]] = []
        """(why, whether it looked as if the worker's process had died)."""
        self.me = new_incarnation()
        self.context = zmq.asyncio.Context()
        self.link = ControlClient(self.context, address, self.me, self, clock, pulse, keys, resolver=resolver)
        self._linking = asyncio.create_task(self.link.run())
        self._open = True

    def hello(self, link: ControlClient) -> Hello:
        role = Role.GATEWAY if self.fingerprint is None else Role.DECODE
        return Hello(role=role, fingerprint=self.fingerprint, open_requests=(KEY,))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        self.welcomes.append(welcome)
        self.workers.append(link.worker)
        self.events.add("open")

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        self.welcomes.append(welcome)
        self.events.add("resync")

    def on_message(self, link: ControlClient, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self.num_heartbeats += 1
            self.events._changed.set()
        else:
            self.received.append(message)
            self.events.add(type(message).__name__)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        self.losses.append((why, crashed))
        self.events.add(f"lost: {why}")

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        self.refusals.append(refused)
        self.events.add("refused")

    @property
    def num_lost(self) -> int:
        return len(self.losses)

    @property
    def num_resyncs(self) -> int:
        return self.events.count("resync")

    async def loss(self) -> tuple[str, bool]:
        """Wait for the first loss."""
        await self.events.until(lambda: bool(self.losses))
        return self.losses[0]

    async def opened(self, times: int = 1) -> Client:
        await self.events.until(lambda: self.events.count("open") >= times)
        return self

    async def beats(self, more: int) -> None:
        """Wait until `more` heartbeats have been accepted: with that, everything before them was."""
        wanted = self.num_heartbeats + more
        await self.events.until(lambda: self.num_heartbeats >= wanted)

    async def stop(self) -> None:
        if not self._open:
            return
        self._open = False
        self._linking.cancel()
        await asyncio.wait([self._linking])
        self.context.destroy(linger=100)
        if not self._linking.cancelled():
            self._linking.result()


class RawWorker:
    """A ROUTER whose every frame the test decides."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.me = new_incarnation()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as the server
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def receive(self) -> tuple[Incarnation, list[Message]]:
        async with asyncio.timeout(WAIT_S):
            _, frame = await self._socket.recv_multipart()
        return decode(frame)

    async def expect(self, kind: type[Message]) -> tuple[Incarnation, Message]:
        """The next message of this kind; others are skipped."""
        while True:
            peer, messages = await self.receive()
            for message in messages:
                if isinstance(message, kind):
                    return peer, message

    async def accept(self, client: Client) -> Incarnation:
        """Answer the client's Hellos until it takes an answer for one to its last."""
        while client.link.state is not LinkState.OPEN or client.link._resyncing:
            try:
                async with asyncio.timeout(0.02):
                    peer, messages = await self.receive()
            except TimeoutError:
                continue
            for message in messages:
                if isinstance(message, Hello):
                    await self.send(peer, welcome(message.number))
                    await asyncio.sleep(0.01)
        return client.me

    async def up_to_hello(self, number: int) -> list[Message]:
        """The messages up to the Hello of this number, which is the last of them."""
        seen: list[Message] = []
        while not (seen and isinstance(seen[-1], Hello) and seen[-1].number == number):
            seen.extend((await self.receive())[1])
        return seen

    async def send(self, peer: Incarnation, *messages: Message, me: Incarnation | None = None) -> None:
        await self._socket.send_multipart([peer.encode(), encode(me or self.me, messages)])

    def send_soon(self, peer: Incarnation, *messages: Message) -> None:
        """Without a turn of the event loop."""
        self._socket.send_multipart([peer.encode(), encode(self.me, messages)])

    async def send_bytes(self, peer: Incarnation, frame: bytes) -> None:
        await self._socket.send_multipart([peer.encode(), frame])


class RawClient:
    """A DEALER whose every frame the test decides."""

    def __init__(self, context: zmq.asyncio.Context, address: str, *, receive_hwm: int = 1000) -> None:
        self.me = new_incarnation()
        self._hellos = 0
        self._unread: deque[Message] = deque()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.me.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, receive_hwm)
        self._socket.connect(f"tcp://{address}")

    async def send(self, *messages: Message, me: Incarnation | None = None) -> None:
        await self._socket.send(encode(me or self.me, messages))

    async def send_parts(self, parts: Sequence[bytes]) -> None:
        await self._socket.send_multipart(parts)

    def send_all_that_fit(self, frames: Sequence[bytes]) -> None:
        """Hand frames to ZeroMQ, up to its high-water mark, without letting anybody else run."""
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        with contextlib.suppress(zmq.Again):
            for frame in frames:
                socket.send(frame, zmq.NOBLOCK)

    async def expect(self, kind: type[Message]) -> Message:
        """The next message of this kind; others are skipped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while self._unread:
                    message = self._unread.popleft()
                    if isinstance(message, kind):
                        return message
                self._unread.extend(decode(await self._socket.recv())[1])

    async def greet(self, fingerprint: Fingerprint | None = None) -> Welcome:
        self._hellos += 1
        await self.send(Hello(number=self._hellos, role=Role.GATEWAY, fingerprint=fingerprint, open_requests=()))
        answer = await self.expect(Welcome)
        assert isinstance(answer, Welcome)
        return answer


class Endpoint(Protocol):
    """Something of a test that has to be closed."""

    async def stop(self) -> None: ...


class Net:
    """Everything that a test has open, which goes by one pulse unless it is told another."""

    def __init__(self, pulse: Pulse = PATIENT) -> None:
        self.context = zmq.asyncio.Context()
        self.clock = HeldClock()
        self.open: list[Endpoint] = []
        self._pulse = pulse

    def worker(
        self,
        pulse: Pulse | None = None,
        fingerprint: Fingerprint = FINGERPRINT,
        port: int = 0,
        *,
        clock: Clock | None = None,
        begins: bool = True,
        host: str = "127.0.0.1",
        keys: CurveKeys | None = None,
    ) -> Worker:
        worker = Worker(clock or self.clock, pulse or self._pulse, fingerprint, port, begins, host, keys)
        self.open.append(worker)
        return worker

    def client(
        self,
        address: str,
        pulse: Pulse | None = None,
        fingerprint: Fingerprint | None = None,
        *,
        clock: Clock | None = None,
        resolver: Resolver | None = None,
        keys: CurveKeys | None = None,
    ) -> Client:
        client = Client(address, clock or self.clock, pulse or self._pulse, fingerprint, resolver, keys)
        self.open.append(client)
        return client

    def raw_worker(self) -> RawWorker:
        return RawWorker(self.context)

    def raw_client(self, address: str, *, receive_hwm: int = 1000) -> RawClient:
        return RawClient(self.context, address, receive_hwm=receive_hwm)

    async def close(self) -> None:
        for each in reversed(self.open):
            await each.stop()
        self.context.destroy(linger=0)
