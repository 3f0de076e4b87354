"""The pulls of a worker and their transfers, over real ZeroMQ: what the worker, the source and the mover learn, and
when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from faulty_transport import Faulty
from played_source import FINGERPRINT, WAIT_S, PlayedSource
from prompt_pulls import pull_of_prompt
from transport_source import Cache, make_transport

from common.contract.block_hashes import BlockHash, block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey, new_incarnation
from common.contract.messages.fields import FinishReason, Message, RequestMessage
from common.contract.messages.gateway import Source
from common.contract.messages.handoff import (
    Attach,
    AttachPrefix,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
)
from common.contract.messages.session import Goodbye, Heartbeat, Hello, HelloRequired, Phase, Role, Welcome
from common.contract.messages.worker import Tokens
from common.runtime.channel import ControlServer
from common.runtime.clock import monotonic
from common.runtime.config import PrefillSettings
from common.worker.agenda import Inbox
from kv_transfer.events import (
    AddSource,
    Connect,
    Consequence,
    DropRead,
    DropSource,
    Poll,
    Polled,
    Pulled,
    PullFailed,
    PullOffered,
    ReadEnded,
    Released,
    Send,
    SendToSource,
    Serve,
    SourceLost,
    SourceOpened,
    SourceReceived,
    StartRead,
    TransferAction,
    TransferEvent,
    Unpinned,
)
from kv_transfer.lender import Lender
from kv_transfer.pull import Pull
from kv_transfer.pulls import Pulls
from kv_transfer.transfers import Transfers
from kv_transfer.transport import SLOWEST_READ_BYTES_PER_S, Read, ReadState, Transport

R1, R2 = RequestId("r1"), RequestId("r2")
BOUND_S = 3.0
READ_BOUND_S = 6.0
POLL_S = 0.5
"""Seconds between two polls of which the pulls hear."""
SETTINGS = PrefillSettings(
    transport="zmq",
    quarantine_bound_s=BOUND_S,
    read_bound_s=READ_BOUND_S,
    heartbeat_interval_s=0.05,
    heartbeat_timeout_s=20.0,
)
HASHES = block_hashes(range(12), 4)


class Worker:
    """A worker around its pulls: its blocks, and what it was told."""

    def __init__(self, make: Callable[[], Transport], clock: Callable[[], float], cache: Cache | None = None) -> None:
        self.me = new_incarnation()
        self.told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.free = list(range(8))
        self.num_held = 0
        """Leading blocks of each pull that the worker says it holds already."""
        self.makes_room = True
        self.num_polls = 0
        """Polls of which the pulls have heard."""
        self.then: dict[str, Callable[[], None]] = {}
        """What the worker does when it is told of an event, once: by the event's name."""
        self.cache = cache or Cache(8, 64)
        self.inbox: Inbox[TransferEvent | TransferAction | Consequence] = Inbox(self.handle)
        self.pulls = Pulls(
            emit=self.inbox.put,
            clock=clock,
            transport="zmq",
            block_bytes=self.cache.region.block_bytes,
            quarantine_bound_s=BOUND_S,
            read_bound_s=READ_BOUND_S,
        )
        self.transfers = Transfers(
            SETTINGS,
            self.me,
            Role.PREFILL,
            FINGERPRINT,
            self.cache.region,
            make,
            clock,
            report=self.inbox.put,
            open_pulls=self.pulls.open_pulls,
        )

    def handle(self, event: TransferEvent | TransferAction | Consequence) -> None:
        """Events go to the pulls, actions are carried out, and consequences are what the worker is told."""
        match event:
            case SourceOpened() | SourceReceived() | SourceLost() | ReadEnded() | Polled():
                self.pulls.handle(event)
                self.num_polls += isinstance(event, Polled)
            case PullOffered(pull, num_blocks):
                self._tell("want", pull, num_blocks)
                if self.makes_room:
                    self.make_room(pull, num_blocks)
            case Pulled(pull, block_ids, first_tokens):
                self._tell("pulled", pull, tuple(block_ids), len(first_tokens))
            case Released(block_ids):
                self.free += block_ids
                self._tell("release", *block_ids)
            case PullFailed(pull, cause, _):
                self._tell("gave up", pull, cause)
            case Connect() | SendToSource() | AddSource() | DropSource() | StartRead() | DropRead() | Serve() | Poll():
                self.transfers.carry_out(event)
            case _:
                raise AssertionError(event)

    def make_room(self, pull: Pull, num_blocks: int) -> None:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert len(taken) == num_blocks
        self.pulls.reserve(pull, taken, min(self.num_held, num_blocks))

    def _tell(self, *event: object) -> None:
        self.pulls.check_invariants()
        self.told.put_nowait(event)
        self.then.pop(str(event[0]), lambda: None)()

    async def next(self) -> tuple[object, ...]:
        """The next event."""
        async with asyncio.timeout(WAIT_S):
            return await self.told.get()

    def all_told(self) -> list[tuple[object, ...]]:
        """The events by now."""
        return [self.told.get_nowait() for _ in range(self.told.qsize())]


