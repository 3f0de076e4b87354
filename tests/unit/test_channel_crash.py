"""How a link tells a worker that has died from one that is silent, deaf, or only badly connected.

The pulses are such that no timeout can be meant: what is found out is found out from the connection, or by counting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common.contract.codec import decode, encode
from common.contract.ids import Handle, Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages import (
    Abort,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    Message,
    Phase,
    Role,
    StepTokens,
    Tokens,
    Welcome,
)
from common.runtime.channel import ControlClient, ControlServer, LinkState, ends
from common.runtime.clock import Clock, Pulse

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
WELCOME = Welcome(
    role=Role.DECODE,
    fingerprint=Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT),
    max_sequence_tokens=1,
    transport="zmq",
    transport_metadata=b"",
    open_requests=(),
)
ENDLESS = Pulse(interval_s=0.02, timeout_s=1e6)
BRISK = Pulse(interval_s=0.02, timeout_s=0.4)
DEAF_BEATS = 14
"""More heartbeats than this without an echo, by `BRISK`."""
WAIT_S = 20
"""After this a test hangs; no test asks how long anything took."""


def heartbeat(number: int, *, echoed: int) -> Heartbeat:
    load: dict[str, Any] = dict.fromkeys(("steps", "running", "waiting", "blocks_used", "blocks_total"), 0)
    return Heartbeat(number=number, sent=0, **load, phase=Phase.SERVING, echoed=echoed)


class Changes:
    """Wakes whoever waits for something to be so."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


def tokens(position: int) -> Tokens:
    return Tokens(request=RequestId("r"), attempt=1, choice=0, position=position, token_ids=(1,))


class Worker:
    """A real server. Its time can be told by its heartbeats, so that neither side can be lost by surprise."""

    def __init__(self, clock: Clock, pulse: Pulse, port: int = 0) -> None:
        self.me = new_incarnation()
        self.changes = Changes()
        self.hellos: list[Hello] = []
        self.received: list[Message] = []
        self.lost: list[Incarnation] = []
        self.beat = 0
        self.server = ControlServer(self.me, clock, pulse)
        self.port = self.server.bind("127.0.0.1", port)
        self._serving = asyncio.create_task(self.server.run(self))
        self._open = True

    def welcome(self) -> Welcome:
        return WELCOME

    def on_open(self, peer: Incarnation, role: Role) -> None: ...

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        self.hellos.append(hello)
        self.changes.tell()
        return ()

    def on_message(self, peer: Incarnation, message: Message) -> None:
        self.received.append(message)
        self.changes.tell()

    def on_peer_lost(self, peer: Incarnation) -> None:
        self.lost.append(peer)
        self.changes.tell()

    def heartbeat(self, number: int) -> Heartbeat:
        self.beat = number
        self.changes.tell()
        return heartbeat(number, echoed=0)

    async def beats(self, more: int) -> None:
        wanted = self.beat + more
        await self.changes.until(lambda: self.beat >= wanted)

    async def die(self) -> None:
        """As if killed: nobody is told, and its connections break."""
        self.server._sessions.clear()
        await self.stop()

    async def stop(self) -> None:
        if self._open:
            self._open = False
            self._serving.cancel()
            await asyncio.wait([self._serving])
            await self.server.close()


