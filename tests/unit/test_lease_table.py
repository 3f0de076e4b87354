"""The lease table: each transition, and what each party is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import pytest
from next_times import next_expiry

from common.contract.block_hashes import BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages.fields import FinishReason, Message
from common.contract.messages.gateway import Source
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
from kv_transfer import lease_table, parked
from kv_transfer.events import LeaseDropped, PullFailed, Released, Send, Unpinned
from kv_transfer.lease_table import LeaseAction, LeaseTable
from kv_transfer.pull import Pull

R1, R2 = RequestId("r1"), RequestId("r2")
D1, D2 = Incarnation("d1"), Incarnation("d2")
TTL_S = 30.0
BLOCKS = (10, 11, 12)
M = TypeVar("M", bound=Message)


@pytest.fixture
def table() -> Iterator[LeaseTable]:
    """A table, whose invariants are checked at the end."""
    leases = LeaseTable(unattached_ttl_s=TTL_S)
    yield leases
    leases.check_invariants()


def sums_of(blocks: Sequence[int]) -> list[int]:
    """Their checksums, where it does not matter what is in them."""
    return [100 + block for block in blocks]


def key(attempt: int = 1, request: RequestId = R1) -> RequestKey:
    return RequestKey(request, attempt)


def attach(attempt: int = 1, request: RequestId = R1, *, offered: int | None = None) -> Attach:
    """For the Prefill of the same attempt, or of the one `offered`."""
    return Attach(request=request, attempt=attempt, offered=attempt if offered is None else offered)


def first_token(reason: FinishReason | None = None, choice: int = 0, attempt: int = 1) -> Tokens:
    return Tokens(request=R1, attempt=attempt, choice=choice, position=9, token_ids=(5,), finish_reason=reason)


@overload
def opened(table: LeaseTable, attempt: int = 1, *, sink: Incarnation = D1) -> BlocksReady: ...
@overload
def opened(table: LeaseTable, attempt: int = 1, *, sink: None) -> None: ...
def opened(table: LeaseTable, attempt: int = 1, *, sink: Incarnation | None = D1) -> BlocksReady | None:
    """Open a lease on `BLOCKS` for R1 at 0 s, with `sink` attached; the offer that the sink was sent."""
    assert table.open(key(attempt), BLOCKS, deadline=600.0, now=0.0) == []
    if sink is None:
        return None
    to, offer = only(BlocksReady, table.attach(attach(attempt), sink, 0.0))
    assert to == sink
    return offer


@overload
def completed(table: LeaseTable, attempt: int = 1, *, sink: Incarnation = D1) -> BlocksReady: ...
@overload
def completed(table: LeaseTable, attempt: int = 1, *, sink: None) -> None: ...
def completed(table: LeaseTable, attempt: int = 1, *, sink: Incarnation | None = D1) -> BlocksReady | None:
    """As `opened`, with every block ready and the first token known."""
    offer = opened(table, attempt, sink=sink)
    table.blocks_ready(R1, len(BLOCKS), now=0.0)
    table.complete(R1, [first_token()])
    return offer


def settle(offer: BlocksReady, **changes: object) -> Settle:
    fields: dict[str, Any] = {"request": R1, "attempt": offer.attempt, "lease": offer.lease, "epoch": offer.epoch}
    return Settle(**fields | changes)


def verdict(actions: list[LeaseAction]) -> bool:
    """What the asker was told."""
    [answer] = [each.message for each in actions if isinstance(each, Send) and isinstance(each.message, Settled)]
    return answer.valid


def sent(actions: list[LeaseAction]) -> list[tuple[Incarnation, Message]]:
    """(sink, message) of actions that are nothing but messages."""
    messages = [(each.peer, each.message) for each in actions if isinstance(each, Send)]
    assert len(messages) == len(actions), actions
    return messages


def only(kind: type[M], actions: list[LeaseAction]) -> tuple[Incarnation, M]:
    """(sink, message) of the one action, a message of this kind."""
    [(to, message)] = sent(actions)
    assert isinstance(message, kind)
    return to, message


def told(actions: list[LeaseAction]) -> list[tuple[Incarnation, type]]:
    """Who was told what kind of thing."""
    return [(each.peer, type(each.message)) for each in actions if isinstance(each, Send)]


def withdrawals(actions: list[LeaseAction]) -> list[tuple[Incarnation, int, Cause]]:
    """(sink, attempt, cause) of each withdrawal."""
    return [
        (each.peer, each.message.attempt, each.message.cause)
        for each in actions
        if isinstance(each, Send) and isinstance(each.message, OfferWithdrawn)
    ]


def unpinned(actions: list[LeaseAction]) -> list[tuple[int, ...]]:
    return [each.block_ids for each in actions if isinstance(each, Unpinned)]


# --- the offer ---------------------------------------------------------------------------------------------------


def test_an_offer_is_told_block_by_block(table: LeaseTable) -> None:
    offer = opened(table)
    assert (offer.start, offer.block_ids, offer.num_blocks, offer.checksums) == (0, (), 3, None)
    _, more = only(BlocksReady, table.blocks_ready(R1, 2, now=1.0))
    assert (more.lease, more.epoch, more.start, more.block_ids) == (offer.lease, offer.epoch, 0, (10, 11))
    _, last = only(BlocksReady, table.blocks_ready(R1, 3, now=2.0))
    assert (last.start, last.block_ids) == (2, (12,))
    [(to, done)] = sent(table.complete(R1, [first_token()]))
    assert to == D1
    assert done == PrefillDone(
        request=R1, attempt=1, lease=offer.lease, epoch=offer.epoch, first_tokens=(first_token(),)
    )
    assert (table.num_readers, table.num_blocks) == (1, 3)


def test_a_chunk_that_completes_no_block_is_not_announced(table: LeaseTable) -> None:
    opened(table)
    table.blocks_ready(R1, 1, now=0.0)
    assert table.blocks_ready(R1, 1, now=1.0) == []


def test_an_attach_before_the_prefill_is_parked_and_answered(table: LeaseTable) -> None:
    assert table.attach(attach(), D1, 0.0) == []
    assert (len(table.parked), len(table)) == (1, 0)
    to, offer = only(BlocksReady, table.open(key(), BLOCKS, 600.0, now=1.0))
    assert (to, offer.block_ids, offer.num_blocks) == (D1, (), 3)
    assert (len(table.parked), table.num_readers) == (0, 1)


def test_a_late_attach_is_told_everything(table: LeaseTable) -> None:
    completed(table, sink=None)
    [(_, ready), (_, done)] = sent(table.attach(attach(), D1, 5.0))
    assert isinstance(ready, BlocksReady)
    assert (ready.start, ready.block_ids) == (0, BLOCKS)
    assert isinstance(done, PrefillDone)


def test_a_repeated_attach_is_told_everything_again(table: LeaseTable) -> None:
    offer = opened(table)
    table.blocks_ready(R1, 2, now=1.0)
    to, again = only(BlocksReady, table.attach(attach(), D1, 2.0))
    assert (to, again.lease, again.epoch, again.start, again.block_ids) == (D1, offer.lease, offer.epoch, 0, (10, 11))
    assert table.num_readers == 1


def test_checksums_travel_with_their_blocks() -> None:
    table = LeaseTable(unattached_ttl_s=TTL_S, checksum=sums_of)
    offer = opened(table)
    assert offer.checksums == ()
    _, first = only(BlocksReady, table.blocks_ready(R1, 2, [7, 8], now=0.0))
    _, second = only(BlocksReady, table.blocks_ready(R1, 3, [9], now=0.0))
    assert (first.checksums, second.checksums) == ((7, 8), (9,))
    _, again = only(BlocksReady, table.attach(attach(), D1, 1.0))
    assert (again.block_ids, again.checksums) == (BLOCKS, (7, 8, 9))
    table.open(key(request=R2), BLOCKS, 600.0, 1.0)
    with pytest.raises(AssertionError, match="checksum"):
        table.blocks_ready(R2, 2, [7], now=1.0)


def test_checksums_that_are_not_given_are_computed() -> None:
    table = LeaseTable(unattached_ttl_s=TTL_S, checksum=sums_of)
    opened(table)
    _, first = only(BlocksReady, table.blocks_ready(R1, 2, now=0.0))
    _, second = only(BlocksReady, table.blocks_ready(R1, 3, now=0.0))
    assert (first.checksums, second.checksums) == ((110, 111), (112,))


def test_blocks_do_not_become_unready(table: LeaseTable) -> None:
    opened(table)
    table.blocks_ready(R1, 2, now=0.0)
    for num_ready in (1, 4):
        with pytest.raises(AssertionError):
            table.blocks_ready(R1, num_ready, now=0.0)


def test_an_offer_is_complete_only_with_every_block(table: LeaseTable) -> None:
    opened(table)
    table.blocks_ready(R1, 2, now=0.0)
    with pytest.raises(AssertionError, match="ready 2"):
        table.complete(R1, [first_token()])


def test_a_request_has_one_lease(table: LeaseTable) -> None:
    opened(table)
    with pytest.raises(AssertionError, match="open 3 blocks"):
        table.open(key(), BLOCKS, 600.0, 0.0)


def test_a_lease_whose_choices_have_all_ended_ends(table: LeaseTable) -> None:
    opened(table)
    table.blocks_ready(R1, 3, now=0.0)
    tokens = [first_token("stop"), first_token("length", choice=1)]
    actions = table.complete(R1, tokens)
    assert told(actions) == [(D1, PrefillDone)]
    assert unpinned(actions) == [BLOCKS]
    assert len(table) == 0


def test_a_lease_with_one_choice_going_on_is_kept(table: LeaseTable) -> None:
    opened(table)
    table.blocks_ready(R1, 3, now=0.0)
    actions = table.complete(R1, [first_token("stop"), first_token(None, choice=1)])
    assert unpinned(actions) == []
    assert len(table) == 1


# --- settling ----------------------------------------------------------------------------------------------------


def test_a_valid_settle_ends_the_lease(table: LeaseTable) -> None:
    offer = completed(table)
    actions = table.settle(settle(offer), D1)
    assert actions[0] == Send(D1, Settled(request=R1, attempt=1, lease=offer.lease, epoch=offer.epoch, valid=True))
    assert unpinned(actions) == [BLOCKS]
    assert len(table) == 0


def test_a_settle_is_answered_the_same_again_and_unpins_once(table: LeaseTable) -> None:
    offer = completed(table)
    assert verdict(table.settle(settle(offer), D1))
    for _ in range(3):
        actions = table.settle(settle(offer), D1)
        assert verdict(actions)
        assert unpinned(actions) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": LeaseId("another")},
        {"epoch": 99},
        {"epoch": 0},
        {"attempt": 2},
        {"request": R2},
    ],
    ids=["another lease", "a later epoch", "an earlier epoch", "another attempt", "another request"],
)
def test_a_settle_must_name_the_lease_as_it_is(table: LeaseTable, changes: dict[str, object]) -> None:
    offer = completed(table)
    actions = table.settle(settle(offer, **changes), D1)
    assert not verdict(actions)
    assert unpinned(actions) == []
    assert verdict(table.settle(settle(offer), D1)), "a wrong settle harms no right one"


@pytest.mark.parametrize(
    "changes",
    [{"lease": LeaseId("another")}, {"epoch": 99}, {"attempt": 2}, {"request": R2}],
    ids=["another lease", "another epoch", "another attempt", "another request"],
)
def test_a_repeated_settle_must_name_the_lease_as_it_was(table: LeaseTable, changes: dict[str, object]) -> None:
    """A stale attempt is fenced also after the end: what it read may have been read after the lease had ended."""
    offer = completed(table)
    assert verdict(table.settle(settle(offer), D1))
    assert not verdict(table.settle(settle(offer, **changes), D1))


def test_a_stale_attempt_of_the_same_sink_is_never_told_valid(table: LeaseTable) -> None:
    """Its reads may still be under way while the newer attempt settles and the blocks are reused."""
    offer = completed(table)
    table.attach(attach(2, offered=1), D1, 1.0)
    assert not verdict(table.settle(settle(offer), D1)), "the newer attempt has the lease"
    assert verdict(table.settle(settle(offer, attempt=2), D1))
    assert not verdict(table.settle(settle(offer), D1)), "the lease has ended, and the stale attempt asks again"


def test_only_the_attached_sink_settles(table: LeaseTable) -> None:
    offer = completed(table)
    assert not verdict(table.settle(settle(offer), D2))
    assert verdict(table.settle(settle(offer), D1))
    assert not verdict(table.settle(settle(offer), D2))


def test_nothing_is_valid_before_the_offer_is_complete(table: LeaseTable) -> None:
    offer = opened(table)
    table.blocks_ready(R1, 3, now=0.0)
    assert not verdict(table.settle(settle(offer), D1))
    table.complete(R1, [first_token()])
    assert verdict(table.settle(settle(offer), D1))


def test_nothing_is_valid_under_a_later_lease_on_the_same_request(table: LeaseTable) -> None:
    offer = completed(table)
    table.withdraw(R1, Cause.SUPERSEDED, "a newer attempt arrived")
    later = completed(table, attempt=2)
    assert later.epoch > offer.epoch
    assert later.lease != offer.lease
    assert not verdict(table.settle(settle(offer), D1))
    assert not verdict(table.settle(settle(later, epoch=offer.epoch), D1))
    assert verdict(table.settle(settle(later), D1))


def test_an_unknown_lease_is_invalid(table: LeaseTable) -> None:
    assert not verdict(table.settle(Settle(request=R1, attempt=1, lease=LeaseId("l"), epoch=1), D1))


def test_tombstones_are_bounded_and_a_forgotten_settle_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_TOMBSTONES", 2)
    table = LeaseTable(unattached_ttl_s=TTL_S)
    offers = []
    for _ in range(3):
        offers.append(completed(table))
        assert verdict(table.settle(settle(offers[-1]), D1))
        table.check_invariants()
    assert [verdict(table.settle(settle(offer), D1)) for offer in offers] == [False, True, True]


def test_a_sink_that_was_lost_here_alone_attaches_and_settles(table: LeaseTable) -> None:
    """The lease was held all the while: what the sink has read is good, whatever became of its session."""
    offer = completed(table)
    table.sink_lost(D1, 5.0)
    table.sink_said_hello(D1, {key()}, 6.0)
    assert told(table.attach(attach(), D1, 6.0)) == [(D1, BlocksReady), (D1, PrefillDone)]
    assert verdict(table.settle(settle(offer), D1))
    assert (len(table), table.num_readers) == (0, 0)


def test_a_sink_that_attaches_only_to_hear_its_verdict_again_is_not_kept_waiting(table: LeaseTable) -> None:
    offer = completed(table)
    assert verdict(table.settle(settle(offer), D1))
    assert table.attach(attach(), D1, 5.0) == []
    assert verdict(table.settle(settle(offer), D1))
    assert (len(table.parked), next_expiry(table)) == (0, math.inf)


@pytest.mark.parametrize(("attempt", "sink"), [(1, D2), (2, D1)], ids=["another sink", "another attempt"])
def test_a_settle_takes_back_no_attach_but_its_own(table: LeaseTable, attempt: int, sink: Incarnation) -> None:
    table.attach(attach(attempt), sink, 0.0)
    assert not verdict(table.settle(Settle(request=R1, attempt=1, lease=LeaseId("l"), epoch=1), D1))
    assert len(table.parked) == 1


# --- who is attached ---------------------------------------------------------------------------------------------


def test_a_second_sink_supersedes_the_first(table: LeaseTable) -> None:
    offer = completed(table)
    actions = table.attach(attach(), D2, 1.0)
    assert told(actions) == [(D1, OfferWithdrawn), (D2, BlocksReady), (D2, PrefillDone)]
    assert withdrawals(actions) == [(D1, 1, Cause.SUPERSEDED)]
    assert not verdict(table.settle(settle(offer), D1))
    assert verdict(table.settle(settle(offer), D2))


def test_a_newer_attempt_takes_the_lease_over(table: LeaseTable) -> None:
    """Late binding: nothing is computed again."""
    offer = completed(table)
    actions = table.attach(attach(2, offered=1), D2, 1.0)
    assert withdrawals(actions) == [(D1, 1, Cause.SUPERSEDED)]
    [ready] = [each.message for each in actions[1:2] if isinstance(each, Send)]
    assert isinstance(ready, BlocksReady)
    assert ready.attempt == 2
    assert ready.lease == offer.lease
    assert not verdict(table.settle(settle(offer), D1))
    assert not verdict(table.settle(settle(offer), D2)), "the lease has moved on to attempt 2"
    assert verdict(table.settle(settle(offer, attempt=2), D2))


def test_an_older_attempt_is_turned_away(table: LeaseTable) -> None:
    offer = completed(table, attempt=2)
    actions = table.attach(attach(1), D2, 1.0)
    assert withdrawals(actions) == [(D2, 1, Cause.SUPERSEDED)]
    assert len(actions) == 1
    assert verdict(table.settle(settle(offer), D1))


def test_a_detached_sink_is_told_nothing_and_settles_nothing(table: LeaseTable) -> None:
    offer = opened(table)
    assert table.detach(Detach(request=R1, attempt=1), D1, 1.0) == []
    assert table.blocks_ready(R1, 3, now=2.0) == []
    assert table.complete(R1, [first_token()]) == []
    assert not verdict(table.settle(settle(offer), D1))
    assert table.num_readers == 0
    assert len(table) == 1, "the lease waits for another sink"
    assert told(table.attach(attach(), D2, 3.0)) == [(D2, BlocksReady), (D2, PrefillDone)]


@pytest.mark.parametrize(("attempt", "sink"), [(1, D2), (2, D1)], ids=["another sink", "another attempt"])
def test_a_detach_of_somebody_else_is_inert(table: LeaseTable, attempt: int, sink: Incarnation) -> None:
    offer = completed(table)
    assert table.detach(Detach(request=R1, attempt=attempt), sink, 1.0) == []
    assert verdict(table.settle(settle(offer), D1))


def test_a_stale_detach_does_not_undo_a_newer_attach(table: LeaseTable) -> None:
    offer = completed(table)
    table.attach(attach(2, offered=1), D1, 1.0)
    table.detach(Detach(request=R1, attempt=1), D1, 2.0)
    assert verdict(table.settle(settle(offer, attempt=2), D1))


def test_a_detach_takes_a_parked_attach_back(table: LeaseTable) -> None:
    table.attach(attach(), D1, 0.0)
    table.detach(Detach(request=R1, attempt=1), D2, 0.0)
    assert len(table.parked) == 1
    table.detach(Detach(request=R1, attempt=1), D1, 0.0)
    assert len(table.parked) == 0
    assert table.open(key(), BLOCKS, 600.0, 1.0) == []


def test_a_lost_sink_is_detached_from_everything(table: LeaseTable) -> None:
    offer = completed(table)
    table.attach(attach(request=R2), D1, 0.0)
    table.open(key(request=RequestId("r3")), (20,), 600.0, 0.0)
    table.attach(attach(request=RequestId("r3")), D2, 0.0)
    assert table.sink_lost(D1, 5.0) == []
    assert (len(table.parked), table.num_readers, len(table)) == (0, 1, 2)
    assert not verdict(table.settle(settle(offer), D1))
    assert next_expiry(table) == 5.0 + TTL_S


def test_a_sink_that_says_hello_keeps_what_it_names(table: LeaseTable) -> None:
    offer = completed(table)
    table.attach(attach(request=R2), D1, 0.0)
    assert table.sink_said_hello(D1, {key(), key(request=R2)}, 5.0) == []
    assert (len(table.parked), table.num_readers) == (1, 1)
    assert verdict(table.settle(settle(offer), D1))


def test_a_sink_that_says_hello_gives_up_what_it_does_not_name(table: LeaseTable) -> None:
    """Its Detach was lost: the lease must not be held for a sink that has forgotten it."""
    offer = completed(table, attempt=2)
    table.attach(attach(request=R2), D1, 0.0)
    assert table.sink_said_hello(D1, {key(1)}, 5.0) == [], "an older attempt is not what holds the lease"
    assert (len(table.parked), table.num_readers) == (0, 0)
    assert next_expiry(table) == 5.0 + TTL_S
    assert not verdict(table.settle(settle(offer), D1))


def test_another_sink_that_says_hello_changes_nothing(table: LeaseTable) -> None:
    offer = completed(table)
    table.sink_said_hello(D2, (), 5.0)
    table.sink_lost(D2, 6.0)
    assert verdict(table.settle(settle(offer), D1))


# --- readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["open", "expired", "lent"])
def test_a_reader_that_was_lost_is_one_again_if_its_hello_says_so(table: LeaseTable, how: str) -> None:
    """Its read, and nothing else, is left of the pull: nobody attaches again."""
    if how == "lent":
        lent(table)
    else:
        completed(table)
    table.sink_lost(D1, 1.0)
    assert table.num_readers == 0
    if how == "expired":
        table.expire(700.0)
    table.sink_said_hello(D2, {key()}, 701.0)
    assert table.num_readers == 0, "another sink has never read it"
    table.sink_said_hello(D1, {key(), key(request=R2)}, 702.0)
    assert table.num_readers == 1
    table.sink_lost(D1, 703.0)
    table.sink_said_hello(D1, {key()}, 704.0)
    assert table.num_readers == 1
    table.detach(Detach(request=R1, attempt=1), D1, 705.0)
    table.sink_said_hello(D1, {key()}, 706.0)
    assert table.num_readers == 0


def test_a_reader_that_was_lost_and_does_not_name_its_pull_is_none(table: LeaseTable) -> None:
    completed(table)
    table.sink_lost(D1, 1.0)
    table.sink_said_hello(D1, (), 2.0)
    table.sink_said_hello(D1, {key()}, 3.0)
    assert table.num_readers == 0


def test_readers_that_were_lost_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_LOST_READERS", 2)
    table = LeaseTable(unattached_ttl_s=TTL_S)
    keys = [key(request=RequestId(f"r{number}")) for number in range(3)]
    for each in keys:
        table.open(each, BLOCKS, 600.0, 0.0)
        table.attach(attach(request=each.request), D1, 0.0)
        table.sink_lost(D1, 1.0)
        table.sink_said_hello(D2, (), 1.0)
        table.check_invariants()
    table.sink_said_hello(D1, keys, 2.0)
    assert table.num_readers == 2


def test_a_sink_reads_until_it_has_settled(table: LeaseTable) -> None:
    assert table.attach(attach(), D1, 0.0) == []
    assert table.num_readers == 0, "there is nothing to read yet"
    table.detach(Detach(request=R1, attempt=1), D1, 0.0)
    offer = completed(table)
    assert table.num_readers == 1
    table.settle(settle(offer), D1)
    assert table.num_readers == 0


@pytest.mark.parametrize("end", ["withdrawn", "superseded", "expired", "ended by the first token"])
def test_a_sink_reads_until_it_says_that_it_does_not(table: LeaseTable, end: str) -> None:
    """Whatever becomes of the lease: a read under way needs this worker's progress to come to its end."""
    opened(table)
    if end == "withdrawn":
        table.withdraw(R1, Cause.CANCELLED, "aborted")
    elif end == "superseded":
        table.attach(attach(), D2, 1.0)
        table.detach(Detach(request=R1, attempt=1), D2, 1.0)
    elif end == "expired":
        table.expire(600.0)
    else:
        table.blocks_ready(R1, 3, now=0.0)
        table.complete(R1, [first_token("stop")])
    assert table.num_readers == 1
    table.detach(Detach(request=R1, attempt=1), D2, 2.0)
    assert table.num_readers == 1, "another sink's detach"
    table.detach(Detach(request=R1, attempt=1), D1, 2.0)
    assert table.num_readers == 0


