"""How a link tells a worker that has died from one that is silent, deaf, or only badly connected.

The pulses are such that no timeout can be meant: what is found out is found out from the connection, or by counting.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import zmq
from channel_bench import KEY, WAIT_S, Client, Net, RawWorker, Worker, heartbeat, hello_once, tokens
from waiting import StandingClock, eventually

from common.contract.codec import encode
from common.contract.errors import Cause
from common.contract.ids import Handle, RequestId, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort
from common.contract.messages.session import HeartbeatEcho, Hello, Role
from common.contract.messages.worker import Failed, StepTokens, Tokens
from common.runtime.channel import ControlClient, ends
from common.runtime.clock import Pulse

ENDLESS = Pulse(interval_s=0.02, timeout_s=1e6)
BRISK = Pulse(interval_s=0.02, timeout_s=0.4)
DEAF_BEATS = 14
"""More heartbeats than this without an echo, by `BRISK`."""


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

    def lose_packets(self) -> None:
        """Nothing arrives any more by the connections that there are, and nobody is told; new ones are served."""
        for task in tuple(self._tasks):
            task.cancel()

    async def stop(self) -> None:
        self._server.close()
        self.break_connections()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def at(port: int) -> str:
    return f"127.0.0.1:{port}"


async def proxy_of(net: Net, worker: Worker) -> tuple[Proxy, int]:
    """A proxy of a worker, and its port."""
    net.open.insert(0, proxy := Proxy(worker.port))  # closed last
    return proxy, await proxy.start()


async def breaks(client: Client) -> None:
    """The link has seen its connection break."""
    await eventually(lambda: bool(client.link._disconnected))


async def has_heard(client: Client, beats: int) -> None:
    """So many heartbeats, unless the worker is lost before."""
    await client.events.until(lambda: client.num_heartbeats == beats or bool(client.losses))


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net(ENDLESS)
    yield net
    await net.close()


# --- the connection breaks ---------------------------------------------------------------------------------------


async def test_a_worker_that_dies_is_lost_without_any_timeout(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    await client.beats(2)
    await worker.stop(goodbye=False)
    assert await client.loss() == ("its connection broke, and nobody answers", True)
    assert net.clock.now_s == 0.0, "no silence was waited for"
    assert client.link.traffic.sessions_lost == 1


async def test_another_worker_at_the_address_shows_that_the_first_has_crashed(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    old = net.worker()
    client = await net.client(old.address).opened()
    await old.stop(goodbye=False)
    await breaks(client)
    client.link.send(Abort(request=RequestId("r"), attempt=1))
    new = net.worker(port=old.port)
    assert await client.loss() == ("restarted", True)
    await client.events.until(lambda: len(client.workers) == 2)
    assert client.workers == [old.me, new.me]
    await client.beats(2)
    assert new.messages == [], "what was meant for the old one must not reach the new one"
    assert len(client.losses) == 1


async def test_a_worker_that_says_goodbye_has_not_crashed(net: Net) -> None:
    worker = net.worker()
    client = await net.client(worker.address).opened()
    await worker.stop()
    assert await client.loss() == ("said goodbye", False)
    await asyncio.sleep(2 * ends.RECONNECT_S)  # whatever its connection's end leads to, has been
    assert len(client.losses) == 1
    assert client.link.traffic.sessions_lost == 0


async def test_a_connection_that_comes_back_is_no_loss(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port)).opened()
    proxy.break_connections()
    await breaks(client)
    client.link.send(Abort(request=RequestId("r"), attempt=7))
    await client.events.until(lambda: client.num_resyncs == 1)
    await worker.events.until(lambda: bool(worker.messages))
    assert worker.messages == [Abort(request=RequestId("r"), attempt=7)], "it waits for the new connection"
    client.link._judge_connection(client.link._breaks)  # the time for it is over
    await client.beats(3)
    assert (client.losses, client.workers, proxy.num_connections) == ([], [worker.me], 2)
    assert client.num_resyncs == 1, "the counts went wrong when the session was opened again"


async def test_a_connection_that_breaks_while_tokens_flow_keeps_its_session(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no way for a moment waits for the client's Hello, which says what is missing."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port)).opened()
    session = worker.server._sessions[client.me]
    await client.beats(1)
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
    await client.events.until(lambda: tokens(last) in client.received)
    await client.beats(3)
    positions = [message.position for message in client.received if isinstance(message, Tokens)]
    first = positions[0]
    assert positions == list(range(first, last + 1)), "what waited arrives in order and once"
    assert (client.losses, client.num_resyncs, client.workers) == ([], 1, [worker.me])
    assert (worker.lost, worker.server.traffic.sessions_lost) == ([], 0)


async def test_a_request_whose_end_waits_for_the_connection_is_not_unknown(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Welcome comes first: else the client would take the request for lost, and what is said of it for stale."""
    hello_once(monkeypatch)
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    monkeypatch.setattr(worker, "on_hello", lambda *_: ())
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port)).opened()
    session = worker.server._sessions[client.me]
    await client.beats(1)
    proxy.deaf = True
    proxy.break_connections()
    async with asyncio.timeout(WAIT_S):
        while not session.broken:
            worker.server.send(client.me, tokens(1))
            await asyncio.sleep(0)
    other = RequestId("not asked about")
    failed = Failed(request=RequestId("r"), attempt=1, cause=Cause.INVALID, message="why")
    for message in (failed, replace(failed, request=other)):
        worker.server.send(client.me, message)
    proxy.deaf = False
    proxy.break_connections()
    await client.events.until(lambda: failed in client.received)
    assert [each.open_requests for each in client.welcomes] == [(), (KEY,)]


