"""The control channel over real ZeroMQ on loopback; raw sockets stand in for peers that lose, lie or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common.contract import codec
from common.contract.block_hashes import block_hashes
from common.contract.codec import MAX_FRAME_BYTES, MAX_MESSAGES_PER_FRAME, decode, encode, encode_some
from common.contract.errors import Cause, OperatorError, ProtocolError
from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages import (
    Abort,
    CacheEvents,
    Failed,
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Message,
    Phase,
    Prefill,
    Role,
    Tokens,
    Welcome,
)
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.runtime.channel import ControlClient, ControlServer, LinkState, ends
from common.runtime.channel import client as client_end
from common.runtime.channel import server as server_end
from common.runtime.clock import Clock, Pulse
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.worker_life import WorkerLife

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="weights-a", layout=LAYOUT)
OTHER = replace(FINGERPRINT, weights_hash="weights-b")
PATIENT = Pulse(interval_s=0.03, timeout_s=20)
BRISK = Pulse(interval_s=0.03, timeout_s=0.4)
WAIT_S = 20
"""After this a test hangs; no test asks how long anything took."""
MAX_FRAMES_PER_TURN = 2
"""The server takes one and lets others run; two may fall between two turns of a task by the order of the turns."""
KEY = RequestKey(RequestId("r"), 1)


def heartbeat(number: int, sent: int) -> Heartbeat:
    load: dict[str, Any] = {"steps": 0, "running": 0, "waiting": 0, "blocks_used": 0, "blocks_total": 1}
    return Heartbeat(number=number, sent=sent, phase=Phase.SERVING, echoed=number, **load)


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


def prefill(attempt: int) -> Prefill:
    return Prefill(
        request=RequestId("r"),
        attempt=attempt,
        token_ids=(1,),
        prompt_len=1,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
    )


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
    """A real server; what its handler saw."""

    def __init__(self, clock: Clock, pulse: Pulse, fingerprint: Fingerprint, port: int) -> None:
        self.fingerprint = fingerprint
        self.events = Events()
        self.received: list[tuple[Incarnation, Message]] = []
        self.hellos: list[Hello] = []
        self.beat = 0
        self.me = new_incarnation()
        self.server = ControlServer(self.me, clock, pulse)
        self.port = self.server.bind("127.0.0.1", port)
        self.address = f"127.0.0.1:{self.port}"
        self._serving = asyncio.create_task(self.server.run(self))
        self._open = True

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
        self.events.add(f"lost {peer}")

    def heartbeat(self, number: int) -> Heartbeat:
        self.beat = number
        self.events._changed.set()
        return heartbeat(number, 0)

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
            self.server._sessions.clear()  # as if killed: nobody is told
        await self.server.close()
        if not self._serving.cancelled():
            self._serving.result()


class Client:
    """A real link; what its handler saw."""

    def __init__(self, address: str, clock: Clock, pulse: Pulse, fingerprint: Fingerprint | None) -> None:
        self.fingerprint = fingerprint
        self.events = Events()
        self.received: list[Message] = []
        self.num_heartbeats = 0
        self.welcomes: list[Welcome] = []
        self.refusals: list[HelloRefused] = []
        self.workers: list[Incarnation | None] = []
        self.crashes: list[bool] = []
        """Of each loss, whether it looked as if the worker's process had died."""
        self.me = new_incarnation()
        self.context = zmq.asyncio.Context()
        self.link = ControlClient(self.context, address, self.me, self, clock, pulse)
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
        self.crashes.append(crashed)
        self.events.add(f"lost: {why}")

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        self.refusals.append(refused)
        self.events.add("refused")

    @property
    def num_lost(self) -> int:
        return sum(event.startswith("lost") for event in self.events)

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

    async def last_of_hellos(self, client: Client) -> tuple[Hello, Hello]:
        """Leave several Hellos unanswered, until the client pauses: the first and the last of them."""
        _, first = await self.expect(Hello)
        await self.expect(Hello)
        client_end._HELLO_RETRY_MAX_S = client.link._hello_wait_s = 3600.0  # a fixture sets the first back
        last = (await self.up_to_hello(client.link._hellos + 1))[-1]
        assert isinstance(first, Hello)
        assert isinstance(last, Hello)
        return first, last

    async def up_to_hello(self, number: int) -> list[Message]:
        """The messages up to the Hello of this number, which is the last of them."""
        seen: list[Message] = []
        while not (seen and isinstance(seen[-1], Hello) and seen[-1].number == number):
            seen.extend((await self.receive())[1])
        return seen

    async def send(self, peer: Incarnation, *messages: Message, me: Incarnation | None = None) -> None:
        await self._socket.send_multipart([peer.encode(), encode(me or self.me, messages)])

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