# --- parked attaches ---------------------------------------------------------------------------------------------


def test_an_attach_whose_prefill_never_comes_is_refused(table: LeaseTable) -> None:
    table.attach(attach(), D1, 1.0)
    assert next_expiry(table) == 1.0 + TTL_S
    assert table.expire(1.0 + TTL_S - 0.1) == []
    assert withdrawals(table.expire(1.0 + TTL_S)) == [(D1, 1, Cause.LEASE_LOST)]
    assert len(table.parked) == 0
    assert next_expiry(table) == math.inf


def test_parked_attaches_are_bounded_and_the_oldest_is_told(table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "MAX_PARKED", 2)
    for number in range(2):
        assert table.attach(attach(request=RequestId(f"p{number}")), D1, float(number)) == []
    actions = table.attach(attach(request=RequestId("p2")), D2, 2.0)
    to, message = only(OfferWithdrawn, actions)
    assert (to, message.request, message.cause) == (D1, "p0", Cause.CAPACITY)
    assert len(table.parked) == 2


def test_a_withdrawal_reaches_a_parked_sink(table: LeaseTable) -> None:
    table.attach(attach(), D1, 0.0)
    table.parked.expect(key(), 600.0)
    assert withdrawals(table.withdraw(R1, Cause.TOO_LARGE, "no")) == [(D1, 1, Cause.TOO_LARGE)]
    assert len(table.parked) == 0