class Net:
    """Pulls over a transport that obeys the test, and a source that the test plays."""

    def __init__(self) -> None:
        self.now = 100.0
        self.transport = Faulty()
        self.worker = Worker(lambda: self.transport, lambda: self.now)
        self.pulls = self.worker.pulls
        self.transfers = self.worker.transfers
        self.source = PlayedSource(self.worker.me)
        self.at = Source(address=self.source.address, incarnation=self.source.incarnation)
        self.linked = False

    def pull(self, request: RequestId = R1, attempt: int = 1, names: Sequence[BlockHash] | None = None) -> Pull:
        if names is None:
            return pull_of_prompt(RequestKey(request, attempt), self.at)
        return Pull(self.at, AttachPrefix(request=request, attempt=attempt, block_hashes=tuple(names)))

    async def attached(self, pull: Pull | None = None) -> Pull:
        """A pull that has attached."""
        pull = pull or self.pull()
        self.pulls.begin(pull)
        if not self.linked:
            await self.source.welcome()
            self.linked = True
        assert (await self.source.expect(Attach)).key == pull.key
        return pull

    async def reading(self, pull: Pull | None = None) -> Pull:
        """A pull of three blocks, of which the first and the second are each under a read."""
        pull = await self.attached(pull)
        begun = len(self.transport.reads)
        await self.source.send(ready(pull, 0, 10), ready(pull, 1, 11))
        assert (await self.worker.next())[0] == "want"
        await self.until(lambda: len(self.transport.reads) == begun + 2)
        return pull

    async def settling(self) -> Pull:
        pull = await self.reading()
        await self.source.send(ready(pull, 2, 12), done(pull))
        await self.until(lambda: len(self.transport.reads) == 3)
        for read in self.transport.reads:
            read.finish()
        await self.source.expect(Settle)
        return pull

    async def poll(self, seconds: float) -> None:
        """So many seconds pass in which reads are open, and the mover polls."""
        for _ in range(round(seconds / POLL_S)):
            await self.poll_once()

    async def poll_once(self) -> None:
        """The time between two polls passes, and the pulls hear of a poll."""
        heard = self.worker.num_polls
        self.now += POLL_S
        self.pulls.tick()
        await self.until(lambda: self.worker.num_polls > heard)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pulls, reads, blocks in quarantine."""
        return self.pulls.num_pulls, self.pulls.num_reads, self.pulls.num_quarantined


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    """Started; at the end nothing is left and no block is lost."""
    subject = Net()
    await subject.transfers.start()
    yield subject
    subject.pulls.check_invariants()
    for read in subject.transport.reads:
        if read.state == "pending":
            read.fail("teardown")
    await subject.transfers.close()
    subject.pulls.check_invariants()
    assert subject.counts[1:] == (0, 0)
    subject.source.close()


def ready(
    pull: Pull, start: int, *block_ids: int, num_blocks: int = 3, checksums: tuple[int, ...] | None = None
) -> BlocksReady:
    request, attempt = pull.key
    return BlocksReady(
        request=request,
        attempt=attempt,
        lease=LeaseId("l1"),
        epoch=7,
        start=start,
        block_ids=block_ids,
        num_blocks=num_blocks,
        checksums=checksums,
    )


def done(pull: Pull, reason: FinishReason | None = None) -> PrefillDone:
    request, attempt = pull.key
    tokens = Tokens(request=request, attempt=attempt, choice=0, position=9, token_ids=(5,), finish_reason=reason)
    return PrefillDone(request=request, attempt=attempt, lease=LeaseId("l1"), epoch=7, first_tokens=(tokens,))


def settled(pull: Pull, *, valid: bool = True) -> Settled:
    return Settled(request=pull.key.request, attempt=pull.key.attempt, lease=LeaseId("l1"), epoch=7, valid=valid)


def finish(*reads: Read) -> None:
    for read in reads:
        read.finish()


# --- the way through ---------------------------------------------------------------------------------------------


async def test_a_pull_from_begin_to_the_blocks(net: Net) -> None:
    pull = net.pull()
    net.pulls.begin(pull)
    hello = await net.source.welcome()
    assert (hello.role, hello.open_requests) == (Role.PREFILL, (pull.key,))
    await net.source.expect(Attach)
    await net.source.send(ready(pull, 0, 10, 11), done(pull))
    assert await net.worker.next() == ("want", pull, 3)
    await net.source.expect(Attach)  # a block has not been told of
    await net.source.send(ready(pull, 0, 10, 11, 12), done(pull))
    await net.until(lambda: len(net.transport.reads) == 2)
    assert list(map(len, net.transport.read_blocks)) == [2, 1]
    assert net.counts == (1, 2, 0)
    finish(*net.transport.reads)
    assert (await net.source.expect(Settle)).epoch == 7
    await net.source.send(settled(pull))
    assert await net.worker.next() == ("pulled", pull, (0, 1, 2), 1)
    assert net.counts == (0, 0, 0)
    assert net.transport.calls == [("add", net.source.incarnation)]
    values = {metric.name: metric.samples[0].value for metric in (*net.pulls.metrics(), *net.transfers.metrics())}
    assert values.pop("baton_transfer_seconds") > 0
    assert values.pop("baton_read_bytes_per_second") > 0
    assert values == {
        "baton_pulls": 0,
        "baton_reads": 0,
        "baton_blocks_quarantined": 0,
        "baton_transfer_bytes": 3 * 64,
        "baton_transfer_failures": 0,
        "baton_sources_read": 0,  # of the first way, RDMA
        "baton_transfer_fallbacks": 0,
        "baton_kv_registrations": 0,
        "baton_kv_registrations_evicted": 0,
        "baton_sources_refused": 0,
    }


async def test_a_pull_from_a_source_that_is_linked_already_attaches_at_once(net: Net) -> None:
    await net.attached()
    net.pulls.begin(net.pull(R2))
    assert (await net.source.expect(Attach)).request == R2
    assert net.counts == (2, 0, 0)


async def test_the_worker_makes_room_when_it_likes(net: Net) -> None:
    net.worker.makes_room = False
    pull = await net.attached()
    await net.source.send(ready(pull, 0, 10, 11, 12))
    assert await net.worker.next() == ("want", pull, 3)
    await net.source.hear_all()
    assert net.counts == (1, 0, 0)
    net.worker.make_room(pull, 3)
    await net.until(lambda: len(net.transport.reads) == 1)


async def test_a_prefix_of_which_the_beginning_is_held(net: Net) -> None:
    net.worker.num_held = 1
    pull = net.pull(names=HASHES)
    net.pulls.begin(pull)
    await net.source.welcome()
    assert (await net.source.expect(AttachPrefix)).block_hashes == tuple(HASHES)
    await net.source.send(ready(pull, 0, 10, 11, num_blocks=2))
    assert await net.worker.next() == ("want", pull, 2)
    await net.until(lambda: len(net.transport.reads) == 1)
    assert len(net.transport.read_blocks[0]) == 1
    finish(*net.transport.reads)
    await net.source.expect(Settle)
    await net.source.send(settled(pull))
    assert await net.worker.next() == ("pulled", pull, (0, 1), 0)


async def test_messages_about_another_attempt_or_from_another_life_are_not_the_pulls(net: Net) -> None:
    pull = await net.attached()
    await net.source.send(
        ready(net.pull(attempt=2), 0), ready(net.pull(R2), 0), Attach(request=R1, attempt=1, offered=1), ready(pull, 0)
    )
    assert await net.worker.next() == ("want", pull, 3)
    net.pulls.handle(SourceReceived(new_incarnation(), withdrawal(pull)))
    assert net.worker.all_told() == []


def withdrawal(pull: Pull) -> OfferWithdrawn:
    return OfferWithdrawn(request=pull.key.request, attempt=pull.key.attempt, cause=Cause.CANCELLED, message="aborted")


async def test_a_request_is_pulled_once_at_a_time(net: Net) -> None:
    pull = await net.attached()
    with pytest.raises(AssertionError, match="pulled already"):
        net.pulls.begin(net.pull(attempt=2))
    net.pulls.abandon(pull, None, "a newer attempt arrived")
    net.pulls.begin(net.pull(attempt=2))
    assert (await net.source.expect(Attach)).attempt == 2


# --- sources that will not do ------------------------------------------------------------------------------------


async def test_a_source_that_has_restarted_is_not_the_source(net: Net) -> None:
    first = net.pull()
    net.pulls.begin(first)
    net.source.incarnation = new_incarnation()
    await net.source.welcome()
    assert await net.worker.next() == ("gave up", first, Cause.WORKER_LOST)
    second = net.pull()
    net.pulls.begin(second)
    assert net.worker.all_told() == [("gave up", second, Cause.WORKER_LOST)], "told before begin returns"
    assert net.counts == (0, 0, 0)
    assert not any(isinstance(message, Detach) for message in await net.source.hear_all()), "never attached"


async def test_a_source_with_another_transport_is_not_read_from(net: Net) -> None:
    first = net.pull()
    net.pulls.begin(first)
    await net.source.welcome(transport="nixl")
    assert await net.worker.next() == ("gave up", first, Cause.TRANSFER)
    net.pulls.begin(net.pull(R2))
    assert net.worker.all_told()[0][2] is Cause.TRANSFER
    assert net.transport.calls == []


async def test_a_source_that_never_answers_fails_the_pulls_that_wait_for_it(net: Net) -> None:
    pull = net.pull()
    net.pulls.begin(pull)
    await net.source.expect(Hello)
    net.now += 21.0
    assert await net.worker.next() == ("gave up", pull, Cause.WORKER_LOST)


async def test_a_lost_source_ends_its_pulls_and_its_reads(net: Net) -> None:
    pull = await net.reading()
    other = await net.attached(net.pull(R2))
    await net.source.send(Goodbye())
    assert [await net.worker.next() for _ in range(3)] == [
        ("release", 2),
        ("gave up", pull, Cause.WORKER_LOST),
        ("gave up", other, Cause.WORKER_LOST),
    ]
    assert await net.worker.next() == ("release", 0), "the fence has ended its read"
    assert await net.worker.next() == ("release", 1)
    assert net.transport.calls == [("add", net.source.incarnation), ("drop", net.source.incarnation)]
    assert net.counts == (0, 0, 0)


async def test_first_tokens_that_were_not_asked_for_end_the_pull(net: Net) -> None:
    pull = net.pull()
    net.pulls.begin(pull, lambda first: first[0].position == 8)
    await net.source.welcome()
    await net.source.expect(Attach)
    await net.source.send(ready(pull, 0, 10, 11, 12), done(pull, "stop"))
    assert await net.worker.next() == ("want", pull, 3)
    assert (await net.worker.next())[:3] == ("gave up", pull, Cause.TRANSFER)


async def test_first_tokens_that_fit_go_on(net: Net) -> None:
    pull = net.pull()
    net.pulls.begin(pull, lambda first: first[0].position == 9)
    await net.source.welcome()
    await net.source.expect(Attach)
    await net.source.send(ready(pull, 0, 10, 11, 12), done(pull))
    await net.until(lambda: len(net.transport.reads) == 1)
    finish(*net.transport.reads)
    await net.source.expect(Settle)


async def test_first_tokens_that_end_the_request_end_the_pull_without_a_cause(net: Net) -> None:
    pull = await net.reading()
    finish(*net.transport.reads)
    await net.until(lambda: net.pulls.num_reads == 0)
    await net.source.send(done(pull, "stop"))
    assert [await net.worker.next() for _ in range(2)] == [("release", 0, 1, 2), ("gave up", pull, None)]
    await net.source.expect(Detach)


async def test_an_offer_that_is_withdrawn_ends_the_pull(net: Net) -> None:
    pull = await net.attached()
    await net.source.send(withdrawal(pull))
    assert await net.worker.next() == ("gave up", pull, Cause.CANCELLED)


async def test_nothing_is_kept_of_sources_that_are_gone(net: Net) -> None:
    pull = await net.attached()
    (found,) = net.pulls._sources.values()
    for _ in range(20):
        source = new_incarnation()
        net.pulls.handle(SourceOpened("elsewhere:1", source, found.welcome))
        assert len(net.pulls._offers) == 2
        net.pulls.handle(SourceLost("elsewhere:1", source, Cause.WORKER_LOST, "gone"))
    assert list(net.pulls._offers) == [pull.source.incarnation]
    net.pulls.abandon(pull, None, "enough")


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (Cause.INTERNAL, Cause.WORKER_LOST),
        (Cause.CAPACITY, Cause.WORKER_LOST),
        (Cause.DRAINING, Cause.LEASE_LOST),
        (Cause.TOO_LARGE, Cause.LEASE_LOST),
        (Cause.DEADLINE, Cause.DEADLINE),
    ],
)
async def test_what_concerns_the_source_alone_is_not_told_as_the_sinks_own(
    net: Net, theirs: Cause, told: Cause
) -> None:
    """Whoever is told of an internal error of the source must hold it against the source."""
    pull = await net.attached()
    await net.source.send(replace(withdrawal(pull), cause=theirs))
    assert await net.worker.next() == ("gave up", pull, told)


async def test_an_invalid_verdict_ends_the_pull(net: Net) -> None:
    pull = await net.settling()
    await net.source.send(settled(pull, valid=False))
    assert [await net.worker.next() for _ in range(2)] == [("release", 0, 1, 2), ("gave up", pull, Cause.LEASE_LOST)]


# --- quarantine --------------------------------------------------------------------------------------------------


async def test_blocks_under_read_come_back_when_their_reads_have_ended(net: Net) -> None:
    pull = await net.reading()
    net.pulls.abandon(pull, Cause.DEADLINE, "late")
    assert net.worker.all_told() == [("release", 2), ("gave up", pull, Cause.DEADLINE)]
    assert net.counts == (0, 2, 2)
    net.pulls.abandon(pull, Cause.DEADLINE, "again")
    await net.source.send(HelloRequired())
    assert (await net.source.welcome()).open_requests == (pull.key,), "the source must give its reads progress"
    net.transport.reads[1].finish()
    assert await net.worker.next() == ("release", 1)
    assert not any(isinstance(message, Detach) for message in await net.source.hear_all())
    net.transport.reads[0].fail("the peer is gone")
    assert await net.worker.next() == ("release", 0)
    await net.source.expect(Detach)
    assert net.counts == (0, 0, 0)


async def test_a_read_that_waits_is_dropped_with_its_pull(net: Net) -> None:
    """Its blocks come back at once. The reads that it waits for go on, by the same agent."""
    first = await net.reading()
    net.transport.waits = True
    second = await net.reading(net.pull(R2))
    net.pulls.abandon(second, None, "aborted")
    told = [await net.worker.next() for _ in range(4)]
    assert told == [("release", 5), ("gave up", second, None), ("release", 3), ("release", 4)]
    await net.source.expect(Detach)
    assert net.counts == (1, 2, 0)
    net.transport.waits = False
    await net.source.send(ready(first, 2, 12), done(first))
    await net.until(lambda: len(net.transport.reads) == 5)
    finish(*net.transport.reads[:2], net.transport.reads[4])
    await net.source.expect(Settle)
    assert net.transport.calls == [("add", net.source.incarnation)]
    assert net.transfers.mover.num_reads_failed == 0


async def test_a_read_that_fails_ends_its_pull(net: Net) -> None:
    pull = await net.reading()
    net.transport.reads[0].fail("the peer is gone")
    assert [await net.worker.next() for _ in range(2)] == [("release", 0, 2), ("gave up", pull, Cause.TRANSFER)]
    assert net.counts == (0, 1, 1)


async def test_a_read_that_fails_leaves_those_that_go_on(net: Net) -> None:
    """They may have begun after it, by a connection that the transport has made for them. The source is offered to the
    transport again, which may have refused it, once for all reads that had begun."""
    await net.reading()
    net.transport.reads[0].fail("the peer is gone")
    offered = [("add", net.source.incarnation)] * 2
    await net.until(lambda: net.transport.calls == offered)
    assert net.transport.reads[1].state is ReadState.PENDING
    net.transport.reads[1].fail("the peer is gone")
    await net.until(lambda: net.counts == (0, 0, 0))
    net.worker.all_told()
    await net.reading(net.pull(R2))
    assert net.transport.calls == offered


async def test_a_read_that_brings_other_bytes_ends_its_pull_alone(net: Net) -> None:
    """It has ended by itself: the agent is sound, and other requests read by it. Bytes are others also if the source
    has released the blocks meanwhile, because the request has ended, and the sink is about to learn of it."""
    sums = net.worker.cache.region.crc32(range(8))
    for request, blocks in ((R1, (0, 1, 2)), (R2, (3, 4, 5))):
        pull = await net.attached(net.pull(request))
        theirs = tuple(sums[block] ^ (request == R1) for block in blocks)
        await net.source.send(ready(pull, 0, 10, checksums=theirs[:1]), ready(pull, 1, 11, 12, checksums=theirs[1:]))
        assert await net.worker.next() == ("want", pull, 3)
    await net.until(lambda: len(net.transport.reads) == 4)
    await net.source.send(done(net.pull(R1), "stop"))
    assert (await net.worker.next())[0] == "gave up"
    finish(net.transport.reads[0])
    assert await net.worker.next() == ("release", 0)
    assert net.counts == (1, 3, 2)
    finish(*net.transport.reads[1:])
    await net.source.send(done(pull))
    await net.source.expect(Settle)
    await net.source.send(settled(pull))
    assert [await net.worker.next() for _ in range(2)] == [("release", 1, 2), ("pulled", pull, (3, 4, 5), 1)]
    assert net.transport.calls == [("add", net.source.incarnation)]


async def test_a_checksum_that_differs_ends_a_pull_and_leaves_the_agent(net: Net) -> None:
    pull, other = await net.attached(), await net.reading(net.pull(R2))
    await net.source.send(ready(pull, 0, 10, 11, 12, checksums=(1, 2, 3)))
    await net.until(lambda: len(net.transport.reads) == 3)
    net.worker.all_told()
    finish(net.transport.reads[2])
    assert [await net.worker.next() for _ in range(2)] == [("release", 3, 4, 5), ("gave up", pull, Cause.TRANSFER)]
    assert (net.counts, net.transport.calls) == ((1, 2, 0), [("add", net.source.incarnation)])
    assert not other.over


async def test_blocks_that_stay_in_quarantine_are_fenced(net: Net) -> None:
    """The agent is replaced: each read from that source fails, and later ones may succeed."""
    stuck = [await net.reading(), await net.reading(net.pull(R2))]
    await net.poll(BOUND_S)  # only the time in quarantine counts
    for pull in stuck:
        net.pulls.abandon(pull, None, "aborted")
    net.worker.all_told()
    await net.poll(BOUND_S)
    await net.source.hear_all()
    assert net.counts == (0, 4, 4)
    await net.poll(POLL_S)
    assert sorted([await net.worker.next() for _ in range(4)]) == [("release", block) for block in (0, 1, 3, 4)]
    assert net.counts == (0, 0, 0)
    await net.reading()  # the mover has done all that came before
    source = net.source.incarnation
    assert net.transport.calls == [("add", source), ("drop", source), ("add", source)], "once for the source"


async def test_a_read_that_never_ends_is_given_up(net: Net) -> None:
    """Its source is there and answers; only the connection that it goes over is broken, and nobody is told."""
    net.now += 5.0  # nothing is read
    stuck = [await net.reading(), await net.reading(net.pull(R2))]
    net.worker.all_told()
    await net.poll(READ_BOUND_S)
    await net.source.hear_all()
    assert net.counts == (2, 4, 0)
    await net.poll(POLL_S)
    gave_up = [event for event in [await net.worker.next() for _ in range(6)] if event[0] == "gave up"]
    assert gave_up == [("gave up", pull, Cause.TRANSFER) for pull in stuck]
    await net.until(lambda: net.counts == (0, 0, 0))
    await net.reading()  # the mover has done all that came before
    source = net.source.incarnation
    assert net.transport.calls == [("add", source), ("drop", source), ("add", source)], "once for the source"


async def test_a_read_that_waits_for_others_of_its_source_is_not_given_up(net: Net) -> None:
    """They share one connection. What counts is that nothing has ended for so long."""
    pull = await net.reading()
    source = net.source.incarnation
    await net.poll(READ_BOUND_S - POLL_S)
    net.transport.reads[0].finish()
    await net.until(lambda: net.counts[1] == 1)
    await net.poll(READ_BOUND_S)
    assert net.transport.calls == [("add", source)]
    await net.poll(POLL_S)
    gave_up = [event for event in [await net.worker.next() for _ in range(2)] if event[0] == "gave up"]
    assert gave_up == [("gave up", pull, Cause.TRANSFER)]
    await net.until(lambda: net.transport.calls == [("add", source), ("drop", source), ("add", source)])


async def test_a_quarantined_read_behind_another_of_its_source_does_not_end_that_one(net: Net) -> None:
    """A transport may read in order: the time of the second read begins when the first one has ended."""
    first, second = await net.reading(), await net.reading(net.pull(R2))
    source = net.source.incarnation
    net.pulls.abandon(second, None, "aborted")
    net.worker.all_told()
    await net.poll(BOUND_S + POLL_S)
    assert net.transport.calls == [("add", source)]
    finish(*net.transport.reads[:2])
    await net.until(lambda: net.counts[1] == 2)
    await net.source.send(ready(first, 2, 12), done(first))
    await net.until(lambda: len(net.transport.reads) == 5)
    finish(net.transport.reads[4])
    await net.source.expect(Settle)
    await net.poll(BOUND_S - POLL_S)
    assert net.transport.calls == [("add", source)]
    await net.poll(2 * POLL_S)
    assert sorted([await net.worker.next() for _ in range(2)]) == [("release", 3), ("release", 4)]
    await net.until(lambda: net.transport.calls == [("add", source), ("drop", source), ("add", source)])


async def test_a_read_that_waits_for_reads_from_other_sources_is_not_given_up(net: Net) -> None:
    """Every agent that may exist reads from others. Their reads end, or are given up."""
    net.transport.waits = True
    await net.reading()
    source = net.source.incarnation
    await net.poll(2 * READ_BOUND_S)
    for read in net.transport.reads:
        read.waiting = False
    await net.poll(READ_BOUND_S)
    assert net.transport.calls == [("add", source)]
    await net.poll(POLL_S)
    await net.until(lambda: net.transport.calls == [("add", source), ("drop", source), ("add", source)])


@pytest.mark.parametrize("abandoned", [False, True])
async def test_no_read_is_given_up_while_memory_is_registered(
    net: Net, abandoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take a minute for a large cache. To give up the reads would begin it anew."""
    source, registered = net.source.incarnation, threading.Event()
    add_source = net.transport.add_source

    def register(source: Incarnation, metadata: bytes) -> None:
        assert registered.wait(WAIT_S)
        add_source(source, metadata)

    monkeypatch.setattr(net.transport, "add_source", register)
    pull = await net.attached()
    await net.source.send(ready(pull, 0, 10, 11, 12), done(pull))
    assert (await net.worker.next())[0] == "want"
    if abandoned:
        net.pulls.abandon(pull, None, "aborted")
    for _ in range(20):
        net.now += 2 * READ_BOUND_S / 20
        net.pulls.tick()
        await asyncio.sleep(0.005)
    assert (net.transport.calls, net.transport.reads) == ([], [])
    registered.set()
    await net.until(lambda: net.worker.num_polls == 1)
    await net.poll(POLL_S)
    assert net.transport.calls == [("add", source)]
    finish(*net.transport.reads)
    await net.source.expect(Detach if abandoned else Settle)


