"""The control channel: frames that should not be, order, bursts, backpressure, and ports that cannot be bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from channel_bench import PATIENT, WAIT_S, HeldClock, Net, abort, tokens

from common.contract import codec
from common.contract.codec import MAX_FRAME_BYTES, MAX_MESSAGES_PER_FRAME, encode, encode_some
from common.contract.errors import Cause, OperatorError, ProtocolError
from common.contract.ids import Incarnation, RequestId, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Prefill
from common.contract.messages.session import Goodbye, Heartbeat
from common.contract.messages.worker import Failed, Tokens
from common.contract.sampling import SamplingParams
from common.runtime.channel import ControlServer, ends
from common.runtime.channel import server as server_end
from common.runtime.clock import Pulse

MAX_FRAMES_PER_TURN = 2
"""The server takes one and lets others run; two may fall between two turns of a task by the order of the turns."""


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


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


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