def test_an_attach_that_is_parked_again_is_parked_once(table: LeaseTable) -> None:
    table.attach(attach(), D1, 0.0)
    assert table.attach(attach(), D1, 10.0) == []
    assert len(table.parked) == 1
    assert next_expiry(table) == 10.0 + TTL_S
    assert told(table.open(key(), BLOCKS, 600.0, 11.0)) == [(D1, BlocksReady)]


def test_a_parked_newer_attempt_is_given_the_lease(table: LeaseTable) -> None:
    table.attach(attach(2, offered=1), D1, 0.0)
    to, offer = only(BlocksReady, table.open(key(1), BLOCKS, 600.0, 1.0))
    assert (to, offer.attempt) == (D1, 2)


def test_a_stale_attach_does_not_replace_a_newer_parked_one(table: LeaseTable) -> None:
    """A newer attempt fences the older one: the sink of attempt 2 is the one that is to be served."""
    table.attach(attach(2), D2, 0.0)
    assert withdrawals(table.attach(attach(1), D1, 1.0)) == [(D1, 1, Cause.SUPERSEDED)]
    assert told(table.open(key(2), BLOCKS, 600.0, 2.0)) == [(D2, BlocksReady)]


def test_a_parked_sink_that_is_replaced_is_told(table: LeaseTable) -> None:
    table.attach(attach(1), D1, 0.0)
    assert withdrawals(table.attach(attach(2), D2, 1.0)) == [(D1, 1, Cause.SUPERSEDED)]