async def test_a_client_whose_connection_breaks_and_that_stays_away_is_lost(net: Net) -> None:
    """It may have died: what it had is free long before its silence would show it."""
    worker = net.worker()
    context = zmq.asyncio.Context()
    raw, me = context.socket(zmq.DEALER), new_incarnation()
    try:
        raw.setsockopt(zmq.IDENTITY, me.encode())
        raw.connect(f"tcp://127.0.0.1:{worker.port}")
        await raw.send(encode(me, [Hello(role=Role.GATEWAY, fingerprint=None, open_requests=())]))
        await worker.events.until(lambda: me in worker.peers)
    finally:
        context.destroy(linger=0)
    async with asyncio.timeout(WAIT_S):
        while not worker.lost:
            worker.server.send(me, tokens(1))
            await asyncio.sleep(0.001)
    assert (worker.lost, worker.peers, worker.server.traffic.sessions_lost) == ([me], (), 1)
    assert net.clock.now_s == 0.0, "no silence was waited for"


async def test_a_connection_on_which_nothing_arrives_is_not_waited_for(net: Net) -> None:
    """TCP would try again after about as long as packets were lost. Nor do Hellos arrive that were sent meanwhile."""
    worker = net.worker(BRISK, clock=time.monotonic)
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port), BRISK, clock=time.monotonic).opened()
    await client.beats(2)
    proxy.lose_packets()
    await client.opened(2)
    assert (client.workers, client.losses[0][1]) == ([worker.me] * 2, False)
    assert proxy.num_connections >= 2
    await client.beats(2)
    client.link.send(Abort(request=RequestId("r"), attempt=1))
    await worker.events.until(lambda: "Abort" in worker.events)


async def test_what_was_sent_by_connections_that_were_given_up_is_not_heard(net: Net) -> None:
    """A worker that loads its model does not serve yet, but ZeroMQ takes what is sent. Each old Hello would be answered
    with all that is in the worker's cache."""
    worker = net.worker(BRISK, clock=time.monotonic, begins=False)
    client = net.client(worker.address, BRISK, clock=time.monotonic)
    await client.events.until(lambda: client.num_lost >= 5)
    sent = client.link._hellos
    worker.begin()
    await client.opened()
    await client.beats(2)
    assert len(worker.hellos) < sent
    assert worker.server.traffic.frames_refused == 0


def test_a_context_has_room_for_links_to_a_thousand_workers() -> None:
    """Each takes three sockets, and some files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    context = ends.channel_context()
    try:
        assert len([context.socket(zmq.DEALER) for _ in range(3000)]) == 3000
    finally:
        context.destroy(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("columns", [False, True])
async def test_what_waits_for_a_broken_connection_is_bounded(
    net: Net, monkeypatch: pytest.MonkeyPatch, columns: bool
) -> None:
    """A hundred messages, or steps of as many tokens."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    monkeypatch.setattr(ends, "MAX_OUTBOX_MESSAGES", 100)
    worker = net.worker()
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port)).opened()
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
    await worker.events.until(lambda: worker.lost == [client.me])