class Client:
    """A real link; what its handler saw."""

    def __init__(self, port: int, clock: Clock, pulse: Pulse) -> None:
        self.me = new_incarnation()
        self.changes = Changes()
        self.opened: list[Incarnation | None] = []
        self.resyncs = 0
        self.beats = 0
        self.received: list[Message] = []
        self.losses: list[tuple[str, bool]] = []
        """(why, whether it looked like a crash)."""
        self.context = zmq.asyncio.Context()
        self.link = ControlClient(self.context, f"127.0.0.1:{port}", self.me, self, clock, pulse)
        self.linking = asyncio.create_task(self.link.run())

    async def has_resynced(self, times: int) -> None:
        await self.changes.until(lambda: self.resyncs == times)

    async def has_heard(self, beats: int) -> None:
        """So many heartbeats, unless the worker is lost before."""
        await self.changes.until(lambda: self.beats == beats or bool(self.losses))

    def hello(self, link: ControlClient) -> Hello:
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=())

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        self.opened.append(link.worker)
        self.changes.tell()

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        self.resyncs += 1
        self.changes.tell()

    def on_message(self, link: ControlClient, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self.beats += 1
        else:
            self.received.append(message)
        self.changes.tell()

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        self.losses.append((why, crashed))
        self.changes.tell()

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        raise AssertionError(refused)

    async def is_open(self) -> None:
        await self.changes.until(lambda: self.link.state is LinkState.OPEN)

    async def hears(self, more: int) -> None:
        wanted = self.beats + more
        await self.changes.until(lambda: self.beats >= wanted)

    async def breaks(self) -> None:
        """The link has seen its connection break."""
        async with asyncio.timeout(WAIT_S):
            while not self.link._disconnected:
                await asyncio.sleep(0.001)

    async def lost(self) -> tuple[str, bool]:
        await self.changes.until(lambda: bool(self.losses))
        return self.losses[0]

    async def stop(self) -> None:
        self.linking.cancel()
        await asyncio.wait([self.linking])
        self.context.destroy(linger=0)


class Proxy:
    """TCP between a client and a worker: connections that break, and directions in which nothing arrives."""

    def __init__(self, to_port: int) -> None:
        self.to_port = to_port
        self.deaf = False
        """What the client sends does not arrive."""
        self.num_connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.to_port)
        self.num_connections += 1
        self._writers += [writer, their_writer]
        for task in (
            asyncio.create_task(self._copy(reader, their_writer, from_client=True)),
            asyncio.create_task(self._copy(their_reader, writer, from_client=False)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool) -> None:
        try:
            while data := await reader.read(65536):
                if not (from_client and self.deaf):
                    writer.write(data)
        except OSError:
            pass

    def break_connections(self) -> None:
        """Reset every connection; new ones are served as before."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.break_connections()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Net:
    """Everything that a test has open."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._open: list[Worker | Client | Proxy] = []

    def worker(self, pulse: Pulse = ENDLESS, port: int = 0, clock: Clock | None = None) -> Worker:
        self._open.append(worker := Worker(clock or (lambda: self.now_s), pulse, port))
        return worker

    async def client(self, port: int, pulse: Pulse = ENDLESS, clock: Clock | None = None) -> Client:
        self._open.append(client := Client(port, clock or (lambda: self.now_s), pulse))
        await client.is_open()
        return client

    async def proxy(self, worker: Worker) -> tuple[Proxy, int]:
        self._open.append(proxy := Proxy(worker.port))
        return proxy, await proxy.start()

    async def close(self) -> None:
        for each in sorted(self._open, key=lambda each: not isinstance(each, Client)):
            await (each.close() if isinstance(each, Proxy) else each.stop())


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    subject = Net()
    yield subject
    await subject.close()


# --- the connection breaks ---------------------------------------------------------------------------------------


async def test_a_worker_that_dies_is_lost_without_any_timeout(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.port)
    await client.hears(2)
    await worker.die()
    assert await client.lost() == ("its connection broke, and nobody answers", True)
    assert net.now_s == 0.0, "no silence was waited for"
    assert client.link.traffic.sessions_lost == 1


async def test_another_worker_at_the_address_shows_that_the_first_has_crashed(net: Net) -> None:
    old = net.worker()
    client = await net.client(old.port)
    await old.die()
    await client.breaks()
    client.link.send(Abort(request=RequestId("r"), attempt=1))
    new = net.worker(port=old.port)
    assert await client.lost() == ("restarted", True)
    await client.changes.until(lambda: len(client.opened) == 2)
    assert client.opened == [old.me, new.me]
    await client.hears(2)
    assert new.received == [], "what was meant for the old one must not reach the new one"
    assert len(client.losses) == 1


async def test_a_worker_that_says_goodbye_has_not_crashed(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.port)
    await worker.stop()
    assert await client.lost() == ("said goodbye", False)
    await asyncio.sleep(2 * ends.RECONNECT_S)  # whatever its connection's end leads to, has been
    assert len(client.losses) == 1
    assert client.link.traffic.sessions_lost == 0


async def test_a_connection_that_comes_back_is_no_loss(net: Net) -> None:
    worker = net.worker()
    proxy, port = await net.proxy(worker)
    client = await net.client(port)
    proxy.break_connections()
    await client.breaks()
    client.link.send(Abort(request=RequestId("r"), attempt=7))
    await client.changes.until(lambda: client.resyncs == 1)
    await worker.changes.until(lambda: bool(worker.received))
    assert worker.received == [Abort(request=RequestId("r"), attempt=7)], "it waits for the new connection"
    await asyncio.sleep(2 * ends.RECONNECT_S)
    await client.hears(3)
    assert (client.losses, client.opened, proxy.num_connections) == ([], [worker.me], 2)
    assert client.resyncs == 1, "the counts went wrong when the session was opened again"


async def test_a_connection_that_breaks_while_tokens_flow_keeps_its_session(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no way for a moment waits for the client's Hello, which says what is missing."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    proxy, port = await net.proxy(worker)
    client = await net.client(port)
    session = worker.server._sessions[client.me]
    await client.hears(1)
    last = 0
    proxy.deaf = True  # so that it is not mended before a token finds no way
    proxy.break_connections()
    async with asyncio.timeout(WAIT_S):
        while not session.broken:
            last += 1
            worker.server.send(client.me, tokens(last))
            await asyncio.sleep(0)
    for _ in range(3):
        last += 1
        worker.server.send(client.me, tokens(last))
    proxy.deaf = False
    proxy.break_connections()
    await client.changes.until(lambda: tokens(last) in client.received)
    await client.hears(3)
    positions = [message.position for message in client.received if isinstance(message, Tokens)]
    first = positions[0]
    assert positions == list(range(first, last + 1)), "what waited arrives in order and once"
    assert (client.losses, client.resyncs, client.opened) == ([], 1, [worker.me])
    assert (worker.lost, worker.server.traffic.sessions_lost) == ([], 0)


async def test_a_client_whose_connection_breaks_and_that_stays_away_is_lost(net: Net) -> None:
    """It may have died: what it had is free long before its silence would show it."""
    worker = net.worker()
    context = zmq.asyncio.Context()
    raw, me = context.socket(zmq.DEALER), new_incarnation()
    try:
        raw.setsockopt(zmq.IDENTITY, me.encode())
        raw.connect(f"tcp://127.0.0.1:{worker.port}")
        await raw.send(encode(me, [Hello(role=Role.GATEWAY, fingerprint=None, open_requests=())]))
        await worker.changes.until(lambda: me in worker.server.peers)
    finally:
        context.destroy(linger=0)
    async with asyncio.timeout(WAIT_S):
        while not worker.lost:
            worker.server.send(me, tokens(1))
            await asyncio.sleep(0.001)
    assert (worker.lost, worker.server.peers, worker.server.traffic.sessions_lost) == ([me], (), 1)
    assert net.now_s == 0.0, "no silence was waited for"


@pytest.mark.parametrize("columns", [False, True])
async def test_what_waits_for_a_broken_connection_is_bounded(
    net: Net, monkeypatch: pytest.MonkeyPatch, columns: bool
) -> None:
    """A hundred messages, or steps of as many tokens."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    monkeypatch.setattr(ends, "MAX_OUTBOX_MESSAGES", 100)
    worker = net.worker()
    proxy, port = await net.proxy(worker)
    client = await net.client(port)
    proxy.deaf = True
    proxy.break_connections()
    session = worker.server._sessions[client.me]
    async with asyncio.timeout(WAIT_S):
        while not session.broken:
            worker.server.send(client.me, tokens(1))
            await asyncio.sleep(0)
    left = 100 - len(session.outbox)
    step = StepTokens(handles=(Handle(1),) * left, positions=(1,) * left, token_ids=(1,) * left)
    for message in [step] if columns else [tokens(1)] * left:
        worker.server.send(client.me, message)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (worker.lost, session.outbox.overfull) == ([], False)
    worker.server.send(client.me, tokens(1))
    await worker.changes.until(lambda: worker.lost == [client.me])


async def test_each_break_is_judged_by_itself(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an earlier one, which was mended, must not run out on the next."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    proxy, port = await net.proxy(worker)
    client = await net.client(port)
    for number in (1, 2):
        proxy.break_connections()
        await client.has_resynced(number)
    proxy.deaf = True
    proxy.break_connections()
    await client.breaks()
    client.link._judge_connection(1)
    client.link._judge_connection(2)
    assert client.losses == [], "the third break has its own time"
    client.link._judge_connection(3)
    assert client.losses == [("its connection broke, and nobody answers", True)]


async def test_a_client_that_never_had_a_session_has_no_crash_to_tell(net: Net) -> None:
    worker = net.worker()
    proxy, port = await net.proxy(worker)
    proxy.deaf = True
    net._open.append(client := Client(port, lambda: net.now_s, ENDLESS))
    async with asyncio.timeout(WAIT_S):
        while not proxy.num_connections:
            await asyncio.sleep(0.01)
    proxy.break_connections()
    await asyncio.sleep(2 * ends.RECONNECT_S)
    assert client.losses == []
    proxy.deaf = False
    proxy.break_connections()  # what was lost on the connection that there is does not come again
    await client.is_open()


async def test_a_closed_link_leaves_no_socket_behind(net: Net) -> None:
    """A sink opens and closes one for each source that it loses."""
    worker = net.worker()
    client = await net.client(worker.port)
    client.linking.cancel()
    await asyncio.wait([client.linking])
    assert client.link._socket.closed
    assert client.link._monitor.closed


# --- a process that stands still itself ---------------------------------------------------------------------------


async def test_nobody_is_judged_silent_for_the_time_in_which_this_process_stood_still(net: Net) -> None:
    """What the others have said meanwhile lies unread; here it is not even said, as both ends share the loop."""
    worker = net.worker(BRISK, clock=time.monotonic)
    client = await net.client(worker.port, BRISK, clock=time.monotonic)
    for _ in range(3):
        await client.hears(2)
        time.sleep(3 * BRISK.timeout_s)
    await client.hears(3)
    assert (client.losses, worker.lost, client.resyncs) == ([], [], 0)


async def test_a_connection_is_not_judged_right_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be there, unread."""
    judged = asyncio.Event()
    monkeypatch.setattr(ends, "RECONNECT_S", 0.05)
    ends.after_reconnect_time(BRISK, judged.set)
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    time.sleep(0.05 + BRISK.timeout_s)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not judged.is_set()
    monkeypatch.setattr(ends, "RECONNECT_S", 0.0)
    ends.after_reconnect_time(ENDLESS, judged.set)
    async with asyncio.timeout(WAIT_S):
        await judged.wait()


# --- a worker that does not hear us ------------------------------------------------------------------------------


async def test_a_worker_that_hears_nothing_is_lost_before_the_timeout(net: Net) -> None:
    """By the time that its heartbeats tell: whoever is too slow here is slow in both directions."""
    worker = net.worker(BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    proxy, port = await net.proxy(worker)
    client = await net.client(port, BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    await client.hears(5)
    proxy.deaf = True
    cut_at = worker.beat
    assert await client.lost() == ("it does not hear what is sent to it", False)
    assert (worker.beat - cut_at) * BRISK.interval_s < BRISK.timeout_s
    assert worker.server.traffic.sessions_lost == 0, "the worker had not given the client up yet"


async def test_a_worker_that_hears_is_not_taken_for_deaf(net: Net) -> None:
    worker = net.worker(BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    client = await net.client(worker.port, BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    await client.hears(4 * DEAF_BEATS)
    assert client.losses == []


class PlayedWorker:
    """A ROUTER whose every frame the test decides."""

    def __init__(self) -> None:
        self.me = new_incarnation()
        self.context = zmq.asyncio.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    async def expect(self, kind: type[Message]) -> tuple[Incarnation, Message]:
        async with asyncio.timeout(WAIT_S):
            while True:
                _, frame = await self._socket.recv_multipart()
                sender, messages = decode(frame)
                for message in messages:
                    if isinstance(message, kind):
                        return sender, message

    async def send(self, peer: Incarnation, *messages: Message) -> None:
        await self._socket.send_multipart([peer.encode(), encode(self.me, messages)])

    def send_soon(self, peer: Incarnation, *messages: Message) -> None:
        """Without a turn of the event loop."""
        self._socket.send_multipart([peer.encode(), encode(self.me, messages)])


@pytest.fixture
async def played(net: Net) -> AsyncIterator[tuple[PlayedWorker, Client]]:
    """A worker that the test plays, and a link that is open; nothing happens but by the test."""
    worker = PlayedWorker()
    pulse = Pulse(interval_s=0.25, timeout_s=1.5)
    net._open.append(client := Client(worker.port, lambda: net.now_s, pulse))
    while client.link.state is not LinkState.OPEN:
        peer, hello = await worker.expect(Hello)
        assert isinstance(hello, Hello)
        await worker.send(
            peer, Welcome(**{n: getattr(WELCOME, n) for n in WELCOME.__slots__} | {"number": hello.number})
        )
        await asyncio.sleep(0.05)
    yield worker, client
    worker.context.destroy(linger=0)


async def test_heartbeats_that_lay_unread_do_not_show_that_the_worker_is_deaf(
    net: Net, played: tuple[PlayedWorker, Client]
) -> None:
    """This process was busy for more than a second: what it reads then is old, and it has answered none of it."""
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await worker.expect(HeartbeatEcho)
    net.now_s += 1.3
    await worker.send(client.me, *[heartbeat(number, echoed=1) for number in range(2, 8)])
    await client.changes.until(lambda: client.beats == 7 or bool(client.losses))
    assert client.losses == []
    net.now_s += 0.25
    await worker.send(client.me, heartbeat(8, echoed=7))
    await client.changes.until(lambda: client.beats == 8 or bool(client.losses))
    assert client.losses == []


async def test_who_is_behind_takes_nobody_for_deaf(net: Net, played: tuple[PlayedWorker, Client]) -> None:
    """What this process reads is always 1.5 s old, for there is so much of it: the echoes are confirmed as late."""
    worker, client = played
    take, num, behind = client.on_message, 20, 6

    def slowly(link: ControlClient, message: Message) -> None:
        take(link, message)
        if client.beats <= num - behind:  # what is left then is read at once
            net.now_s += 0.25

    client.on_message = slowly  # type: ignore[method-assign]
    for number in range(1, num + 1):
        worker.send_soon(client.me, heartbeat(number, echoed=max(0, number - behind)))
    time.sleep(0.5)  # without a turn of the loop: all of them lie there
    await client.changes.until(lambda: client.beats == num or bool(client.losses))
    assert client.losses == []


async def test_heartbeats_that_were_not_sent_do_not_show_that_the_worker_is_deaf(
    net: Net, played: tuple[PlayedWorker, Client]
) -> None:
    """It had other messages to send: it counted on, and sent none."""
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await client.hears(1)
    net.now_s += 10.0
    client.link._heard_at = net.now_s
    await worker.send(client.me, heartbeat(41, echoed=1))
    await client.changes.until(lambda: client.beats == 2 or bool(client.losses))
    assert client.losses == []


async def test_a_worker_that_was_busy_has_not_read_its_echoes_yet(
    net: Net, played: tuple[PlayedWorker, Client]
) -> None:
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await client.hears(1)
    net.now_s += 1.4
    await worker.send(client.me, heartbeat(2, echoed=0))
    await client.changes.until(lambda: client.beats == 2 or bool(client.losses))
    assert client.losses == []


async def test_echoes_that_are_missing_for_long_show_a_deaf_worker(
    net: Net, played: tuple[PlayedWorker, Client]
) -> None:
    worker, client = played
    for number in range(1, 20):
        await worker.send(client.me, heartbeat(number, echoed=min(2, number - 1)))
        await client.has_heard(number)
        if client.losses:
            break
        net.now_s += 0.25
    assert client.losses == [("it does not hear what is sent to it", False)]
    assert number == 7, "the fifth heartbeat after the last that was echoed, within 1.5 s"


async def test_a_worker_that_takes_one_message_after_another_is_not_deaf(
    net: Net, played: tuple[PlayedWorker, Client]
) -> None:
    """What it takes is large, and the echoes lie behind it."""
    worker, client = played
    for number in range(1, 20):
        await worker.send(client.me, replace(heartbeat(number, echoed=0), received=number // 3))
        await client.has_heard(number)
        assert client.losses == []
        net.now_s += 0.25
    for number in range(20, 40):
        await worker.send(client.me, replace(heartbeat(number, echoed=0), received=6))
        await client.has_heard(number)
        if client.losses:
            break
        net.now_s += 0.25
    assert client.losses == [("it does not hear what is sent to it", False)], "it has not taken anything for long"