def test_a_parked_sink_of_an_older_attempt_is_told_when_a_newer_prefill_arrives(table: LeaseTable) -> None:
    table.attach(attach(1), D1, 0.0)
    assert withdrawals(table.open(key(2), BLOCKS, 600.0, 1.0)) == [(D1, 1, Cause.SUPERSEDED)]


def test_a_parked_sink_is_answered_even_when_its_time_was_just_up(table: LeaseTable) -> None:
    """`open` may come between the time of expiry and the call that sees to it: the sink must not wait in vain."""
    table.attach(attach(), D1, 0.0)
    actions = table.open(key(), BLOCKS, 600.0, TTL_S + 0.01) + table.expire(TTL_S + 0.02)
    assert [sink for sink, _ in told(actions)] == [D1]


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_sink_waits_as_long_as_the_request_that_waits_for_its_blocks(table: LeaseTable, attach_first: bool) -> None:
    """In a deep queue a prompt waits longer than an attach without a Prefill may."""
    if attach_first:
        table.attach(attach(), D1, 0.0)
    table.parked.expect(key(), 600.0)
    if not attach_first:
        table.attach(attach(), D1, 0.0)
    assert table.expire(599.0) == []
    assert told(table.open(key(), BLOCKS, 600.0, 599.0)) == [(D1, BlocksReady)]