async def test_a_worker_that_stood_still_gives_up_no_read(net: Net) -> None:
    """Nobody knows what has arrived meanwhile. A sink that leaves in mid-read may take its source with it."""
    await net.reading()
    net.now += 10 * READ_BOUND_S
    await net.poll(POLL_S)
    assert (net.counts, net.transport.calls) == ((1, 2, 0), [("add", net.source.incarnation)])


async def test_closing_ends_every_read(net: Net) -> None:
    pull = await net.reading()
    await net.transfers.close()
    assert sorted(net.worker.free) == list(range(8))
    assert ("gave up", pull, Cause.TRANSFER) in net.worker.all_told()
    assert net.counts == (0, 0, 0)


async def test_transfers_that_were_never_started_can_be_closed() -> None:
    net = Net()
    await net.transfers.close()
    net.source.close()


# --- lost messages -----------------------------------------------------------------------------------------------


async def test_after_a_loss_every_pull_attaches_again_and_one_that_settles_asks_again(net: Net) -> None:
    settling = await net.settling()
    attaching = await net.attached(net.pull(R2))
    await net.source.send(HelloRequired())
    assert set((await net.source.welcome()).open_requests) == {settling.key, attaching.key}
    heard = [await net.source.expect(RequestMessage) for _ in range(3)]
    assert [(type(message), message.request) for message in heard] == [(Attach, R1), (Settle, R1), (Attach, R2)]
    await net.source.send(settled(settling))
    while (told := await net.worker.next())[0] != "pulled":
        pass
    assert told[1] is settling


