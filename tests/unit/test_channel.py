"""The control channel: how sessions open, what shows that a message was lost, and how sessions end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from channel_bench import (
    FINGERPRINT,
    KEY,
    OTHER,
    PATIENT,
    Client,
    Net,
    RawWorker,
    abort,
    heartbeat,
    hello_once,
    tokens,
    welcome,
)
from waiting import eventually

from common.contract.block_hashes import block_hashes
from common.contract.codec import MAX_MESSAGES_PER_FRAME
from common.contract.errors import Cause
from common.contract.ids import Incarnation, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort
from common.contract.messages.session import Goodbye, HeartbeatEcho, Hello, HelloRefused, HelloRequired, Role, Welcome
from common.contract.messages.worker import CacheEvents
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.runtime.channel import ControlClient, LinkState, ends
from common.runtime.channel import client as client_end
from common.runtime.channel import server as server_end
from common.runtime.clock import Pulse
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.worker_life import WorkerLife


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_end, "_HELLO_RETRY_S", 0.05)
    monkeypatch.setattr(client_end, "_HELLO_RETRY_MAX_S", 0.3)


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


async def last_of_hellos(raw: RawWorker, client: Client) -> tuple[Hello, Hello]:
    """Leave several Hellos unanswered, until the client pauses: the first and the last of them."""
    _, first = await raw.expect(Hello)
    await raw.expect(Hello)
    client_end._HELLO_RETRY_MAX_S = client.link._hello_wait_s = 3600.0  # a fixture sets the first back
    last = (await raw.up_to_hello(client.link._hellos + 1))[-1]
    assert isinstance(first, Hello)
    assert isinstance(last, Hello)
    return first, last


BRISK = Pulse(interval_s=0.03, timeout_s=0.4)


async def test_a_link_that_has_retired_says_goodbye_and_hears_nothing_more(net: Net) -> None:
    """It takes some turns to end, and its address may be another worker's by then."""
    raw = net.raw_worker()
    client = net.client(raw.address)
    peer = await raw.accept(client)
    client.link.retire()
    await raw.expect(Goodbye)
    await raw.send(peer, tokens(1), heartbeat(1, sent=7))  # it seems to have lost messages
    await asyncio.sleep(0.1)
    assert (client.received, client.num_heartbeats, client.losses, client.num_resyncs) == ([], 0, [], 0)
    assert client.link.state is LinkState.CLOSED


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
    first, last = await last_of_hellos(raw, client)
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


async def test_answers_to_earlier_hellos_are_not_taken_for_a_loss(net: Net) -> None:
    """The worker loads its model, so several Hellos lie in its queue before it answers the first."""
    worker = net.worker(begins=False)
    client = net.client(worker.address)
    opened = client.on_open

    def speak(link: ControlClient, welcome: Welcome) -> None:
        opened(link, welcome)
        link.send(abort(1))

    client.on_open = speak  # type: ignore[method-assign]
    await eventually(lambda: client.link._hellos >= 3)
    worker.begin()
    await client.beats(4)
    assert len(worker.hellos) >= 2, "the client did not repeat its Hello: the test shows nothing"
    assert client.events == ["open"]
    assert worker.messages == [abort(1)]


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
    await raw.accept(client)  # if it read the answer late, it asks again
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


async def test_workers_that_are_clients_keep_no_gateway_out(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stays a client while its link is idle, so in a large pool each worker is one of each other."""
    monkeypatch.setattr(server_end, "MAX_SESSIONS", 2)
    worker = net.worker(BRISK)
    sinks = [await net.client(worker.address, BRISK, FINGERPRINT).opened() for _ in range(2)]
    gateways = [await net.client(worker.address, BRISK).opened() for _ in range(2)]
    for fingerprint, said in ((FINGERPRINT, "2 workers"), (None, "2 gateways")):
        refused = net.client(worker.address, BRISK, fingerprint)
        await refused.events.until(partial(bool, refused.refusals))
        assert refused.refusals[0].cause is Cause.CAPACITY
        assert said in refused.refusals[0].message
    assert set(worker.peers) == {client.me for client in sinks + gateways}


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


async def test_a_message_that_the_worker_never_got_leads_to_one_resync(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello_once(monkeypatch)
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
    gateways: list[Incarnation] = []

    def on_open(peer: Incarnation, role: Role) -> None:
        gateways[:] = [peer]
        feed.begin(peer)

    worker.on_open = on_open  # type: ignore[method-assign]
    client = await net.client(worker.address).opened()
    old, new, newest = block_hashes(range(4), 1), block_hashes(range(4, 7), 1), block_hashes(range(7, 8), 1)
    blocks = pool.allocate(4)
    pool.name(blocks, old)
    pool.release(blocks)
    feed.publish(gateways)
    feed._send = drop
    blocks = pool.allocate(3)  # evicts three
    pool.name(blocks, new)
    feed.publish(gateways)
    feed._send = worker.server.send
    await client.events.until(lambda: "resync" in client.events)
    pool.release(blocks)
    pool.name(pool.allocate(1), newest)
    feed.publish(gateways)
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
    assert not speaks or client.losses[0][1]


async def test_a_silent_worker_is_lost_after_the_timeout_and_not_before(net: Net) -> None:
    raw = net.raw_worker()
    client = net.client(raw.address)
    await raw.accept(client)
    net.clock.now_s += PATIENT.timeout_s
    client.link._greets.set()  # it looks, however long it would have slept
    await net.clock.looks(3)
    assert client.events == ["open"]
    net.clock.now_s += 0.1
    await client.events.until(lambda: client.num_lost > 0)
    client.link.send(abort(1))
    later = await raw.up_to_hello(client.link._hellos + 1)
    assert not any(isinstance(message, Abort) for message in later)
    assert (client.link.traffic.sessions_lost, client.losses[0][1]) == (1, False)


async def test_a_client_judges_silence_by_its_own_timeout(net: Net) -> None:
    """A worker's interval must be less than half of it: docs/operations/settings.md."""
    client = await net.client(net.worker(Pulse(interval_s=3600.0, timeout_s=36000.0)).address).opened()
    net.clock.now_s += PATIENT.timeout_s + 0.1
    client.link._greets.set()  # it looks, however long it would have slept
    assert (await client.loss())[0].startswith("silent for")


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
    assert (client.events, client.losses) == (["open", "lost: said goodbye"], [("said goodbye", False)])


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