def test_a_sink_does_not_wait_for_a_request_that_is_given_up(table: LeaseTable) -> None:
    table.parked.expect(key(), 600.0)
    table.attach(attach(), D1, 0.0)
    assert withdrawals(table.withdraw(R1, Cause.DEADLINE, "too late")) == [(D1, 1, Cause.DEADLINE)]
    assert withdrawals(table.attach(attach(), D1, 2.0)) == [(D1, 1, Cause.LEASE_LOST)]
    assert (len(table.parked), next_expiry(table)) == (0, math.inf)


def test_a_newer_attempt_outlives_the_end_of_the_older_one(table: LeaseTable) -> None:
    """Attempt 2 sends Prefill to the source that still has attempt 1, and the sink's attach overtakes that Prefill."""
    opened(table, attempt=1)
    assert table.attach(attach(2), D2, 1.0) == [], "it is not offered what an older Prefill computes"
    ended = table.withdraw(R1, Cause.SUPERSEDED, "a newer attempt arrived")
    assert withdrawals(ended) == [(D1, 1, Cause.SUPERSEDED)], "the newest attempt is superseded by itself"
    assert unpinned(ended) == [BLOCKS]
    assert next_expiry(table) == 1.0 + TTL_S
    assert told(table.open(key(2), BLOCKS, 600.0, 2.0)) == [(D2, BlocksReady)]


def test_a_parked_attach_waits_for_the_prefill_that_supersedes_nothing(table: LeaseTable) -> None:
    table.attach(attach(2), D2, 0.0)
    assert table.withdraw(R1, Cause.SUPERSEDED, "a newer attempt arrived") == []
    assert told(table.open(key(2), BLOCKS, 600.0, 2.0)) == [(D2, BlocksReady)]


# --- rebinding: the offer of one attempt, for the sink of another ----------------------------------------------------


def test_a_complete_offer_that_was_left_is_taken_by_a_newer_attempt(table: LeaseTable) -> None:
    """The decode worker has failed: nothing is computed again."""
    offer = completed(table)
    table.sink_lost(D1, 1.0)
    [(_, ready), (_, done)] = sent(table.attach(attach(3, offered=1), D2, 2.0))
    assert isinstance(ready, BlocksReady)
    assert (ready.attempt, ready.lease, ready.block_ids) == (3, offer.lease, BLOCKS)
    assert isinstance(done, PrefillDone)
    assert verdict(table.settle(settle(offer, attempt=3), D2))


@pytest.mark.parametrize("end", ["settled", "withdrawn", "expired", "reclaimed"])
@pytest.mark.parametrize("attempt", [1, 2])
def test_an_offer_that_has_ended_is_refused_at_once(table: LeaseTable, end: str, attempt: int) -> None:
    """Nobody is kept waiting for what cannot come."""
    if end == "settled":
        assert verdict(table.settle(settle(completed(table)), D1))
    elif end == "withdrawn":
        opened(table)
        table.withdraw(R1, Cause.CANCELLED, "aborted")
    elif end == "expired":
        completed(table, sink=None)
        table.expire(TTL_S)
    else:
        completed(table, sink=None)
        table.reclaim(1, 0.0)
    assert withdrawals(table.attach(attach(attempt, offered=1), D2, 50.0)) == [(D2, attempt, Cause.LEASE_LOST)]
    assert (len(table.parked), table.num_readers - (end in ("withdrawn", "ended by the first token"))) == (0, 0)


def test_a_wait_that_was_given_up_is_refused_at_once(table: LeaseTable) -> None:
    """The request had no blocks yet when it was aborted: there never was a lease."""
    table.parked.expect(key(), 600.0)
    assert table.withdraw(R1, Cause.CANCELLED, "aborted") == []
    assert withdrawals(table.attach(attach(), D1, 2.0)) == [(D1, 1, Cause.LEASE_LOST)]