# --- a worker that calls back ------------------------------------------------------------------------------------


async def test_released_blocks_may_be_reserved_at_once(net: Net) -> None:
    first = await net.reading()
    second = net.pull(R2)
    net.worker.makes_room = False
    await net.attached(second)
    await net.source.send(ready(second, 0, 20, num_blocks=1))
    await net.worker.next()
    net.worker.free = []
    net.worker.then["release"] = lambda: net.worker.make_room(second, 1)
    net.pulls.abandon(first, None, "aborted")
    await net.until(lambda: len(net.transport.reads) == 3)
    assert net.counts == (1, 3, 2)


async def test_a_request_may_begin_anew_when_it_is_given_up(net: Net) -> None:
    first = await net.attached()
    net.worker.then["gave up"] = lambda: net.pulls.begin(net.pull(attempt=2))
    await net.source.send(withdrawal(first))
    assert (await net.source.expect(Attach)).attempt == 2
    assert net.counts == (1, 0, 0)


async def test_a_pull_may_be_given_up_as_soon_as_it_wants_blocks(net: Net) -> None:
    pull = await net.attached()
    net.worker.makes_room = False
    net.worker.then["want"] = lambda: net.pulls.abandon(pull, Cause.TRANSFER, "more than the prompt has")
    await net.source.send(ready(pull, 0, 10))
    assert [await net.worker.next() for _ in range(2)] == [("want", pull, 3), ("gave up", pull, Cause.TRANSFER)]