class Net:
    """Everything that a test has open."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.clock = HeldClock()
        self._open: list[Worker | Client] = []

    def worker(self, pulse: Pulse = PATIENT, fingerprint: Fingerprint = FINGERPRINT, port: int = 0) -> Worker:
        self._open.append(worker := Worker(self.clock, pulse, fingerprint, port))
        return worker

    def client(self, address: str, pulse: Pulse = PATIENT, fingerprint: Fingerprint | None = None) -> Client:
        self._open.append(client := Client(address, self.clock, pulse, fingerprint))
        return client

    def raw_worker(self) -> RawWorker:
        return RawWorker(self.context)

    def raw_client(self, address: str, *, receive_hwm: int = 1000) -> RawClient:
        return RawClient(self.context, address, receive_hwm=receive_hwm)

    async def close(self) -> None:
        for each in reversed(self._open):
            await each.stop()
        self.context.destroy(linger=0)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 0.05)
    monkeypatch.setattr(client_end, "_HELLO_RETRY_MAX_S", 1.0)


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


# --- greeting --------------------------------------------------------------------------------------------------------


async def test_the_welcome_carries_the_number_of_its_hello(net: Net) -> None:
    worker = net.worker()
    raw = net.raw_client(worker.address)
    for number in (7, 8, 3):
        await raw.send(Hello(number=number, role=Role.GATEWAY, fingerprint=None, open_requests=(KEY,)))
        answer = await raw.expect(Welcome)
        assert isinstance(answer, Welcome)
        assert (answer.number, answer.open_requests) == (number, (KEY,))
    assert [hello.open_requests for hello in worker.hellos] == [(KEY,)] * 3
    assert worker.peers == (raw.me,), "a second Hello of the same life opens no second session"


async def test_the_link_takes_only_the_answer_to_its_last_hello(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    first, last = await raw.last_of_hellos(client)
    await raw.send(client.me, welcome(first.number), tokens(1))
    await raw.send(client.me, welcome(last.number + 100))
    await raw.send(client.me, welcome(last.number), tokens(2))
    await client.opened()
    await client.events.until(lambda: bool(client.received))
    assert [answer.number for answer in client.welcomes] == [last.number]
    assert client.received == [tokens(2)]
    assert client.events.count("open") == 1


async def test_an_answer_that_takes_longer_than_the_next_hello_still_opens_the_session(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 0.1)
    raw = net.raw_worker()
    client = net.client(raw.address)
    answers: list[asyncio.Task[None]] = []

    async def answer_late(peer: Incarnation, number: int) -> None:
        await asyncio.sleep(0.15)
        await raw.send(peer, welcome(number))

    async def answer_all() -> None:
        while True:
            peer, hello = await raw.expect(Hello)
            assert isinstance(hello, Hello)
            answers.append(asyncio.create_task(answer_late(peer, hello.number)))

    answering = asyncio.create_task(answer_all())
    try:
        await client.opened()
    except TimeoutError:
        pytest.fail(f"{len(answers)} Hellos were answered, each a little late, and the session never opened")
    finally:
        answering.cancel()
        await asyncio.gather(answering, *answers, return_exceptions=True)


async def test_a_fingerprint_mismatch_is_refused_with_both_values(net: Net) -> None:
    worker = net.worker()
    client = net.client(worker.address, fingerprint=OTHER)
    await client.events.until(lambda: bool(client.refusals))
    assert client.refusals[0].cause is Cause.FINGERPRINT
    for value in ("weights_hash", "weights-a", "weights-b"):
        assert value in client.refusals[0].message
    assert client.link.state is LinkState.REFUSED
    assert worker.peers == ()
    assert worker.hellos == [], "the handler heard of a client that was refused"


async def test_a_refused_client_asks_again_and_opens_at_a_fitting_successor(net: Net) -> None:
    misfit = net.worker(BRISK, OTHER)
    client = net.client(misfit.address, BRISK, FINGERPRINT)
    await client.events.until(lambda: bool(client.refusals))
    await misfit.stop()
    fitting = net.worker(BRISK, FINGERPRINT, misfit.port)
    await client.opened()
    assert client.workers == [fitting.me]
    assert client.events == ["refused", "open"], "a client that never had a session cannot lose one"


async def test_a_refused_client_keeps_asking_but_hears_of_it_once(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address, BRISK)
    refused = HelloRefused(cause=Cause.CAPACITY, message="full")
    for _ in range(3):
        peer, _ = await raw.expect(Hello)
        await raw.send(peer, refused)
    peer, last = await raw.expect(Hello)
    assert isinstance(last, Hello)
    assert client.events == ["refused"]
    await raw.send(peer, welcome(last.number))
    await client.opened()
    assert client.link.state is LinkState.OPEN


async def test_a_session_that_opened_after_a_refusal_is_not_greeted_again(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address, BRISK)
    peer, _ = await raw.expect(Hello)
    await raw.send(peer, HelloRefused(cause=Cause.CAPACITY, message="full"))
    await client.events.until(lambda: client.link.state is LinkState.REFUSED)
    await raw.accept(client)
    said = client.link._hellos
    await net.clock.looks(3)
    assert client.link._hellos == said
    assert client.events == ["refused", "open"]


async def test_a_refusal_in_a_session_ends_it(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    await raw.send(peer, heartbeat(1, 5))  # five were lost: the link greets again, and another worker answers
    await raw.expect(Hello)
    await raw.send(peer, HelloRefused(cause=Cause.FINGERPRINT, message="another"), me=new_incarnation())
    await client.events.until(lambda: bool(client.refusals))
    assert client.num_lost == 1, f"what was open at the worker is never given up: {client.events}"


async def test_a_message_before_hello_is_answered_by_hello_required(net: Net) -> None:
    worker = net.worker()
    raw = net.raw_client(worker.address)
    await raw.send(abort(1))
    await raw.expect(HelloRequired)
    assert worker.received == []
    assert worker.server.traffic.frames_refused == 1
    await raw.greet()
    await raw.send(abort(2))
    await worker.events.until(lambda: bool(worker.received))
    assert worker.received == [(raw.me, abort(2))]


async def test_a_link_that_is_told_to_greet_greets_and_goes_on(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    await raw.send(peer, HelloRequired(), HelloRequired(), HelloRequired())
    await raw.expect(Hello)
    await raw.accept(client)
    assert client.events == ["open", "resync"]


async def test_one_client_too_many_is_refused_and_comes_in_when_another_leaves(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_end, "MAX_SESSIONS", 2)
    worker = net.worker(BRISK)
    first, second = net.client(worker.address, BRISK), net.client(worker.address, BRISK)
    await first.opened()
    await second.opened()
    third = net.client(worker.address, BRISK)
    await third.events.until(lambda: bool(third.refusals))
    assert third.refusals[0].cause is Cause.CAPACITY
    assert set(worker.peers) == {first.me, second.me}
    await first.stop()
    await third.opened()
    assert set(worker.peers) == {second.me, third.me}
    assert second.events == ["open"]


# --- losses that only counting shows -----------------------------------------------------------------------------


async def test_a_client_that_received_fewer_than_were_sent_opens_again_exactly_once(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    await raw.send(peer, tokens(0), tokens(1))
    for number in range(1, 6):
        await raw.send(peer, heartbeat(number, 3))  # the third never came
    await raw.expect(Hello)
    await raw.send(peer, tokens(2), heartbeat(6, 99))  # sent before the worker had read that Hello
    await raw.accept(client)
    await raw.send(peer, tokens(2))
    for number in range(7, 10):
        await raw.send(peer, heartbeat(number, 1))
        await raw.expect(HeartbeatEcho)
    assert client.events.count("resync") == 1
    assert client.link.traffic.resyncs == 1
    assert client.num_lost == 0


async def test_heartbeats_that_agree_are_echoed_with_the_number_sent(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    client.link.send(abort(1))
    client.link.send(abort(2))
    await raw.expect(Abort)
    await raw.send(peer, heartbeat(41, 0))
    _, echo = await raw.expect(HeartbeatEcho)
    assert echo == HeartbeatEcho(number=41, sent=2)


async def test_a_worker_that_received_fewer_than_were_sent_asks_for_a_hello(net: Net) -> None:
    worker = net.worker()
    raw = net.raw_client(worker.address)
    await raw.greet()
    await raw.send(abort(1))
    await raw.send(HeartbeatEcho(number=1, sent=3))
    await raw.expect(HelloRequired)
    await raw.greet()
    await raw.send(abort(2), HeartbeatEcho(number=2, sent=1))
    await raw.send(HeartbeatEcho(number=3, sent=1), abort(3))
    await worker.events.until(lambda: len(worker.received) == 3)
    assert worker.events == ["hello", "Abort", "hello", "Abort", "Abort"], "a session that is opened again is not lost"
    assert worker.server.traffic.sessions_lost == 0


async def test_a_message_that_the_worker_never_got_leads_to_one_resync(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    client.link._sent += 1  # one that ZeroMQ dropped
    await client.events.until(lambda: "resync" in client.events)
    await client.beats(5)
    assert client.events == ["open", "resync"]
    assert worker.events == ["hello", "hello"]
    assert client.welcomes[1].open_requests == (KEY,)


async def test_a_gateway_that_missed_what_a_cache_holds_is_told_all_of_it(net: Net) -> None:
    worker, pool = net.worker(), BlockPool(4)

    def drop(peer: Incarnation, message: Message) -> None:
        worker.server._sessions[peer].sent += 1  # one that ZeroMQ dropped

    feed = CacheFeed(pool, worker.server.send)
    worker.on_open = lambda peer, role: feed.begin(peer)  # type: ignore[method-assign]
    client = await net.client(worker.address).opened()
    old, new, newest = block_hashes(range(4), 1), block_hashes(range(4, 7), 1), block_hashes(range(7, 8), 1)
    blocks = pool.allocate(4)
    pool.name(blocks, old)
    pool.release(blocks)
    feed.publish()
    feed._send = drop
    blocks = pool.allocate(3)  # evicts three
    pool.name(blocks, new)
    feed.publish()
    feed._send = worker.server.send
    await client.events.until(lambda: "resync" in client.events)
    pool.release(blocks)
    pool.name(pool.allocate(1), newest)
    feed.publish()
    await client.beats(5)
    index, life = PrefixIndex(), WorkerLife(worker.address, worker.me)
    for message in client.received:
        assert isinstance(message, CacheEvents)
        index.apply(life, message)
    assert client.events.count("resync") == 1
    held = set(pool.named())
    assert newest[0] in held
    for name in (*old, *new, *newest):
        assert (life in index.longest([name])) == (name in held)


async def test_a_message_that_the_client_never_got_leads_to_one_resync_and_what_waited_still_arrives(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    worker.server._sessions[client.me].sent += 1
    worker.server.send(client.me, tokens(1))
    client.link.send(abort(1))
    await client.events.until(lambda: "resync" in client.events)
    worker.server.send(client.me, tokens(2))
    client.link.send(abort(2))
    await client.beats(5)
    await worker.events.until(lambda: len(worker.received) == 2)
    assert client.events.count("resync") == 1
    assert client.received == [tokens(1), tokens(2)]


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speaks", [True, False], ids=["found out by speaking", "found out by silence"])
async def test_a_restart_under_the_same_address_is_a_loss_and_then_another_worker(net: Net, speaks: bool) -> None:
    old = net.worker()
    client = await net.client(old.address).opened()
    await old.stop(goodbye=False)
    new = net.worker(port=old.port)
    if not speaks:
        net.clock.now_s += PATIENT.timeout_s + 0.1
    while speaks and not client.num_lost:
        client.link.send(abort(1))  # again, since the first may be written to the connection that has just gone
        await asyncio.sleep(PATIENT.interval_s)
    await client.opened(2)
    assert client.workers == [old.me, new.me]
    assert client.link.traffic.sessions_lost == 1
    assert client.events[0] == client.events[-1] == "open"
    assert new.received == [], "a message to the old life reached the new one"
    assert not speaks or client.crashes == [True]


async def test_a_silent_worker_is_lost_after_the_timeout_and_not_before(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    await raw.accept(client)
    net.clock.now_s += PATIENT.timeout_s
    await net.clock.looks(3)
    assert client.events == ["open"]
    net.clock.now_s += 0.1
    await client.events.until(lambda: client.num_lost > 0)
    client.link.send(abort(1))
    later = await raw.up_to_hello(client.link._hellos + 1)
    assert not any(isinstance(message, Abort) for message in later)
    assert (client.link.traffic.sessions_lost, client.crashes) == (1, [False])


async def test_an_open_link_looks_for_silence_when_there_may_be_some_and_no_sooner(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats alone wake an idle process: an idle gateway has a link to each worker."""
    client = await net.client(net.worker().address).opened()
    await client.beats(2)
    slept: list[float] = []

    async def noted(seconds: float, pulse: Pulse, until: asyncio.Event | None = None) -> float:
        slept.append(seconds)
        return await ends.sleep(seconds, pulse, until)

    monkeypatch.setattr(client_end, "sleep", noted)
    client.link._greets.set()  # it looks, and sleeps again
    await client.beats(10)
    assert slept == [pytest.approx(PATIENT.timeout_s, abs=1e-9)]