def test_a_withdrawal_of_nothing_refuses_nobody(table: LeaseTable) -> None:
    """An Abort for a request that has not come yet must not refuse the sink of the Prefill that comes after it."""
    table.attach(attach(), D1, 0.0)
    assert table.withdraw(R1, Cause.CANCELLED, "aborted") == []
    assert told(table.open(key(), BLOCKS, 600.0, 2.0)) == [(D1, BlocksReady)]


def test_an_attach_for_a_newer_prefill_waits_while_the_older_offer_stands(table: LeaseTable) -> None:
    offer = completed(table)
    assert table.attach(attach(2), D2, 1.0) == []
    assert len(table.parked) == 1
    assert table.parked.awaits(key(2))
    assert not table.parked.awaits(key(1))
    table.check_invariants()
    actions = table.settle(settle(offer), D1)
    assert verdict(actions), "the older one goes on undisturbed"
    assert withdrawals(actions) == []
    to, newer = only(BlocksReady, table.open(key(2), BLOCKS, 600.0, 2.0))
    assert (to, newer.attempt) == (D2, 2)
    assert newer.lease != offer.lease
    assert not table.parked.awaits(key(2))


def test_an_abort_of_the_older_attempt_does_not_refuse_who_waits_for_the_newer(table: LeaseTable) -> None:
    table.parked.expect(key(1), 600.0)
    table.attach(attach(2), D2, 0.0)
    assert table.withdraw(R1, Cause.CANCELLED, "aborted") == []
    assert told(table.open(key(2), BLOCKS, 600.0, 2.0)) == [(D2, BlocksReady)]


def test_an_abort_of_the_attempt_that_is_waited_for_refuses(table: LeaseTable) -> None:
    table.attach(attach(2), D2, 0.0)
    table.parked.expect(key(2), 600.0)
    assert withdrawals(table.withdraw(R1, Cause.CANCELLED, "aborted")) == [(D2, 2, Cause.CANCELLED)]


def test_a_sink_that_wants_an_offer_older_than_the_one_that_stands_is_turned_away(table: LeaseTable) -> None:
    """Even with a newer attempt: what it was told to pull is gone."""
    offer = completed(table, attempt=2)
    assert withdrawals(table.attach(attach(3, offered=1), D2, 1.0)) == [(D2, 3, Cause.SUPERSEDED)]
    assert verdict(table.settle(settle(offer), D1))


def test_who_waits_for_an_offer_is_not_given_an_older_one(table: LeaseTable) -> None:
    table.attach(attach(2), D2, 0.0)
    assert table.open(key(1), BLOCKS, 600.0, 1.0) == []
    assert len(table.parked) == 1
    table.withdraw(R1, Cause.SUPERSEDED, "a newer attempt arrived")
    assert told(table.open(key(2), BLOCKS, 600.0, 3.0)) == [(D2, BlocksReady)]


def test_ended_offers_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_TOMBSTONES", 2)
    table = LeaseTable(unattached_ttl_s=TTL_S)
    for name in ("p0", "p1", "p2"):
        table.open(key(request=RequestId(name)), BLOCKS, 600.0, 0.0)
        table.withdraw(RequestId(name), Cause.CANCELLED, "aborted")
    assert [len(table.attach(attach(request=RequestId(f"p{number}")), D1, 0.0)) for number in range(3)] == [0, 1, 1]


def test_the_end_tells_whether_a_sink_has_the_blocks(table: LeaseTable) -> None:
    [end] = [each for each in table.settle(settle(completed(table)), D1) if isinstance(each, Unpinned)]
    assert end == Unpinned(key(), BLOCKS, settled=True)
    ends: list[Callable[[], list[LeaseAction]]] = [
        lambda: table.withdraw(R1, Cause.CANCELLED, "aborted"),
        lambda: table.expire(1e9),
        lambda: table.complete(R1, [first_token("stop")]),
    ]
    for attempt, finish in enumerate(ends, start=2):
        opened(table, attempt)
        table.blocks_ready(R1, len(BLOCKS), now=0.0)
        [end] = [each for each in finish() if isinstance(each, Unpinned)]
        assert end == Unpinned(key(attempt), BLOCKS, settled=False)


def test_a_sequence_is_offered_as_it_was_asked_for(table: LeaseTable) -> None:
    wanted = AttachSequence(request=R1, attempt=2, sequence=key(1), choice=3, position=8)
    table.parked.expect(key(2), 600.0)
    assert table.attach(wanted, D1, 0.0) == []
    assert table.parked.awaits(key(2))
    _, offer = only(BlocksReady, table.open(key(2), BLOCKS, 600.0, 1.0))
    table.blocks_ready(R1, 3, now=1.0)
    table.complete(R1, [first_token(attempt=2)])
    assert told(table.attach(wanted, D1, 2.0)) == [(D1, BlocksReady), (D1, PrefillDone)], "after lost messages"
    assert verdict(table.settle(settle(offer), D1))
    assert table.attach(wanted, D1, 3.0) == [], "it has been told that it is valid"
    assert withdrawals(table.attach(wanted, D2, 3.0)) == [(D2, 2, Cause.LEASE_LOST)]


def test_a_sequence_that_was_not_cut_is_refused_to_who_waits(table: LeaseTable) -> None:
    table.parked.expect(key(2), 600.0)
    table.attach(AttachSequence(request=R1, attempt=2, sequence=key(1), choice=0, position=8), D1, 0.0)
    assert withdrawals(table.withdraw(R1, Cause.LEASE_LOST, "ended")) == [(D1, 2, Cause.LEASE_LOST)]
    assert not table.parked.awaits(key(2))


# --- the end -----------------------------------------------------------------------------------------------------


def test_a_withdrawal_tells_the_sink_and_unpins(table: LeaseTable) -> None:
    offer = completed(table)
    actions = table.withdraw(R1, Cause.CANCELLED, "aborted")
    assert withdrawals(actions) == [(D1, 1, Cause.CANCELLED)]
    assert unpinned(actions) == [BLOCKS]
    assert not verdict(table.settle(settle(offer), D1))
    assert table.withdraw(R1, Cause.CANCELLED, "aborted again") == []


def test_a_withdrawal_after_a_valid_settle_is_inert(table: LeaseTable) -> None:
    offer = completed(table)
    table.settle(settle(offer), D1)
    assert table.withdraw(R1, Cause.CANCELLED, "aborted") == []
    assert verdict(table.settle(settle(offer), D1)), "what was valid stays valid: the answer may have been lost"


