"""The lending side of a worker: who is told what, whose references come back, and when the mover serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from common.contract.block_hashes import BlockHash, block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.handoff import (
    Attach,
    AttachPrefix,
    AttachSequence,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
)
from common.contract.messages.worker import Tokens
from kv_transfer import lender as lending
from kv_transfer.events import Consequence, LeaseDropped, Released, Send, Serve, TransferAction, Unpinned
from kv_transfer.lender import LENT_TTL_S, Lender
from kv_transfer.transport import SLOWEST_READ_BYTES_PER_S

R1, R2, PREFIX = RequestId("r1"), RequestId("r2"), RequestId("prefix")
D1, D2 = Incarnation("d1"), Incarnation("d2")
KEY = RequestKey(R1, 1)
TTL_S = 7.0
BLOCK_BYTES = 2 * int(SLOWEST_READ_BYTES_PER_S)
READ_S = 6.0
"""Seconds that the read of a prefix of three blocks may take: two for each."""
PREFIX_TTL_S = LENT_TTL_S + READ_S
"""Seconds for which such a prefix is lent while no other is."""
CACHED = block_hashes(range(12), 4)
"""Names of the blocks that the worker's cache holds."""
OTHER = block_hashes(range(100, 112), 4)


class Worker:
    """A worker around a lender: a cache with references, and what went out."""

    def __init__(self, *, checksums: bool = False) -> None:
        self.now = 100.0
        self.sent: list[tuple[Incarnation, Message]] = []
        self.serving: list[bool] = []
        self.announced: list[int] = []
        self.dropped: list[tuple[RequestKey, Cause]] = []
        self.unpinned: list[tuple[RequestKey, bool]] = []
        """(as it was opened, whether a sink has the blocks)."""
        self.references: Counter[int] = Counter()
        self.checksums = checksums
        self.lender = Lender(
            emit=self.handle,
            clock=lambda: self.now,
            block_bytes=BLOCK_BYTES,
            find_prefix=self.find_prefix,
            unattached_ttl_s=TTL_S,
            checksum=(lambda blocks: [1000 + block for block in blocks]) if checksums else None,
        )

    def find_prefix(self, names: Sequence[BlockHash]) -> Sequence[int]:
        """Block `i` of the cache is number `10 + i`."""
        found = []
        for index, (name, cached) in enumerate(zip(names, CACHED, strict=False)):
            if name != cached:
                break
            found.append(10 + index)
        self.references.update(found)
        return found

    def handle(self, decision: TransferAction | Consequence) -> None:
        match decision:
            case Send(peer, message):
                self.sent.append((peer, message))
            case Serve(serving, num_blocks):
                self.serving.append(serving)
                self.announced.append(num_blocks)
            case Released(block_ids):
                self.references.subtract(block_ids)
            case Unpinned(key, block_ids, settled):
                self.references.subtract(block_ids)
                self.unpinned.append((key, settled))
            case LeaseDropped(key, cause, message):
                self.dropped.append((key, cause))
                self.lender.withdraw(key.request, cause, message)  # as a worker does that ends the request
            case _:
                raise AssertionError(decision)

    def told(self) -> list[tuple[Incarnation, Message]]:
        """What went out since this was last asked."""
        told, self.sent = self.sent, []
        return told

    def open(self, request: RequestId = R1) -> None:
        """Compute a prompt of two blocks, to its end."""
        self.references.update([1, 2])
        self.lender.open(RequestKey(request, 1), [1, 2], self.now + 600.0)
        self.lender.blocks_ready(request, 2, [5, 6] if self.checksums else ())
        self.lender.complete(request, [Tokens(request=request, attempt=1, choice=0, position=9, token_ids=(5,))])

    @property
    def held(self) -> dict[int, int]:
        """References that somebody holds."""
        assert min(self.references.values(), default=0) >= 0, "given back twice"
        return {block: count for block, count in self.references.items() if count}

    def lend(self, request: RequestId = PREFIX, sink: Incarnation = D1) -> BlocksReady:
        """The offer of a prefix."""
        self.lender.on_message(sink, attach_prefix(request=request))
        [(to, offer)] = self.told()
        assert to == sink
        assert isinstance(offer, BlocksReady)
        return offer

    def metric(self, name: str) -> float:
        [value] = [metric.samples[0].value for metric in self.lender.metrics() if metric.name == name]
        return value


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Its invariants are checked at the end."""
    subject = Worker()
    yield subject
    subject.lender.check_invariants()


def attach_prefix(names: Sequence[BlockHash] = (*CACHED, *OTHER), request: RequestId = PREFIX) -> AttachPrefix:
    return AttachPrefix(request=request, attempt=1, block_hashes=tuple(names))


def settle(offer: BlocksReady) -> Settle:
    return Settle(request=offer.request, attempt=offer.attempt, lease=offer.lease, epoch=offer.epoch)


def kinds(told: list[tuple[Incarnation, Message]]) -> list[tuple[Incarnation, type]]:
    return [(sink, type(message)) for sink, message in told]


# --- offers of requests ------------------------------------------------------------------------------------------


def test_the_offer_of_a_request_from_attach_to_settle(worker: Worker) -> None:
    worker.lender.on_message(D1, Attach(request=R1, attempt=1, offered=1))
    assert (worker.told(), worker.lender.num_parked, worker.serving) == ([], 1, [])
    worker.open()
    told = worker.told()
    assert kinds(told) == [(D1, BlocksReady), (D1, BlocksReady), (D1, PrefillDone)]
    assert (worker.lender.num_leases, worker.lender.num_readers) == (1, 1)
    assert worker.serving == [True, True], "when the sink may begin to read, and when it learns of something to read"
    assert worker.announced == [0, 2]
    offer = told[0][1]
    assert isinstance(offer, BlocksReady)
    worker.lender.on_message(D1, settle(offer))
    [(_, verdict)] = worker.told()
    assert isinstance(verdict, Settled)
    assert verdict.valid
    assert (worker.held, worker.lender.num_leases, worker.serving) == ({}, 0, [True, True, False])
    assert worker.unpinned == [(KEY, True)]


def test_what_the_table_ends_by_itself_the_worker_hears_of(worker: Worker) -> None:
    worker.open()
    worker.lender.expire(100.0 + TTL_S - 0.1)
    assert worker.lender.num_leases == 1
    worker.lender.expire(100.0 + TTL_S)
    worker.open(R2)
    worker.lender.reclaim(1, worker.now)
    assert worker.dropped == [(KEY, Cause.LEASE_LOST), (RequestKey(R2, 1), Cause.LEASE_LOST)]
    assert worker.held == {}


def test_a_withdrawal_reaches_the_sink(worker: Worker) -> None:
    worker.open()
    worker.lender.on_message(D1, Attach(request=R1, attempt=1, offered=1))
    worker.told()
    worker.lender.withdraw(R1, Cause.CANCELLED, "aborted")
    assert kinds(worker.told()) == [(D1, OfferWithdrawn)]
    assert (worker.held, worker.unpinned) == ({}, [(KEY, False)])
    assert worker.serving == [True], "its read may be under way"
    worker.lender.on_message(D1, Detach(request=R1, attempt=1))
    assert worker.serving == [True, False]


def test_a_lost_sinks_offers_wait_for_another_and_what_was_lent_to_it_is_back(worker: Worker) -> None:
    worker.open()
    worker.lender.on_message(D1, Attach(request=R1, attempt=1, offered=1))
    worker.told()
    worker.lend()
    assert worker.held == {1: 1, 2: 1, 10: 1, 11: 1, 12: 1}
    worker.lender.on_peer_lost(D1)
    assert worker.held == {1: 1, 2: 1}
    assert worker.serving == [True, True, False]
    worker.lender.on_message(D2, Attach(request=R1, attempt=1, offered=1))
    assert kinds(worker.told()) == [(D2, BlocksReady), (D2, PrefillDone)]


def test_a_hello_keeps_what_it_lists(worker: Worker) -> None:
    worker.lend()
    worker.lender.on_hello(D1, (RequestKey(PREFIX, 1),))
    assert worker.held == {10: 1, 11: 1, 12: 1}
    worker.lender.on_hello(D1, (KEY,))
    assert worker.held == {}


def test_a_sink_that_comes_back_is_read_to_what_it_lists_until_it_detaches(worker: Worker) -> None:
    """It stood still, and its read, which was given up meanwhile, is still under way: it attaches to nothing again."""
    worker.open()
    worker.lender.on_message(D1, Attach(request=R1, attempt=1, offered=1))
    worker.lender.on_peer_lost(D1)
    assert (worker.lender.num_readers, worker.serving[-1]) == (0, False)
    worker.lender.on_hello(D1, (KEY,))
    assert (worker.lender.num_readers, worker.serving[-1]) == (1, True)
    worker.lender.on_message(D1, Detach(request=R1, attempt=1))
    assert (worker.lender.num_readers, worker.serving[-1]) == (0, False)


def test_another_sink_takes_over_what_a_prefill_has_offered(worker: Worker) -> None:
    worker.open()
    worker.lender.on_message(D1, Attach(request=R1, attempt=1, offered=1))
    worker.lender.on_peer_lost(D1)
    worker.told()
    worker.lender.on_message(D2, Attach(request=R1, attempt=2, offered=1))
    [(_, offer), (_, done)] = worker.told()
    assert isinstance(offer, BlocksReady)
    assert (offer.attempt, offer.block_ids, type(done)) == (2, (1, 2), PrefillDone)
    worker.lender.on_message(D2, settle(offer))
    assert worker.unpinned == [(KEY, True)], "the worker knows it by the attempt that it has opened"
    worker.told()
    worker.lender.on_message(D1, Attach(request=R1, attempt=3, offered=1))
    assert kinds(worker.told()) == [(D1, OfferWithdrawn)]
    assert worker.lender.num_parked == 0


def test_who_attaches_to_a_sequence_waits_until_it_is_offered(worker: Worker) -> None:
    key = RequestKey(R1, 2)
    worker.lender.expect(key, worker.now + 600.0)
    worker.lender.on_message(D1, AttachSequence(request=R1, attempt=2, sequence=KEY, choice=0, position=9))
    assert (worker.told(), worker.lender.awaits(key), worker.lender.awaits(KEY)) == ([], True, False)
    worker.lender.expire(worker.now + TTL_S)
    assert worker.lender.awaits(key), "it waits as long as the sequence may"
    worker.references.update([1])
    worker.lender.open(key, [1], worker.now + 600.0)
    assert kinds(worker.told()) == [(D1, BlocksReady)]
    assert not worker.lender.awaits(key)
    worker.lender.withdraw(R1, Cause.LEASE_LOST, "over")
    assert worker.unpinned == [(key, False)]


# --- cached prefixes ---------------------------------------------------------------------------------------------


def test_a_prefix_is_lent_as_far_as_it_is_cached(worker: Worker) -> None:
    offer = worker.lend()
    assert (offer.start, offer.block_ids, offer.num_blocks, offer.checksums) == (0, (10, 11, 12), 3, None)
    assert worker.held == {10: 1, 11: 1, 12: 1}
    assert worker.serving == [True]
    worker.lender.on_message(D1, settle(offer))
    [(_, verdict)] = worker.told()
    assert isinstance(verdict, Settled)
    assert verdict.valid
    assert (worker.held, worker.serving) == ({}, [True, False])


def test_two_sinks_may_have_the_same_prefix(worker: Worker) -> None:
    first, second = worker.lend(), worker.lend(R2, D2)
    assert worker.held == {10: 2, 11: 2, 12: 2}
    assert first.lease != second.lease
    worker.lender.on_message(D1, settle(first))
    worker.lender.on_message(D2, settle(second))
    assert [isinstance(message, Settled) and message.valid for _, message in worker.told()] == [True, True]
    assert worker.held == {}


def test_a_prefix_that_is_asked_for_again_is_lent_once(worker: Worker) -> None:
    offer = worker.lend()
    worker.now += 5.0
    assert worker.lend() == offer
    assert worker.held == {10: 1, 11: 1, 12: 1}
    worker.lender.expire(100.0 + PREFIX_TTL_S - 0.1)
    assert worker.lender.num_leases == 1
    assert worker.metric("baton_prefixes_lent") == 1


def test_a_prefix_that_nobody_has_is_refused(worker: Worker) -> None:
    worker.lender.on_message(D1, attach_prefix(OTHER))
    [(sink, refused)] = worker.told()
    assert isinstance(refused, OfferWithdrawn)
    assert (sink, refused.cause) == (D1, Cause.LEASE_LOST)
    assert refused.message == "nothing of this prefix is cached or can be spared"
    assert (worker.lender.num_leases, worker.lender.num_parked, worker.serving) == (0, 0, [])


def test_a_prefix_is_lent_for_so_long_and_only_its_sink_is_told(worker: Worker) -> None:
    worker.lend()
    worker.lender.expire(100.0 + PREFIX_TTL_S - 0.1)
    assert worker.held
    worker.lender.expire(100.0 + PREFIX_TTL_S)
    assert kinds(worker.told()) == [(D1, OfferWithdrawn)]
    assert (worker.held, worker.dropped) == ({}, [])
    assert worker.serving == [True], "its read may be under way"
    assert worker.metric("baton_leases_expired") == 1


def test_a_prefix_is_lent_for_longer_while_others_are_lent(worker: Worker) -> None:
    """Its read may wait for theirs. Offers of requests, and what is back, do not count."""
    worker.open()
    worker.lender.on_message(D1, settle(worker.lend()))
    worker.told()
    worker.lend(RequestId("p0"))
    worker.lend(RequestId("p1"), D2)
    worker.lender.expire(100.0 + PREFIX_TTL_S)
    assert kinds(worker.told()) == [(D1, OfferWithdrawn)]
    worker.lender.expire(100.0 + PREFIX_TTL_S + READ_S - 0.1)
    assert worker.held == {10: 1, 11: 1, 12: 1}
    worker.lender.expire(100.0 + PREFIX_TTL_S + READ_S)
    assert kinds(worker.told()) == [(D2, OfferWithdrawn)]
    assert worker.held == {}


def test_a_prefix_that_is_given_up_is_back_at_once(worker: Worker) -> None:
    worker.lend()
    worker.lender.on_message(D1, Detach(request=PREFIX, attempt=1))
    assert (worker.held, worker.serving) == ({}, [True, False])


def test_so_many_prefixes_are_lent_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MAX_LENT", 2)
    worker.open()  # does not count
    offer = worker.lend(RequestId("p0"))
    worker.lend(RequestId("p1"))
    worker.lender.on_message(D1, attach_prefix(request=RequestId("p2")))
    [(_, refused)] = worker.told()
    assert isinstance(refused, OfferWithdrawn)
    assert refused.cause is Cause.CAPACITY
    assert worker.held == {1: 1, 2: 1, 10: 2, 11: 2, 12: 2}
    assert worker.lend(RequestId("p0")) == offer, "it has its place already"
    worker.lender.on_message(D1, settle(offer))
    worker.told()
    worker.lend(RequestId("p2"))


def test_the_name_of_a_request_is_no_name_for_a_prefix(worker: Worker) -> None:
    worker.open()
    worker.lender.on_message(D1, attach_prefix(request=R1))
    [(_, refused)] = worker.told()
    assert isinstance(refused, OfferWithdrawn)
    assert refused.cause is Cause.SUPERSEDED
    assert worker.held == {1: 1, 2: 1}


def test_a_request_that_bears_the_name_of_a_prefix_loses_nothing(worker: Worker) -> None:
    worker.lend(R1)
    worker.open()
    assert kinds(worker.told()) == [(D1, OfferWithdrawn)]
    assert worker.held == {1: 1, 2: 1}


def test_with_checksums_lent_blocks_have_theirs() -> None:
    worker = Worker(checksums=True)
    assert worker.lend().checksums == (1010, 1011, 1012)
    worker.open()
    worker.lender.on_message(D2, Attach(request=R1, attempt=1, offered=1))
    offer = worker.told()[0][1]
    assert isinstance(offer, BlocksReady)
    assert offer.checksums == (5, 6)
    worker.lender.check_invariants()


def test_metrics_of_what_is_held(worker: Worker) -> None:
    worker.open()
    worker.lend()
    worker.lender.on_message(D2, Attach(request=R2, attempt=1, offered=1))
    assert {metric.name: metric.samples[0].value for metric in worker.lender.metrics()} == {
        "baton_leases": 2,
        "baton_readers": 1,
        "baton_lease_blocks": 5,
        "baton_attaches_parked": 1,
        "baton_leases_expired": 0,
        "baton_leases_reclaimed": 0,
        "baton_prefixes_lent": 1,
    }