async def test_a_silent_client_is_lost_after_the_timeout_and_a_talking_one_is_not(net: Net) -> None:
    worker = net.worker()
    talking = await net.client(worker.address).opened()
    raw = net.raw_client(worker.address)
    await raw.greet()
    net.clock.now_s += PATIENT.timeout_s
    talking.link.send(abort(1))
    await worker.events.until(lambda: bool(worker.received))
    await talking.beats(1)
    await worker.beats(2)
    assert set(worker.peers) == {talking.me, raw.me}
    net.clock.now_s += 0.1
    await worker.events.until(lambda: f"lost {raw.me}" in worker.events)
    assert worker.peers == (talking.me,)
    assert worker.server.traffic.sessions_lost == 1
    worker.server.send(raw.me, tokens(1))  # inert
    await raw.send(abort(1))
    await raw.expect(HelloRequired)
    assert talking.events == ["open"]


async def test_a_client_that_leaves_says_goodbye(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    await client.stop()
    await worker.events.until(lambda: f"lost {client.me}" in worker.events)
    assert worker.peers == ()
    assert worker.server.traffic.sessions_lost == 0
    assert client.link.state is LinkState.CLOSED
    client.link.send(abort(1))


async def test_a_worker_that_leaves_says_goodbye(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    await worker.stop()
    await client.events.until(lambda: client.num_lost > 0)
    assert (client.events, client.crashes) == (["open", "lost: said goodbye"], [False])


async def test_a_goodbye_is_not_counted_as_a_loss(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    await raw.send(peer, tokens(1), Goodbye(), tokens(2))
    await client.events.until(lambda: client.num_lost > 0)
    assert client.events == ["open", "Tokens", "lost: said goodbye"]
    await raw.expect(Hello)
    assert client.link.traffic.sessions_lost == 0


async def test_a_worker_can_leave_while_more_than_a_frame_is_unsent(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    worker._serving.cancel()
    await asyncio.wait([worker._serving])
    for position in range(MAX_MESSAGES_PER_FRAME + 5):
        worker.server.send(client.me, tokens(position))
    await worker.server.close()
    worker._open = False


# --- frames that should not be -----------------------------------------------------------------------------------


async def test_a_worker_counts_and_survives_frames_that_are_not_frames(net: Net) -> None:
    worker = net.worker()
    bystander = await net.client(worker.address).opened()
    raw = net.raw_client(worker.address)
    await raw.greet()
    good = encode(raw.me, [abort(1)])
    bad = [
        [b""],
        [b"\xc1"],
        [good[:-1]],
        [good + b"\0"],
        [b"\x81" * 5000],
        [b"\x91" * 100_000],
        [b"", good],
        [good, good],
        [encode(raw.me, [abort(1)]).replace(b"Abort", b"Abwrt")],
        [encode(new_incarnation(), [abort(1)])],
        [encode(bystander.me, [Goodbye()])],
        [encode(Incarnation(raw.me + "x"), [abort(1)])],
        [encode(Incarnation(""), [abort(1)])],
    ]
    for parts in bad:
        await raw.send_parts(parts)
    await raw.send(abort(2))
    await worker.events.until(lambda: bool(worker.received))
    assert worker.received == [(raw.me, abort(2))]
    assert worker.server.traffic.frames_refused == len(bad)
    assert set(worker.peers) == {bystander.me, raw.me}
    assert bystander.events == ["open"]


async def test_a_frame_beyond_the_bound_harms_nobody_else(net: Net) -> None:
    worker = net.worker()
    bystander = await net.client(worker.address).opened()
    raw = net.raw_client(worker.address)
    await raw.greet()
    await raw.send_parts([b"\0" * (MAX_FRAME_BYTES + 1)])
    await bystander.beats(3)
    await raw.greet()
    await raw.send(abort(2))
    await worker.events.until(lambda: bool(worker.received))
    assert worker.received == [(raw.me, abort(2))]
    assert bystander.events == ["open"]


async def test_a_link_counts_and_survives_frames_that_are_not_frames(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    for frame in (b"", b"\xc1", encode(raw.me, [tokens(0)])[:-1]):
        await raw.send_bytes(peer, frame)
    await raw.send(peer, tokens(0), me=new_incarnation())
    await raw.send(peer, Goodbye(), me=new_incarnation())
    await raw.send(peer, tokens(1))
    await client.events.until(lambda: bool(client.received))
    assert client.received == [tokens(1)]
    assert client.link.traffic.frames_refused == 5
    assert client.events == ["open", "Tokens"]


@pytest.mark.parametrize("kind", ["good", "garbage"])
async def test_a_peer_that_never_stops_sending_does_not_silence_the_worker(net: Net, kind: str) -> None:
    """Every turn of this task sends more frames than the server takes until the next, so frames lie queued for it.

    A frame that the server must wait for comes at least one turn without a frame after the frame before it. Two turns
    in a row with a frame therefore mean that the second lay ready: that is when the server might go on by itself.
    """
    worker = net.worker()
    bystander = await net.client(worker.address).opened()
    flooder = net.raw_client(worker.address)
    await flooder.greet()
    num_ready = taken_before = 0
    async with asyncio.timeout(WAIT_S):
        while num_ready < 300:
            frame = encode(flooder.me, [abort(1)]) if kind == "good" else b"garbage"
            flooder.send_all_that_fit([frame] * 20)
            num_received = len(worker.received) + worker.server.traffic.frames_refused
            await asyncio.sleep(0)
            taken = len(worker.received) + worker.server.traffic.frames_refused - num_received
            assert taken <= MAX_FRAMES_PER_TURN, f"{taken} frames came in while another task waited for its turn"
            num_ready += bool(taken and taken_before)
            taken_before = taken
    assert bystander.events == ["open"]


class Ticks:
    """Counts the turns that another task has."""

    def __init__(self) -> None:
        self.now = 0
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._counting.cancel()
        await asyncio.wait([self._counting])


@pytest.mark.parametrize("to_the_worker", [True, False], ids=["to a worker", "to a client"])
async def test_others_have_a_turn_between_two_large_messages_of_a_frame(net: Net, to_the_worker: bool) -> None:
    """And many small ones are handled at once: a turn for each would cost more than the message."""
    worker = net.worker()
    client = await net.client(worker.address).opened()
    ticks, seen = Ticks(), []
    large = [replace(tokens(position), token_ids=(1,) * 2048) for position in range(30)]
    small = [tokens(position) for position in range(30)]
    assert [encode_some(worker.me, messages)[1] for messages in (large, small)] == [30, 30]
    if to_the_worker:
        worker.on_message = lambda peer, message: seen.append(ticks.now)  # type: ignore[method-assign]
        send = client.link.send
    else:
        client.on_message = lambda link, message: (  # type: ignore[method-assign]
            seen.append(ticks.now) if isinstance(message, Tokens) else None
        )
        send = partial(worker.server.send, client.me)
    for messages, most_at_once in ((large, 65_536 // 8192 + 1), (small, 30)):
        seen.clear()
        for message in messages:
            send(message)
        async with asyncio.timeout(WAIT_S):
            while len(seen) < len(messages):
                await asyncio.sleep(0)
        assert max(Counter(seen).values()) <= most_at_once
        assert messages is large or len(set(seen)) == 1
    await ticks.stop()


@pytest.mark.parametrize("to_the_worker", [True, False], ids=["by a client", "by a worker"])
async def test_others_have_a_turn_between_two_frames_that_are_sent(
    net: Net, monkeypatch: pytest.MonkeyPatch, to_the_worker: bool
) -> None:
    """A frame of a million tokens takes long to encode: eight in one turn, and nobody hears a heartbeat."""
    worker = net.worker()
    client = await net.client(worker.address).opened()
    ticks, encoded_at = Ticks(), []

    def encode_one(sender: Incarnation, messages: Iterable[Message]) -> tuple[bytes, int]:
        encoded_at.append(ticks.now)
        return codec.encode_some(sender, messages)

    monkeypatch.setattr(codec, "GATHERED_FRAME_BYTES", 400)
    monkeypatch.setattr(ends, "encode_some", encode_one)
    for position in range(30):
        if to_the_worker:
            client.link.send(abort(position + 1))
        else:
            worker.server.send(client.me, tokens(position))
    received = worker.received if to_the_worker else client.received
    async with asyncio.timeout(WAIT_S):
        while len(received) < 30:
            await asyncio.sleep(0)
    assert len(encoded_at) > 2
    assert len(set(encoded_at)) == len(encoded_at)
    await ticks.stop()


async def test_a_heartbeat_is_made_once_for_all_clients(net: Net) -> None:
    """It counts everything that the worker has; with a thousand clients that would be most of what it does."""
    worker = net.worker()
    clients = [await net.client(worker.address).opened() for _ in range(3)]
    made: list[int] = []
    make = worker.heartbeat

    def counting(number: int) -> Heartbeat:
        made.append(number)
        return make(number)

    worker.heartbeat = counting  # type: ignore[method-assign]
    worker.server.send(clients[0].me, tokens(1))
    for client in clients:
        await client.beats(4)
    assert len(made) == len(set(made))
    assert len(made) >= 4
    assert all("resync" not in client.events for client in clients), "each has counts of its own"


def steps_between(numbers: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(numbers)]


async def test_a_worker_that_exchanges_nothing_tells_every_second_heartbeat_and_the_next_message_ends_that(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_a_message(seconds: float, pulse: Pulse, until: asyncio.Event | None = None) -> float:
        return await ends.sleep(seconds if until is None or not held else 3600, pulse, until)

    held = False
    monkeypatch.setattr(server_end, "sleep", until_a_message)
    worker = net.worker()
    client = await net.client(worker.address).opened()
    numbers: list[int] = []
    make = worker.heartbeat

    def noting(number: int) -> Heartbeat:
        numbers.append(number)
        return make(number)

    worker.heartbeat = noting  # type: ignore[method-assign]
    await worker.events.until(lambda: steps_between(numbers)[-3:] == [2, 2, 2])
    held = True  # from the next one on, time alone brings no heartbeat
    await worker.beats(2)
    del numbers[:]
    client.link.send(abort(1))
    await worker.events.until(lambda: len(numbers) >= 9)
    assert steps_between(numbers) == [1] * 8
    assert client.events == ["open"]


async def test_where_the_timeout_is_short_no_heartbeat_is_left_out(net: Net) -> None:
    worker = net.worker(pulse=Pulse(interval_s=0.02, timeout_s=0.11))
    await net.client(worker.address, pulse=Pulse(interval_s=0.02, timeout_s=0.11)).opened()
    first = worker.beat
    numbers: list[int] = []
    make = worker.heartbeat

    def noting(number: int) -> Heartbeat:
        numbers.append(number)
        return make(number)

    worker.heartbeat = noting  # type: ignore[method-assign]
    await worker.events.until(lambda: worker.beat > first + 15)
    assert set(steps_between(numbers)) == {1}


# --- order, bursts, backpressure ---------------------------------------------------------------------------------


async def test_thousands_of_messages_in_one_tick_arrive_in_order_both_ways(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    count = 2 * MAX_MESSAGES_PER_FRAME + 17
    for number in range(1, count + 1):
        client.link.send(abort(number))
        worker.server.send(client.me, tokens(number))
    await worker.events.until(lambda: len(worker.received) >= count)
    await client.events.until(lambda: len(client.received) >= count)
    assert [message for _, message in worker.received] == [abort(number) for number in range(1, count + 1)]
    assert client.received == [tokens(number) for number in range(1, count + 1)]
    await client.beats(3)
    assert "resync" not in client.events, "the counts went wrong when the burst was cut into frames"


async def test_a_link_knows_what_work_has_not_left(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    for number in (1, 2):
        client.link.send(prefill(number))
    client.link.send(abort(3))
    assert client.link.unsent_work == {prefill(1).key, prefill(2).key}
    await worker.events.until(lambda: len(worker.received) == 3)
    assert client.link.unsent_work == frozenset()


async def test_messages_over_many_ticks_keep_their_order(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    for number in range(1, 301):
        client.link.send(abort(number))
        if number % 7 == 0:
            await asyncio.sleep(0)
        if number % 100 == 0:
            client.link._resync(worker.me)  # a Hello in between
    await worker.events.until(lambda: len(worker.received) >= 300)
    assert [message for _, message in worker.received] == [abort(number) for number in range(1, 301)]


async def test_a_peer_that_stops_reading_is_lost_alone(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "MAX_OUTBOX_MESSAGES", 100)
    worker = net.worker()
    reader = await net.client(worker.address).opened()
    raw = net.raw_client(worker.address, receive_hwm=1)
    await raw.greet()
    message = Failed(request=RequestId("r"), attempt=1, cause=Cause.INTERNAL, message="x" * 4000)
    sent = 0
    while raw.me in worker.peers:
        worker.server.send(raw.me, message)
        if sent % 100 == 0:
            worker.server.send(reader.me, tokens(sent))
        sent += 1
        assert sent < 50_000, "a peer that reads nothing is sent everything"
        await asyncio.sleep(0)
    assert sent > 200, "it was lost before it could have stopped reading"
    assert f"lost {raw.me}" in worker.events
    assert worker.server.traffic.sessions_lost == 1
    await reader.beats(2)
    assert reader.received == [tokens(number) for number in range(0, sent, 100)]
    assert reader.events.count("open") == 1
    assert reader.num_lost == 0


async def test_a_burst_that_waits_for_a_slow_reader_is_delivered_whole(net: Net) -> None:
    worker = net.worker()
    raw = net.raw_client(worker.address, receive_hwm=1)
    await raw.greet()
    count = 4000
    for position in range(count):
        text = f"{position:04d}" + "x" * 4000
        worker.server.send(raw.me, Failed(request=RequestId("r"), attempt=1, cause=Cause.INTERNAL, message=text))
        await asyncio.sleep(0)
    assert worker.server._sessions[raw.me].outbox, "the reader was not slow: the test shows nothing"
    for position in range(count):
        message = await raw.expect(Failed)
        assert isinstance(message, Failed)
        assert message.message.startswith(f"{position:04d}")


async def test_a_peer_that_stops_reading_delays_nobody(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the pause before it is tried again, what others are sent leaves at once."""
    monkeypatch.setattr(server_end, "BACKPRESSURE_RETRY_S", 3600.0)
    worker = net.worker(pulse=Pulse(interval_s=600, timeout_s=3600))
    reader = await net.client(worker.address, pulse=Pulse(interval_s=600, timeout_s=3600)).opened()
    raw = net.raw_client(worker.address, receive_hwm=1)
    await raw.greet()
    message = Failed(request=RequestId("r"), attempt=1, cause=Cause.INTERNAL, message="x" * 4000)
    sent = 0
    while not worker.server._sessions[raw.me].outbox:
        worker.server.send(raw.me, message)
        sent += 1
        assert sent < 50_000, "a peer that reads nothing is sent everything"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    worker.server.send(reader.me, tokens(1))
    await reader.events.until(lambda: reader.received == [tokens(1)])


async def test_a_peer_that_stops_reading_costs_nothing_while_it_is_waited_for(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is encoded once, not at every try: with thousands waiting, a try would hold up the loop."""
    worker = net.worker()
    raw = net.raw_client(worker.address, receive_hwm=1)
    await raw.greet()
    encoded = 0

    def counting(sender: Incarnation, messages: Iterable[Message]) -> tuple[bytes, int]:
        nonlocal encoded
        frame, count = codec.encode_some(sender, messages)
        encoded += count
        return frame, count

    monkeypatch.setattr(ends, "encode_some", counting)
    message = Failed(request=RequestId("r"), attempt=1, cause=Cause.INTERNAL, message="x" * 4000)
    outbox = worker.server._sessions[raw.me].outbox
    sent = 0
    while len(outbox) <= 1000:
        worker.server.send(raw.me, message)
        sent += 1
        assert sent < 50_000, "a peer that reads nothing is sent everything"
        await asyncio.sleep(0)
    encoded = 0
    await asyncio.sleep(30 * ends.BACKPRESSURE_RETRY_S)
    assert len(outbox) > 1000, "the peer has read: the test shows nothing"
    assert encoded <= 2 * len(outbox)


# --- what is large, and what cannot travel ---------------------------------------------------------------------------

BEYOND_64_BITS = abort(2**70)
"""Not a valid message: a bug of the sender."""


async def test_what_is_too_much_for_one_frame_goes_into_several(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "GATHERED_FRAME_BYTES", 20_000)
    worker = net.worker()
    client = await net.client(worker.address).opened()
    texts = [f"{number:4000}" for number in range(40)]
    many = [Failed(request=RequestId("r"), attempt=1, cause=Cause.INTERNAL, message=text) for text in texts]
    for message in many:
        client.link.send(message)
        worker.server.send(client.me, message)
    await worker.events.until(lambda: len(worker.received) >= len(many))
    await client.events.until(lambda: len(client.received) >= len(many))
    assert [message for _, message in worker.received] == many
    assert client.received == many
    await client.beats(2)
    assert "resync" not in client.events


async def test_what_cannot_travel_to_one_client_keeps_no_other_waiting(net: Net) -> None:
    worker = net.worker()
    first, second = await net.client(worker.address).opened(), await net.client(worker.address).opened()
    with contextlib.suppress(ProtocolError):
        worker.server.send(first.me, BEYOND_64_BITS)
    worker.server.send(first.me, tokens(1))
    worker.server.send(second.me, tokens(2))
    await second.events.until(lambda: second.received == [tokens(2)])
    await worker.events.until(lambda: f"lost {first.me}" in worker.events or first.received == [tokens(1)])


async def test_what_cannot_travel_to_the_worker_does_not_end_the_link_silently(net: Net) -> None:
    """It is refused where it is sent, or left out, or ends the session; never are the next messages stuck behind it."""
    worker = net.worker()
    client = await net.client(worker.address).opened()
    with contextlib.suppress(ProtocolError):
        client.link.send(BEYOND_64_BITS)
    client.link.send(abort(1))
    either = asyncio.Event()
    for events in (worker.events, client.events):
        events._changed = either
    async with asyncio.timeout(WAIT_S):
        while not client.num_lost and (client.me, abort(1)) not in worker.received:
            either.clear()
            await either.wait()


# --- binding -------------------------------------------------------------------------------------------------------


async def test_an_occupied_port_is_the_operators_to_change(net: Net) -> None:
    worker = net.worker()
    second = ControlServer(new_incarnation(), HeldClock(), PATIENT)
    try:
        with pytest.raises(OperatorError, match=str(worker.port)):
            second.bind("127.0.0.1", worker.port)
    finally:
        await second.close()


async def test_a_host_that_is_not_here_is_the_operators_to_change() -> None:
    server = ControlServer(new_incarnation(), HeldClock(), PATIENT)
    try:
        with pytest.raises(OperatorError, match=r"203\.0\.113\.7"):
            server.bind("203.0.113.7", 0)
    finally:
        await server.close()