@pytest.mark.parametrize("sink", [None, D1])
def test_a_lease_ends_with_the_time_of_its_request(table: LeaseTable, sink: Incarnation | None) -> None:
    opened(table, sink=sink)
    assert next_expiry(table) == 600.0
    assert table.expire(599.9) == []
    actions = table.expire(600.0)
    assert unpinned(actions) == [BLOCKS]
    assert [each.cause for each in actions if isinstance(each, LeaseDropped)] == [Cause.DEADLINE]
    assert withdrawals(actions) == ([] if sink is None else [(D1, 1, Cause.DEADLINE)])
    assert (len(table), table.num_expired) == (0, 1)


def test_a_settle_after_expiry_is_invalid(table: LeaseTable) -> None:
    offer = completed(table)
    table.expire(600.0)
    assert not verdict(table.settle(settle(offer), D1))


def test_a_settle_at_the_deadline_is_valid_while_the_blocks_are_pinned(table: LeaseTable) -> None:
    """No correctness argument rests on a timer: what counts is whether the lease has ended."""
    offer = completed(table)
    assert next_expiry(table) == 600.0
    assert verdict(table.settle(settle(offer), D1))


def test_a_complete_offer_does_not_wait_for_ever_for_a_sink(table: LeaseTable) -> None:
    completed(table, sink=None)
    assert next_expiry(table) == TTL_S
    assert table.expire(TTL_S - 0.1) == []
    actions = table.expire(TTL_S)
    assert unpinned(actions) == [BLOCKS]
    assert withdrawals(actions) == []
    assert [each.cause for each in actions if isinstance(each, LeaseDropped)] == [Cause.LEASE_LOST], (
        "its request may go on"
    )


def test_progress_renews_the_wait_for_a_sink(table: LeaseTable) -> None:
    opened(table, sink=None)
    table.blocks_ready(R1, 3, now=20.0)
    table.complete(R1, [first_token()])
    assert next_expiry(table) == 20.0 + TTL_S


def test_a_prefill_that_is_still_computing_does_not_expire_for_want_of_a_sink(table: LeaseTable) -> None:
    opened(table, sink=None)
    assert table.expire(TTL_S * 10) == []


def test_a_detach_starts_the_wait_for_another_sink(table: LeaseTable) -> None:
    completed(table)
    table.detach(Detach(request=R1, attempt=1), D1, 100.0)
    assert next_expiry(table) == 100.0 + TTL_S


def test_pressure_drops_what_nobody_has_attached_to_oldest_first(table: LeaseTable) -> None:
    def offer(name: str, now: float, *, sink: Incarnation | None = None, complete: bool = True) -> None:
        request = RequestId(name)
        table.open(key(request=request), BLOCKS, 600.0, now)
        if sink is not None:
            table.attach(attach(request=request), sink, now)
        table.blocks_ready(request, 3, now=now)
        if complete:
            table.complete(request, [first_token()])

    offer("new", 50.0)
    offer("oldest", 1.0)
    offer("attached", 0.0, sink=D1)
    offer("computing", 0.5, complete=False)
    offer("old", 2.0)
    assert table.reclaim(0, unattached_before=10.0) == []
    actions = table.reclaim(4, unattached_before=10.0)
    dropped = [each for each in actions if isinstance(each, LeaseDropped)]
    assert [each.key.request for each in dropped] == ["oldest", "old"]
    assert {each.cause for each in dropped} == {Cause.LEASE_LOST}
    assert unpinned(actions) == [BLOCKS, BLOCKS]
    assert table.reclaim(99, unattached_before=10.0) == []
    assert (len(table), table.num_reclaimed) == (3, 2)


def test_nothing_is_pinned_twice_or_for_ever(table: LeaseTable) -> None:
    assert (len(table), table.num_blocks, next_expiry(table)) == (0, 0, math.inf)
    offer = completed(table)
    assert table.num_blocks == 3
    table.settle(settle(offer), D1)
    assert (len(table), table.num_blocks, next_expiry(table)) == (0, 0, math.inf)


# --- cached prefixes, lent ---------------------------------------------------------------------------------------


def lent(table: LeaseTable, sink: Incarnation = D1) -> BlocksReady:
    """Lend `BLOCKS` as R1 at 0 s; what the sink is offered."""
    to, offer = only(BlocksReady, table.lend(key(), BLOCKS, sink, deadline=30.0, now=0.0))
    assert to == sink
    return offer


def attach_prefix(attempt: int = 1, request: RequestId = R1) -> AttachPrefix:
    return AttachPrefix(request=request, attempt=attempt, block_hashes=(BlockHash(bytes(32)),) * 5)


def returned(actions: list[LeaseAction]) -> list[tuple[int, ...]]:
    assert not any(isinstance(each, Unpinned | LeaseDropped) for each in actions), "nobody has asked for this here"
    return [each.block_ids for each in actions if isinstance(each, Released)]


def test_a_lent_prefix_is_offered_whole_and_ends_with_a_valid_settle(table: LeaseTable) -> None:
    offer = lent(table)
    assert (offer.start, offer.block_ids, offer.num_blocks, offer.checksums) == (0, BLOCKS, 3, None)
    assert (table.num_lent, table.num_readers, table.num_blocks) == (1, 1, 3)
    actions = table.settle(settle(offer), D1)
    assert verdict(actions)
    assert returned(actions) == [BLOCKS]
    assert (len(table), table.num_lent, table.num_readers) == (0, 0, 0)
    assert verdict(table.settle(settle(offer), D1)), "the answer may have been lost"


def test_a_lent_prefix_is_offered_again_to_its_sink(table: LeaseTable) -> None:
    offer = lent(table)
    for again in (attach_prefix(), attach()):
        assert sent(table.attach(again, D1, 5.0)) == [(D1, offer)]
    assert verdict(table.settle(settle(offer), D1))