async def test_each_break_is_judged_by_itself(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an earlier one, which was mended, must not run out on the next."""
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = net.worker()
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port)).opened()
    for number in (1, 2):
        proxy.break_connections()
        await client.events.until(lambda number=number: client.num_resyncs == number)  # type: ignore[misc]
    proxy.deaf = True
    proxy.break_connections()
    await breaks(client)
    client.link._judge_connection(1)
    client.link._judge_connection(2)
    assert client.losses == [], "the third break has its own time"
    client.link._judge_connection(3)
    assert client.losses == [("its connection broke, and nobody answers", True)]


async def test_a_client_that_never_had_a_session_has_no_crash_to_tell(net: Net) -> None:
    worker = net.worker()
    proxy, port = await proxy_of(net, worker)
    proxy.deaf = True
    client = net.client(at(port))
    async with asyncio.timeout(WAIT_S):
        while not proxy.num_connections:
            await asyncio.sleep(0.01)
    proxy.break_connections()
    await asyncio.sleep(2 * ends.RECONNECT_S)
    assert client.losses == []
    proxy.deaf = False
    proxy.break_connections()  # what was lost on the connection that there is does not come again
    await client.opened()


async def test_a_closed_link_leaves_no_socket_behind(net: Net) -> None:
    """A sink opens and closes one for each source that it loses."""
    worker = net.worker()
    client = await net.client(worker.address).opened()
    client._linking.cancel()
    await asyncio.wait([client._linking])
    assert client.link._connection._socket.closed
    assert client.link._connection._monitor.closed


# --- a process that stands still itself ---------------------------------------------------------------------------


async def test_nobody_is_judged_silent_for_the_time_in_which_this_process_stood_still(net: Net) -> None:
    """What the others have said meanwhile lies unread; here it is not even said, as both ends share the loop."""
    worker = net.worker(BRISK, clock=time.monotonic)
    client = await net.client(worker.address, BRISK, clock=time.monotonic).opened()
    for _ in range(2):
        await client.beats(2)
        time.sleep(3 * BRISK.timeout_s)
    await client.beats(3)
    assert (client.losses, worker.lost, client.num_resyncs) == ([], [], 0)


async def time_passes(clock: StandingClock, seconds: float) -> None:
    """The event loop, whose clock this is, is blocked for so long; then it has three turns."""
    clock.now += seconds
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stall_s", [0.21, 0.33, 0.7, 60.0])
@pytest.mark.parametrize("before_s", [0.0, 0.02, 0.19, 0.39])
async def test_a_connection_is_not_judged_right_after_a_stall(
    monkeypatch: pytest.MonkeyPatch, before_s: float, stall_s: float
) -> None:
    """The answer may be there, unread. The stall may begin and end within the time, or end soon after it."""
    clock, judged = StandingClock(), asyncio.Event()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    ends.after_reconnect_time(judged.set)
    for _ in range(10):
        await time_passes(clock, before_s / 10)
    await time_passes(clock, stall_s)
    assert not judged.is_set()
    for _ in range(7):
        await time_passes(clock, 0.05)
    assert not judged.is_set(), "the time has not begun anew"
    await time_passes(clock, 0.06)
    assert judged.is_set()


async def test_a_loop_whose_every_turn_is_long_judges_a_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, judged = StandingClock(), asyncio.Event()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    ends.after_reconnect_time(judged.set)
    for _ in range(ends._MAX_LOOKS):
        assert not judged.is_set()
        await time_passes(clock, 0.3)
    assert judged.is_set()


@pytest.mark.parametrize(("timeout_s", "turn_s"), [(1.5, 0.25), (0.2, 0.05)], ids=["long turns", "a short timeout"])
async def test_a_broken_connection_is_not_judged_by_silence_first(
    net: Net, monkeypatch: pytest.MonkeyPatch, timeout_s: float, turn_s: float
) -> None:
    """A gateway that took a crash for silence would suspect no request of it."""
    worker, clock = net.raw_worker(), StandingClock()
    clock.now = asyncio.get_running_loop().time()
    client = net.client(worker.address, Pulse(interval_s=timeout_s / 6, timeout_s=timeout_s), clock=clock)
    await worker.accept(client)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "time", clock)
        client.link._on_broken()
        for _ in range(ends._MAX_LOOKS):
            await time_passes(clock, turn_s)
    assert client.losses[:1] == [("its connection broke, and nobody answers", True)]


# --- a worker that does not hear us ------------------------------------------------------------------------------


async def test_a_worker_that_hears_nothing_is_lost_before_the_timeout(net: Net) -> None:
    """By the time that its heartbeats tell: whoever is too slow here is slow in both directions."""
    worker = net.worker(BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    proxy, port = await proxy_of(net, worker)
    client = await net.client(at(port), BRISK, clock=lambda: worker.beat * BRISK.interval_s).opened()
    await client.beats(5)
    proxy.deaf = True
    cut_at = worker.beat
    assert await client.loss() == ("it does not hear what is sent to it", False)
    assert (worker.beat - cut_at) * BRISK.interval_s < BRISK.timeout_s
    assert worker.server.traffic.sessions_lost == 0, "the worker had not given the client up yet"
    await eventually(lambda: proxy.num_connections == 2)


async def test_a_worker_that_hears_is_not_taken_for_deaf(net: Net) -> None:
    worker = net.worker(BRISK, clock=lambda: worker.beat * BRISK.interval_s)
    client = await net.client(worker.address, BRISK, clock=lambda: worker.beat * BRISK.interval_s).opened()
    await client.beats(2 * DEAF_BEATS)
    assert client.losses == []


@pytest.fixture
async def played(net: Net) -> tuple[RawWorker, Client]:
    """A worker that the test plays, and a link that is open; nothing happens but by the test."""
    worker = net.raw_worker()
    client = net.client(worker.address, Pulse(interval_s=0.25, timeout_s=1.5))
    await worker.accept(client)
    return worker, client


async def test_heartbeats_that_lay_unread_do_not_show_that_the_worker_is_deaf(
    net: Net, played: tuple[RawWorker, Client]
) -> None:
    """This process was busy for more than a second: what it reads then is old, and it has answered none of it."""
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await worker.expect(HeartbeatEcho)
    net.clock.now_s += 1.3
    await worker.send(client.me, *[heartbeat(number, echoed=1) for number in range(2, 8)])
    await client.events.until(lambda: client.num_heartbeats == 7 or bool(client.losses))
    assert client.losses == []
    net.clock.now_s += 0.25
    await worker.send(client.me, heartbeat(8, echoed=7))
    await client.events.until(lambda: client.num_heartbeats == 8 or bool(client.losses))
    assert client.losses == []


async def test_who_is_behind_takes_nobody_for_deaf(net: Net, played: tuple[RawWorker, Client]) -> None:
    """What this process reads is always 1.5 s old, for there is so much of it: the echoes are confirmed as late."""
    worker, client = played
    take, num, behind = client.on_message, 20, 6

    def slowly(link: ControlClient, message: Message) -> None:
        take(link, message)
        if client.num_heartbeats <= num - behind:  # what is left then is read at once
            net.clock.now_s += 0.25

    client.on_message = slowly  # type: ignore[method-assign]
    for number in range(1, num + 1):
        worker.send_soon(client.me, heartbeat(number, echoed=max(0, number - behind)))
    time.sleep(0.5)  # without a turn of the loop: all of them lie there
    await client.events.until(lambda: client.num_heartbeats == num or bool(client.losses))
    assert client.losses == []


async def test_heartbeats_that_were_not_sent_do_not_show_that_the_worker_is_deaf(
    net: Net, played: tuple[RawWorker, Client]
) -> None:
    """It had other messages to send: it counted on, and sent none."""
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await client.beats(1)
    net.clock.now_s += 10.0
    client.link._heard_at = net.clock.now_s
    await worker.send(client.me, heartbeat(41, echoed=1))
    await client.events.until(lambda: client.num_heartbeats == 2 or bool(client.losses))
    assert client.losses == []


async def test_a_worker_that_was_busy_has_not_read_its_echoes_yet(net: Net, played: tuple[RawWorker, Client]) -> None:
    worker, client = played
    await worker.send(client.me, heartbeat(1, echoed=0))
    await client.beats(1)
    net.clock.now_s += 1.4
    await worker.send(client.me, heartbeat(2, echoed=0))
    await client.events.until(lambda: client.num_heartbeats == 2 or bool(client.losses))
    assert client.losses == []


async def test_echoes_that_are_missing_for_long_show_a_deaf_worker(net: Net, played: tuple[RawWorker, Client]) -> None:
    worker, client = played
    for number in range(1, 20):
        await worker.send(client.me, heartbeat(number, echoed=min(2, number - 1)))
        await has_heard(client, number)
        if client.losses:
            break
        net.clock.now_s += 0.25
    assert client.losses == [("it does not hear what is sent to it", False)]
    assert number == 7, "the fifth heartbeat after the last that was echoed, within 1.5 s"


async def test_a_worker_that_takes_one_message_after_another_is_not_deaf(
    net: Net, played: tuple[RawWorker, Client]
) -> None:
    """What it takes is large, and the echoes lie behind it."""
    worker, client = played
    for number in range(1, 20):
        await worker.send(client.me, replace(heartbeat(number, echoed=0), received=number // 3))
        await has_heard(client, number)
        assert client.losses == []
        net.clock.now_s += 0.25
    for number in range(20, 40):
        await worker.send(client.me, replace(heartbeat(number, echoed=0), received=6))
        await has_heard(client, number)
        if client.losses:
            break
        net.clock.now_s += 0.25
    assert client.losses == [("it does not hear what is sent to it", False)], "it has not taken anything for long"