async def test_pulls_that_are_lost_together_are_over_before_the_worker_is_told(net: Net) -> None:
    first, second = await net.attached(), await net.attached(net.pull(R2))
    net.worker.then["gave up"] = lambda: net.pulls.abandon(second, None, "of the same client")
    await net.source.send(Goodbye())
    assert [await net.worker.next() for _ in range(2)] == [
        ("gave up", first, Cause.WORKER_LOST),
        ("gave up", second, Cause.WORKER_LOST),
    ]


# --- bugs --------------------------------------------------------------------------------------------------------


async def test_a_dead_mover_ends_the_run(net: Net) -> None:
    bug = ZeroDivisionError("a bug")
    net.transport.raising["add_source"] = bug
    run = asyncio.create_task(net.transfers.run())
    net.pulls.begin(net.pull())
    await net.source.welcome()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(run, WAIT_S)
    del net.transport.raising["add_source"]


# --- with a lender at the other end ------------------------------------------------------------------------------


class Peer:
    """A worker that lends, over a real control channel and a real transport."""

    def __init__(self, kind: str) -> None:
        self.cache = Cache(8, 4096)
        self.cache.fill(3)
        me = new_incarnation()
        self.worker = Worker(lambda: make_transport(kind, self.cache.region, me), monotonic, self.cache)
        self.kind = kind
        self.references = [0] * 8
        self.server = ControlServer(me, monotonic, SETTINGS.pulse)
        self.at = Source(address=f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}", incarnation=me)
        self.lender = Lender(
            emit=self.carry_out,
            clock=monotonic,
            block_bytes=self.cache.region.block_bytes,
            find_prefix=self.find_prefix,
            checksum=self.cache.region.crc32,
        )

    def find_prefix(self, names: Sequence[BlockHash]) -> Sequence[int]:
        found = [5, 3, 6][: len(names)]
        for block in found:
            self.references[block] += 1
        return found

    def carry_out(self, decision: TransferAction | Consequence) -> None:
        match decision:
            case Send(peer, message):
                self.server.send(peer, message)
            case Serve():
                self.worker.transfers.carry_out(decision)
            case Released(block_ids) | Unpinned(_, block_ids, _):
                for block in block_ids:
                    self.references[block] -= 1
            case _:
                raise AssertionError(decision)

    def welcome(self) -> Welcome:
        return Welcome(
            role=Role.DECODE,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=1,
            transport="zmq",
            transport_metadata=self.worker.transfers.metadata,
            open_requests=(),
        )

    def on_open(self, peer: Incarnation, role: Role) -> None: ...

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        self.lender.on_hello(peer, hello.open_requests)
        return ()

    def on_message(self, peer: Incarnation, message: Message) -> None:
        assert isinstance(message, Attach | AttachPrefix | Settle | Detach)
        self.lender.on_message(peer, message)

    def on_peer_lost(self, peer: Incarnation) -> None:
        self.lender.on_peer_lost(peer)

    def heartbeat(self, number: int) -> Heartbeat:
        zero: dict[str, Any] = dict.fromkeys(("steps", "running", "waiting", "blocks_used", "blocks_total"), 0)
        return Heartbeat(number=number, **zero, phase=Phase.SERVING)

    async def __aenter__(self) -> Peer:
        await self.worker.transfers.start()
        self._serving = asyncio.create_task(self.server.run(self))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._serving.cancel()
        await self.worker.transfers.close()
        await self.server.close()


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
async def test_a_prefix_and_a_prompt_come_from_a_lender(kind: str) -> None:
    """Both sides name the transport `zmq`; what moves the blocks is `kind`."""
    cache = Cache(8, 4096)
    me = new_incarnation()
    sink = Worker(lambda: make_transport(kind, cache.region, me), monotonic, cache)
    async with Peer(kind) as peer:
        await sink.transfers.start()
        sink.num_held = 1
        prefix = Pull(peer.at, AttachPrefix(request=R1, attempt=1, block_hashes=tuple(HASHES)))
        sink.pulls.begin(prefix)
        assert await sink.next() == ("want", prefix, 3)
        assert await sink.next() == ("pulled", prefix, (0, 1, 2), 0)
        assert cache.is_poisoned([0]), "held, and so not read"
        assert cache.region.crc32([1, 2]) == peer.cache.region.crc32([3, 6])
        assert peer.references == [0] * 8

        sink.num_held = 0
        handoff = pull_of_prompt(RequestKey(R2, 1), peer.at)
        sink.pulls.begin(handoff)
        peer.references[1] += 1
        peer.lender.open(handoff.key, [1], monotonic() + 60.0)
        peer.lender.blocks_ready(R2, 1, peer.cache.region.crc32([1]))
        peer.lender.complete(R2, done(handoff).first_tokens)
        assert await sink.next() == ("want", handoff, 1)
        assert await sink.next() == ("pulled", handoff, (3,), 1)
        assert cache.region.crc32([3]) == peer.cache.region.crc32([1])
        assert (peer.references, peer.lender.num_leases, peer.lender.num_readers) == ([0] * 8, 0, 0)
        await sink.transfers.close()
        peer.lender.check_invariants()
    sink.pulls.check_invariants()