@pytest.mark.parametrize(("attempt", "sink"), [(1, D2), (2, D1), (2, D2)])
@pytest.mark.parametrize("make", [attach, attach_prefix])
def test_a_lent_prefix_is_for_nobody_else(
    table: LeaseTable, make: Callable[[int], Attach | AttachPrefix], attempt: int, sink: Incarnation
) -> None:
    offer = lent(table)
    actions = table.attach(make(attempt), sink, 1.0)
    assert told(actions) == [(sink, OfferWithdrawn)]
    assert not verdict(table.settle(settle(offer, attempt=attempt), sink))
    assert verdict(table.settle(settle(offer), D1))


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_offer_of_a_request_is_not_a_prefix(table: LeaseTable, attempt: int) -> None:
    """Whatever a faulty sink calls its pull, it must not end the worker."""
    offer = completed(table)
    assert withdrawals(table.attach(attach_prefix(attempt), D1, 1.0)) == [(D1, attempt, Cause.SUPERSEDED)]
    assert verdict(table.settle(settle(offer), D1)), "the attached sink is attached still"


@pytest.mark.parametrize("how", ["detached", "lost", "given up"])
def test_a_lent_prefix_ends_with_its_sinks_interest(table: LeaseTable, how: str) -> None:
    offer = lent(table)
    if how == "detached":
        actions = table.detach(Detach(request=R1, attempt=1), D1, 1.0)
    elif how == "lost":
        actions = table.sink_lost(D1, 1.0)
    else:
        actions = table.sink_said_hello(D1, {key(request=R2)}, 1.0)
    assert returned(actions) == [BLOCKS]
    assert (len(table), table.num_readers, table.num_expired) == (0, 0, 0)
    assert not verdict(table.settle(settle(offer), D1)), "the blocks may have changed since"


@pytest.mark.parametrize(("attempt", "sink"), [(1, D2), (2, D1)], ids=["another sink", "another attempt"])
def test_a_lent_prefix_outlasts_what_is_not_its_sinks(table: LeaseTable, attempt: int, sink: Incarnation) -> None:
    offer = lent(table)
    assert table.detach(Detach(request=R1, attempt=attempt), sink, 1.0) == []
    table.sink_said_hello(D2, (), 1.0)
    table.sink_said_hello(D1, {key()}, 1.0)
    assert verdict(table.settle(settle(offer), D1))


def test_a_lent_prefix_expires_and_only_its_sink_is_told(table: LeaseTable) -> None:
    offer = lent(table)
    assert next_expiry(table) == 30.0
    assert table.expire(29.9) == []
    actions = table.expire(30.0)
    assert returned(actions) == [BLOCKS]
    assert withdrawals(actions) == [(D1, 1, Cause.DEADLINE)]
    [message] = [each.message for each in actions if isinstance(each, Send)]
    assert isinstance(message, OfferWithdrawn)
    assert message.message == "the time of the loan is over", "no request's time is"
    assert (table.num_expired, table.num_readers) == (1, 1)
    assert not verdict(table.settle(settle(offer), D1))
    table.detach(Detach(request=R1, attempt=1), D1, 31.0)
    assert table.num_readers == 0, "its reads have ended"


def test_a_lent_prefix_is_not_reclaimed(table: LeaseTable) -> None:
    lent(table)
    assert table.reclaim(99, unattached_before=math.inf) == []


def test_a_lent_prefix_can_be_withdrawn(table: LeaseTable) -> None:
    lent(table)
    actions = table.withdraw(R1, Cause.CANCELLED, "aborted")
    assert withdrawals(actions) == [(D1, 1, Cause.CANCELLED)]
    assert returned(actions) == [BLOCKS]


def test_checksums_of_a_lent_prefix_travel_with_it() -> None:
    table = LeaseTable(unattached_ttl_s=TTL_S, checksum=sums_of)
    assert lent(table).checksums == (110, 111, 112)


def test_a_request_that_bears_the_name_of_a_lent_prefix_gets_its_lease(table: LeaseTable) -> None:
    """Only a faulty sink names its pull after a gateway's request; it must not cost that request anything."""
    stale = lent(table)
    actions = table.open(key(), (20, 21), 600.0, 1.0)
    assert withdrawals(actions) == [(D1, 1, Cause.SUPERSEDED)]
    assert returned(actions) == [BLOCKS]
    assert not verdict(table.settle(settle(stale), D1))
    _, offer = only(BlocksReady, table.attach(attach(), D2, 2.0))
    assert offer.num_blocks == 2


def test_nobody_waits_for_a_request_that_has_ended_while_a_prefix_was_lent_under_its_name(table: LeaseTable) -> None:
    table.parked.expect(key(), 600.0)
    lent(table)
    table.check_invariants()
    assert returned(table.withdraw(R1, Cause.CANCELLED, "aborted")) == [BLOCKS]
    assert withdrawals(table.attach(attach(), D2, 2.0)) == [(D2, 1, Cause.LEASE_LOST)]
    assert len(table.parked) == 0


def test_a_parked_attach_under_the_name_of_a_prefix_is_told(table: LeaseTable) -> None:
    table.attach(attach(), D2, 0.0)
    actions = table.lend(key(), BLOCKS, D1, 30.0, 0.0)
    assert told(actions) == [(D2, OfferWithdrawn), (D1, BlocksReady)]
    assert len(table.parked) == 0


def test_a_request_with_a_lease_is_lent_nothing(table: LeaseTable) -> None:
    opened(table)
    with pytest.raises(AssertionError, match="open 3 blocks"):
        table.lend(key(), BLOCKS, D1, 30.0, 0.0)


def test_who_attaches_when_the_first_token_has_ended_the_request_is_told_so() -> None:
    """There is nothing to read, and nothing is lost: the sink lets go without a word to the gateway."""
    table = LeaseTable(unattached_ttl_s=30.0)
    opened(table, sink=None)
    table.blocks_ready(R1, len(BLOCKS), now=0.0)
    [unpin] = table.complete(R1, [first_token("stop")])
    assert isinstance(unpin, Unpinned)
    [(to, offer), (_, done)] = sent(table.attach(attach(2, offered=1), D1, 1.0))
    assert to == D1
    assert isinstance(offer, BlocksReady)
    assert isinstance(done, PrefillDone)
    assert (offer.attempt, offer.start, offer.block_ids, offer.num_blocks) == (2, 0, (), len(BLOCKS))
    assert (done.attempt, done.lease, done.first_tokens[0].finish_reason) == (2, offer.lease, "stop")
    assert table.num_readers == len(table) == len(table.parked) == 0
    pull = Pull(Source(address="p:1", incarnation=Incarnation("p")), attach(2, offered=1))
    pull.attach()
    pull.blocks_ready(offer)
    assert [action for action in pull.prefill_done(done) if isinstance(action, PullFailed)] == [
        PullFailed(pull, None, "the first token ended the request")
    ]