# --- a source that is known by two addresses ---------------------------------------------------------------------


class Alone:
    """Pulls without a shell: what they decide, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.decided: list[object] = []
        self.source = PlayedSource(new_incarnation())
        self.pulls = Pulls(
            emit=self.decided.append,
            clock=lambda: self.now,
            transport="zmq",
            block_bytes=2 * int(SLOWEST_READ_BYTES_PER_S),
            quarantine_bound_s=BOUND_S,
            read_bound_s=READ_BOUND_S,
        )

    def open(self, address: str, transport_metadata: bytes = b"how to") -> None:
        hello = Hello(number=0, role=Role.DECODE, fingerprint=FINGERPRINT, open_requests=())
        welcome = replace(self.source.answer(hello), transport_metadata=transport_metadata)
        self.pulls.handle(SourceOpened(address, self.source.incarnation, welcome))

    def pull(self, request: RequestId, address: str) -> Pull:
        at = Source(address=address, incarnation=self.source.incarnation)
        return pull_of_prompt(RequestKey(request, 1), at)

    def of(self, *kinds: type) -> list[object]:
        return [each for each in self.decided if isinstance(each, kinds)]


@pytest.fixture
async def alone() -> AsyncIterator[Alone]:
    subject = Alone()
    yield subject
    subject.source.close()


async def test_a_source_is_not_connected_again_under_another_address(alone: Alone) -> None:
    """It has one session with a worker, which a second link would take away from the first."""
    alone.open("a:1")
    alone.pulls.begin(pull := alone.pull(R1, "b:1"))
    assert not alone.of(Connect)
    (sent,) = alone.of(SendToSource)
    assert isinstance(sent, SendToSource)
    assert sent.address == "a:1"
    assert pull.key in alone.pulls.open_pulls("a:1")


async def test_a_source_that_is_lost_at_one_of_its_addresses_is_read_from_at_the_other(alone: Alone) -> None:
    """Both links were opened at the same time."""
    for request, address in ((R1, "a:1"), (R2, "b:1")):
        alone.pulls.begin(alone.pull(request, address))
    alone.open("a:1")
    alone.open("b:1")
    alone.decided.clear()
    alone.pulls.handle(SourceLost("a:1", alone.source.incarnation, Cause.WORKER_LOST, "silent"))
    assert [type(each) for each in alone.of(DropSource, AddSource)] == [DropSource, AddSource]
    assert alone.pulls.num_pulls == 1
    alone.decided.clear()
    alone.pulls.handle(SourceLost("b:1", alone.source.incarnation, Cause.WORKER_LOST, "silent"))
    assert [type(each) for each in alone.of(DropSource, AddSource)] == [DropSource]


# --- reads that nobody wants any more ----------------------------------------------------------------------------


async def test_each_read_of_a_pull_is_dropped_once_after_it_was_started(alone: Alone) -> None:
    alone.open("a:1")
    pulls = [alone.pull(request, "a:1") for request in (R1, R2)]
    for index, pull in enumerate(pulls):
        alone.pulls.begin(pull)
        alone.pulls.handle(SourceReceived(alone.source.incarnation, ready(pull, 0, 10, 11)))
        alone.pulls.reserve(pull, (3 * index, 3 * index + 1, 3 * index + 2))
        alone.pulls.handle(SourceReceived(alone.source.incarnation, ready(pull, 2, 12)))
    for _ in range(2):
        alone.pulls.abandon(pulls[1], None, "aborted")
    decided = alone.of(StartRead, DropRead)
    ids = [each.read_id for each in decided if isinstance(each, StartRead | DropRead)]
    assert [type(each) for each in decided] == [StartRead] * 4 + [DropRead] * 2
    assert (len(set(ids)), ids[2:4]) == (4, ids[4:])


# --- reads by a connection that was made after another had broken --------------------------------------------------


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
async def test_a_read_that_begins_after_another_has_failed_goes_on(
    alone: Alone, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by a connection that the transport has made for it. The pulls learn of the failure only then."""
    mine, theirs = Cache(8, 4096), Cache(8, 4096)
    theirs.fill(3)
    source = make_transport(kind, theirs.region, alone.source.incarnation)
    sink: Any = make_transport(kind, mine.region, new_incarnation())
    try:
        alone.open("a:1", source.metadata())
        for block, request in enumerate((R1, R2)):
            alone.pulls.begin(pull := alone.pull(request, "a:1"))
            alone.pulls.handle(SourceReceived(alone.source.incarnation, ready(pull, 0, 5 + block, num_blocks=1)))
            alone.pulls.reserve(pull, (block,))
        sink.add_source(alone.source.incarnation, source.metadata())
        first, second = [each for each in alone.decided if isinstance(each, StartRead)]
        broken = sink.start_read(first.source, first.source_blocks, first.sink_blocks)
        with monkeypatch.context() as patch:
            patch.setattr(sink._links[first.source], "poll", lambda: "the connection broke")
            sink.poll()
        assert broken.error == "the connection broke"
        sound = sink.start_read(second.source, second.source_blocks, second.sink_blocks)
        alone.decided.clear()
        alone.pulls.handle(ReadEnded(first.read_id, broken.error))
        for action in alone.of(AddSource, DropSource):
            match action:
                case AddSource(incarnation, metadata):
                    sink.add_source(incarnation, metadata)
                case DropSource(incarnation):
                    sink.drop_source(incarnation)
        async with asyncio.timeout(WAIT_S):
            while sound.state is ReadState.PENDING:
                source.poll()
                sink.poll()
                await asyncio.sleep(0)
        assert sound.error == ""
        assert mine.region.crc32([1]) == theirs.region.crc32([6])
    finally:
        sink.close()
        source.close()


# --- the size of a read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("abandoned", [False, True])
async def test_a_read_may_take_longer_the_more_it_brings(alone: Alone, abandoned: bool) -> None:
    """At the slowest rate each of its three blocks takes two seconds."""
    alone.open("a:1")
    alone.pulls.begin(pull := alone.pull(R1, "a:1"))
    alone.pulls.handle(SourceReceived(alone.source.incarnation, ready(pull, 0, 10, 11, 12)))
    alone.pulls.reserve(pull, (0, 1, 2))
    assert len(alone.of(StartRead)) == 1
    if abandoned:
        alone.pulls.abandon(pull, None, "aborted")
    bound_s = 6.0 + (BOUND_S if abandoned else READ_BOUND_S)
    while alone.now < bound_s:
        alone.now += POLL_S
        alone.pulls.handle(Polled(frozenset()))
    assert not alone.of(DropSource)
    alone.now += POLL_S
    alone.pulls.handle(Polled(frozenset()))
    assert len(alone.of(DropSource)) == 1
