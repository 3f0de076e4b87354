"""A pull: each transition, what the source is told, and whose the blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
from kv_transfer.events import Pulled, PullFailed, PullOffered, Released, SendToSource
from kv_transfer.pull import MAX_GAPS, Pull, PullAction, PullState, ReadBlocks

KEY = RequestKey(RequestId("r1"), 2)
ABOUT: dict[str, Any] = {"request": KEY.request, "attempt": KEY.attempt}
LEASE: dict[str, Any] = {"lease": LeaseId("l1"), "epoch": 7}
ATTACH = Attach(**ABOUT, offered=KEY.attempt)
AT = Source(address="p:1", incarnation=Incarnation("p"))
SINK_BLOCKS = (50, 51, 52)


def ready(start: int, *block_ids: int, num_blocks: int = 3, **changes: object) -> BlocksReady:
    return BlocksReady(**ABOUT | LEASE | {"start": start, "block_ids": block_ids, "num_blocks": num_blocks} | changes)


def done(*reasons: FinishReason | None, **changes: object) -> PrefillDone:
    tokens = tuple(
        Tokens(**ABOUT, choice=choice, position=9, token_ids=(5,), finish_reason=reason)
        for choice, reason in enumerate(reasons)
    )
    return PrefillDone(**ABOUT | LEASE | {"first_tokens": tokens} | changes)


def settled(*, valid: bool = True, **changes: object) -> Settled:
    return Settled(**ABOUT | LEASE | {"valid": valid} | changes)


def state_of(pull: Pull) -> PullState:
    """The state as it is now: a type checker would keep what an earlier assertion has found."""
    return pull.state


def to_source(message: Message) -> SendToSource:
    return SendToSource(AT.address, message)


def sent(actions: list[PullAction]) -> list[type[Message]]:
    """Kinds of the messages for the source."""
    return [type(action.message) for action in actions if isinstance(action, SendToSource)]


def released(actions: list[PullAction]) -> list[int]:
    return [block for action in actions if isinstance(action, Released) for block in action.block_ids]


def gave_up(actions: list[PullAction]) -> Cause | None:
    [end] = [action for action in actions if isinstance(action, PullFailed)]
    assert actions[-1] is end, "the end is told after everything else"
    return end.cause


@pytest.fixture
def pull() -> Iterator[Pull]:
    """A pull, whose invariants are checked at the end."""
    subject = Pull(AT, ATTACH)
    yield subject
    subject.check_invariants()


def offered(pull: Pull) -> Pull:
    assert sent(pull.attach()) == [Attach]
    assert pull.blocks_ready(ready(0)) == [PullOffered(pull, 3)]
    return pull


def pulling(pull: Pull) -> Pull:
    """With block 0 under read."""
    offered(pull)
    assert pull.reserve(SINK_BLOCKS) == []
    assert pull.blocks_ready(ready(0, 10)) == [ReadBlocks(0, (10,), (50,), None)]
    return pull


def test_blocks_that_nothing_was_read_into_can_be_taken_back(pull: Pull) -> None:
    offered(pull)
    assert not pull.revocable
    pull.reserve(SINK_BLOCKS, 1)
    assert pull.revocable
    pull.revoke()
    assert (pull.state, pull.revocable) == (PullState.OFFERED, False)
    assert pull.blocks_ready(ready(0, 10, 11)) == [], "nothing is read without blocks"
    assert pull.prefill_done(done(None)) == [to_source(ATTACH)]
    assert pull.blocks_ready(ready(0, 10, 11, 12)) == []
    assert pull.reserve((60, 61, 62)) == [ReadBlocks(0, (10, 11, 12), (60, 61, 62), None)]
    assert not pull.revocable
    with pytest.raises(AssertionError):
        pull.revoke()
    assert sent(pull.read_done(0, None)) == [Settle]
    assert pull.settled(settled())[0] == Pulled(pull, (60, 61, 62), done(None).first_tokens)


def test_a_pull_whose_blocks_were_taken_back_releases_none_of_them(pull: Pull) -> None:
    offered(pull)
    pull.reserve(SINK_BLOCKS)
    pull.revoke()
    assert released(pull.abandon(None, "aborted")) == []


def settling(pull: Pull) -> Pull:
    pulling(pull)
    pull.blocks_ready(ready(1, 11, 12))
    assert pull.prefill_done(done(None)) == []
    assert pull.read_done(0, None) == []
    assert sent(pull.read_done(1, None)) == [Settle]
    return pull


IN_STATE = {
    PullState.ATTACHING: lambda pull: pull,
    PullState.OFFERED: offered,
    PullState.PULLING: pulling,
    PullState.SETTLING: settling,
}
states = pytest.mark.parametrize("state", IN_STATE)


# --- the way through ---------------------------------------------------------------------------------------------


def test_the_life_of_a_pull(pull: Pull) -> None:
    assert pull.attach() == [to_source(ATTACH)]
    assert state_of(pull) is PullState.ATTACHING
    assert pull.blocks_ready(ready(0)) == [PullOffered(pull, 3)]
    assert state_of(pull) is PullState.OFFERED
    assert pull.reserve(SINK_BLOCKS) == []
    assert state_of(pull) is PullState.PULLING
    assert pull.blocks_ready(ready(0, 10, 11)) == [ReadBlocks(0, (10, 11), (50, 51), None)]
    assert pull.read_done(0, None) == []
    assert pull.blocks_ready(ready(2, 12)) == [ReadBlocks(2, (12,), (52,), None)]
    assert pull.prefill_done(done(None)) == []
    assert pull.read_done(2, None) == [to_source(Settle(**ABOUT, **LEASE))]
    assert state_of(pull) is PullState.SETTLING
    assert not pull.over
    assert pull.settled(settled()) == [Pulled(pull, SINK_BLOCKS, done(None).first_tokens)]
    assert state_of(pull) is PullState.SETTLED
    assert pull.over


def test_a_pull_may_be_of_what_an_older_attempt_has_computed() -> None:
    """Its decode worker has failed, and its offer still stands."""
    pull = Pull(AT, Attach(**ABOUT, offered=1))
    assert pull.attach() == [to_source(Attach(**ABOUT, offered=1))]
    pull.blocks_ready(ready(0, 10, 11, 12))
    pull.prefill_done(done(None))
    pull.reserve(SINK_BLOCKS)
    assert sent(pull.read_done(0, None)) == [Settle]
    assert pull.attach() == [to_source(Attach(**ABOUT, offered=1)), to_source(Settle(**ABOUT, **LEASE))]


def test_a_pull_of_a_running_sequence_says_which_and_from_where() -> None:
    """With what the first stage has brought, only the rest is read; several tokens come with it."""
    wanted = AttachSequence(**ABOUT, sequence=RequestKey(KEY.request, 1), choice=3, position=9)
    pull = Pull(AT, wanted)
    assert pull.attach() == [to_source(wanted)]
    assert pull.blocks_ready(ready(0, 10, 11, 12)) == [PullOffered(pull, 3)]
    assert pull.attach() == [to_source(wanted)], "after lost messages"
    tokens = Tokens(**ABOUT, choice=3, position=9, token_ids=(5, 6, 7))
    assert pull.prefill_done(done(first_tokens=(tokens,))) == []
    assert pull.reserve(SINK_BLOCKS, 2) == [ReadBlocks(2, (12,), (52,), None)]
    assert pull.read_done(2, None) == [to_source(Settle(**ABOUT, **LEASE))]
    assert pull.attach() == [to_source(wanted), to_source(Settle(**ABOUT, **LEASE))]
    assert pull.settled(settled()) == [Pulled(pull, SINK_BLOCKS, (tokens,))]


def test_blocks_that_are_ready_before_the_reservation_are_read_at_once(pull: Pull) -> None:
    assert pull.blocks_ready(ready(0, 10)) == [PullOffered(pull, 3)]
    assert pull.blocks_ready(ready(1, 11, 12)) == []
    assert pull.prefill_done(done(None)) == []
    assert pull.reserve(SINK_BLOCKS) == [ReadBlocks(0, (10, 11, 12), SINK_BLOCKS, None)]
    assert sent(pull.read_done(0, None)) == [Settle]


def test_reads_may_end_in_any_order(pull: Pull) -> None:
    pulling(pull)
    pull.blocks_ready(ready(1, 11))
    pull.blocks_ready(ready(2, 12))
    pull.prefill_done(done(None))
    assert pull.read_done(2, None) == []
    assert pull.read_done(0, None) == []
    assert sent(pull.read_done(1, None)) == [Settle]


def test_no_settle_before_the_first_token_is_known(pull: Pull) -> None:
    pulling(pull)
    pull.blocks_ready(ready(1, 11, 12))
    pull.read_done(0, None)
    assert pull.read_done(1, None) == []
    assert sent(pull.prefill_done(done(None))) == [Settle]


def test_checksums_stay_with_their_blocks(pull: Pull) -> None:
    pull.blocks_ready(ready(0, 10, checksums=(1,)))
    [read] = pull.reserve(SINK_BLOCKS)
    assert isinstance(read, ReadBlocks)
    assert read.checksums == (1,)
    assert pull.blocks_ready(ready(0, 10, 11, 12, checksums=(1, 2, 3))) == [ReadBlocks(1, (11, 12), (51, 52), (2, 3))]


def test_choices_that_go_on_are_admitted_with_those_that_have_ended(pull: Pull) -> None:
    settling(pull)
    [pulled] = pull.settled(settled())
    assert isinstance(pulled, Pulled)
    assert [tokens.choice for tokens in pulled.first_tokens] == [0]


# --- duplicates, gaps, reordering --------------------------------------------------------------------------------


def test_a_repeated_offer_changes_nothing(pull: Pull) -> None:
    pulling(pull)
    for again in (ready(0), ready(0, 10)):
        assert pull.blocks_ready(again) == []
    assert pull.blocks_ready(ready(0, 10, 11)) == [ReadBlocks(1, (11,), (51,), None)]
    assert pull.blocks_ready(ready(1, 11)) == []


def test_a_repeated_offer_wants_blocks_once(pull: Pull) -> None:
    offered(pull)
    assert pull.blocks_ready(ready(0)) == []
    assert pull.blocks_ready(ready(0, 10)) == []


@pytest.mark.parametrize("prepare", [lambda pull: pull, offered, pulling], ids=["attaching", "offered", "pulling"])
def test_a_gap_is_asked_for_again(pull: Pull, prepare: Callable[[Pull], Pull]) -> None:
    prepare(pull)
    assert sent(pull.blocks_ready(ready(2, 12))) == [Attach]
    actions = pull.blocks_ready(ready(0, 10, 11, 12))
    reads = [action for action in actions if isinstance(action, ReadBlocks)]
    assert [read.start for read in reads] == ([1] if pull.state is PullState.PULLING else [])
    assert sent(actions) == []


def test_a_first_token_with_blocks_missing_asks_again(pull: Pull) -> None:
    pulling(pull)
    assert sent(pull.prefill_done(done(None))) == [Attach]
    pull.read_done(0, None)
    pull.blocks_ready(ready(0, 10, 11, 12))
    assert pull.prefill_done(done(None)) == []
    assert sent(pull.read_done(1, None)) == [Settle]


def test_an_early_first_token_is_not_needed_twice(pull: Pull) -> None:
    pulling(pull)
    pull.prefill_done(done(None))
    pull.read_done(0, None)
    pull.blocks_ready(ready(1, 11, 12))
    assert sent(pull.read_done(1, None)) == [Settle]


def test_a_first_token_before_the_offer_is_ignored(pull: Pull) -> None:
    """After an attach the source tells everything again, in order."""
    assert pull.prefill_done(done(None)) == []
    assert pull.state is PullState.ATTACHING


def test_after_a_loss_the_pull_attaches_again(pull: Pull) -> None:
    for prepare in (offered, lambda pull: pull.reserve(SINK_BLOCKS)):
        prepare(pull)
        assert sent(pull.attach()) == [Attach]


def test_after_a_loss_a_settling_pull_asks_again(pull: Pull) -> None:
    """The source may have lost this sink, and still hold the lease."""
    settling(pull)
    assert pull.attach() == [to_source(ATTACH), to_source(Settle(**ABOUT, **LEASE))]
    assert pull.blocks_ready(ready(0, 10, 11, 12)) == []
    assert pull.prefill_done(done(None)) == []
    assert isinstance(pull.settled(settled())[0], Pulled)
    assert pull.attach() == []


def test_a_lease_that_takes_the_place_of_another_brings_its_own_first_tokens(pull: Pull) -> None:
    """Those of the other one would let the pull settle before the offer is complete, or begin from wrong tokens."""
    offered(pull)
    pull.prefill_done(done(None))
    new: dict[str, Any] = {"lease": LeaseId("l2"), "epoch": 8}
    pull.blocks_ready(ready(0, 20, 21, 22, **new))
    pull.reserve(SINK_BLOCKS)
    assert pull.read_done(0, None) == []
    assert pull.state is PullState.PULLING
    assert sent(pull.prefill_done(done(None, None, **new))) == [Settle]
    [pulled] = pull.settled(settled(**new))
    assert isinstance(pulled, Pulled)
    assert len(pulled.first_tokens) == 2


# --- what the source may not do ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"lease": LeaseId("l2")}, {"epoch": 8}], ids=["another lease", "another epoch"])
@pytest.mark.parametrize("kind", [BlocksReady, PrefillDone])
def test_another_lease_voids_what_was_read(pull: Pull, kind: type, changes: dict[str, Any]) -> None:
    pulling(pull)
    if kind is BlocksReady:
        actions = pull.blocks_ready(ready(1, 99, **changes))
    else:
        actions = pull.prefill_done(done(None, **changes))
    assert gave_up(actions) is Cause.LEASE_LOST


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ready(0, 10, 11, 12, 13), id="more blocks than announced"),
        pytest.param(ready(3, 13), id="blocks beyond the end"),
        pytest.param(ready(0, 10, num_blocks=4), id="another total"),
        pytest.param(ready(0, 10, 11, checksums=(1,)), id="too few checksums"),
        pytest.param(ready(0, 10, checksums=(1, 2)), id="too many checksums"),
    ],
)
def test_an_offer_that_contradicts_itself_ends_the_pull(pull: Pull, message: BlocksReady) -> None:
    offered(pull)
    actions = pull.blocks_ready(message)
    assert sent(actions) == [Detach]
    assert gave_up(actions) is Cause.TRANSFER


def test_checksums_that_begin_in_the_middle_are_not_taken_for_those_of_the_first_blocks(pull: Pull) -> None:
    """Either the pull ends, or each read carries one checksum for each block, or none."""
    pulling(pull)
    actions = pull.blocks_ready(ready(1, 11, 12, checksums=(2, 3)))
    for read in actions:
        if isinstance(read, ReadBlocks):
            assert read.checksums in (None, (2, 3))
    if pull.state is PullState.ABANDONED:
        assert gave_up(actions) is Cause.TRANSFER


@pytest.mark.parametrize("changes", [{"lease": LeaseId("l2")}, {"epoch": 8}, {"epoch": 6}])
def test_a_verdict_on_something_else_is_no_verdict(pull: Pull, changes: dict[str, object]) -> None:
    settling(pull)
    for valid in (True, False):
        assert pull.settled(settled(valid=valid, **changes)) == []
    assert pull.state is PullState.SETTLING


@states
def test_only_a_settling_pull_can_be_admitted(pull: Pull, state: PullState) -> None:
    IN_STATE[state](pull)
    actions = pull.settled(settled())
    assert any(isinstance(action, Pulled) for action in actions) == (state is PullState.SETTLING)


def test_a_pull_is_admitted_once(pull: Pull) -> None:
    settling(pull)
    pull.settled(settled())
    assert pull.settled(settled()) == []
    assert pull.settled(settled(valid=False)) == []
    assert pull.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.DEADLINE, message="late")) == []
    assert pull.abandon(Cause.DEADLINE, "late") == []
    assert pull.state is PullState.SETTLED


# --- the ways out ------------------------------------------------------------------------------------------------


def test_invalid_admits_nothing(pull: Pull) -> None:
    settling(pull)
    actions = pull.settled(settled(valid=False))
    assert gave_up(actions) is Cause.LEASE_LOST
    assert released(actions) == list(SINK_BLOCKS)
    assert not any(isinstance(action, Pulled) for action in actions)
    assert pull.settled(settled()) == [], "a verdict cannot be taken back"


def test_a_request_that_ends_with_its_first_token_is_dropped_silently(pull: Pull) -> None:
    pulling(pull)
    pull.read_done(0, None)
    actions = pull.prefill_done(done("stop", "length"))
    assert gave_up(actions) is None
    assert released(actions) == list(SINK_BLOCKS)


def test_one_choice_that_goes_on_keeps_the_pull(pull: Pull) -> None:
    pulling(pull)
    pull.blocks_ready(ready(1, 11, 12))
    assert pull.prefill_done(done("stop", None)) == []


@states
def test_a_pull_is_abandoned_in_any_state(pull: Pull, state: PullState) -> None:
    IN_STATE[state](pull)
    reads = 1 if state is PullState.PULLING else 0
    actions = pull.abandon(Cause.DEADLINE, "late")
    assert pull.state is PullState.ABANDONED
    assert gave_up(actions) is Cause.DEADLINE
    expected = {PullState.PULLING: [51, 52], PullState.SETTLING: [50, 51, 52]}.get(state, [])
    assert released(actions) == expected
    assert pull.quarantined == SINK_BLOCKS[:reads]
    assert pull.over is (reads == 0)
    assert pull.abandon(Cause.DEADLINE, "again") == []


@states
def test_a_withdrawn_offer_ends_the_pull(pull: Pull, state: PullState) -> None:
    IN_STATE[state](pull)
    actions = pull.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.LEASE_LOST, message="reclaimed"))
    assert gave_up(actions) is Cause.LEASE_LOST
    assert isinstance(actions[-1], PullFailed)
    assert "reclaimed" in actions[-1].message


@pytest.mark.parametrize("cause", [Cause.DRAINING, Cause.TOO_LARGE])
def test_that_a_source_leaves_or_is_too_small_is_not_said_of_the_sink(pull: Pull, cause: Cause) -> None:
    offered(pull)
    assert gave_up(pull.withdrawn(OfferWithdrawn(**ABOUT, cause=cause, message="mine"))) is Cause.LEASE_LOST


@pytest.mark.parametrize("how", ["withdrawn", "refused"])
def test_that_a_source_is_full_is_held_against_the_source(pull: Pull, how: str) -> None:
    """As the sink's own word a gateway would take the sink for full."""
    offered(pull)
    message = OfferWithdrawn(**ABOUT, cause=Cause.CAPACITY, message="too many")
    actions = pull.withdrawn(message) if how == "withdrawn" else pull.refused(Cause.CAPACITY, "too many clients")
    assert gave_up(actions) is Cause.WORKER_LOST


@pytest.mark.parametrize("prepare", [offered, settling], ids=["offered", "settling"])
def test_the_source_is_told_at_once_when_no_read_is_open(pull: Pull, prepare: Callable[[Pull], Pull]) -> None:
    prepare(pull)
    assert sent(pull.abandon(None, "aborted")) == [Detach]


def test_the_source_is_told_once_the_last_read_has_ended(pull: Pull) -> None:
    """Until then the read needs the source's progress."""
    pulling(pull)
    pull.blocks_ready(ready(1, 11))
    assert sent(pull.abandon(None, "aborted")) == []
    assert sent(pull.read_done(1, None)) == []
    assert sent(pull.read_done(0, "the peer is gone")) == [Detach]


def test_the_source_is_told_nothing_by_a_pull_that_never_attached(pull: Pull) -> None:
    assert sent(pull.abandon(None, "aborted")) == []


@states
def test_an_abandoned_pull_is_deaf(pull: Pull, state: PullState) -> None:
    IN_STATE[state](pull)
    pull.abandon(None, "aborted")
    assert pull.attach() == []
    assert pull.blocks_ready(ready(0, 10, 11, 12)) == []
    assert pull.prefill_done(done(None)) == []
    assert pull.settled(settled()) == []
    assert pull.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.DEADLINE, message="")) == []


# --- reads and quarantine ----------------------------------------------------------------------------------------


def test_a_block_under_read_is_released_when_its_read_ends_and_not_before(pull: Pull) -> None:
    pulling(pull)
    pull.blocks_ready(ready(1, 11))
    actions = pull.abandon(None, "aborted")
    assert released(actions) == [52]
    assert set(pull.quarantined) == {50, 51}
    assert pull.read_done(1, None) == [Released((51,))]
    assert not pull.over
    assert pull.quarantined == (50,)
    assert released(pull.read_done(0, "the peer is gone")) == [50]
    assert pull.over
    assert pull.quarantined == ()


def test_a_failed_read_ends_the_pull_and_frees_what_no_read_writes_to(pull: Pull) -> None:
    pulling(pull)
    pull.blocks_ready(ready(1, 11))
    actions = pull.read_done(0, "the peer is gone")
    assert gave_up(actions) is Cause.TRANSFER
    assert released(actions) == [50, 52], "a read that has failed writes no more"
    assert pull.quarantined == (51,)
    assert released(pull.read_done(1, "the peer is gone")) == [51]
    assert pull.over


def test_a_pull_that_has_no_blocks_quarantines_nothing(pull: Pull) -> None:
    offered(pull)
    actions = pull.abandon(Cause.DEADLINE, "no room")
    assert released(actions) == []
    assert pull.over


def test_a_read_ends_once(pull: Pull) -> None:
    pulling(pull)
    pull.read_done(0, None)
    with pytest.raises(KeyError):
        pull.read_done(0, None)


def test_a_reservation_is_for_the_whole_offer(pull: Pull) -> None:
    offered(pull)
    with pytest.raises(AssertionError):
        pull.reserve((50, 51))


def test_a_reservation_comes_once(pull: Pull) -> None:
    pulling(pull)
    with pytest.raises(AssertionError, match=r"reserve while pulling"):
        pull.reserve((60, 61, 62))


# --- blocks that the sink holds already --------------------------------------------------------------------------


def test_held_blocks_are_not_read(pull: Pull) -> None:
    offered(pull)
    assert pull.reserve(SINK_BLOCKS, num_held=2) == []
    assert pull.blocks_ready(ready(0, 10)) == []
    assert pull.blocks_ready(ready(1, 11, 12)) == [ReadBlocks(2, (12,), (52,), None)]
    pull.prefill_done(done(None))
    assert sent(pull.read_done(2, None)) == [Settle]
    assert pull.settled(settled()) == [Pulled(pull, SINK_BLOCKS, done(None).first_tokens)]


def test_checksums_of_held_blocks_are_skipped_with_them(pull: Pull) -> None:
    pull.blocks_ready(ready(0, 10, 11, 12, checksums=(1, 2, 3)))
    assert pull.reserve(SINK_BLOCKS, num_held=1) == [ReadBlocks(1, (11, 12), (51, 52), (2, 3))]


def test_with_every_block_held_the_source_settles_all_the_same(pull: Pull) -> None:
    """The first tokens, and the end of the source's lease, depend on it."""
    offered(pull)
    assert pull.reserve(SINK_BLOCKS, num_held=3) == []
    assert pull.blocks_ready(ready(0, 10, 11, 12)) == []
    assert pull.state is PullState.PULLING
    assert sent(pull.prefill_done(done(None))) == [Settle]
    assert pull.settled(settled()) == [Pulled(pull, SINK_BLOCKS, done(None).first_tokens)]


def test_with_every_block_held_nothing_lost_is_asked_for_again(pull: Pull) -> None:
    offered(pull)
    pull.reserve(SINK_BLOCKS, num_held=3)
    assert sent(pull.prefill_done(done(None))) == [Settle]


def test_with_every_block_held_and_the_first_token_known_a_reservation_settles(pull: Pull) -> None:
    pull.blocks_ready(ready(0, 10, 11, 12))
    pull.prefill_done(done(None))
    assert sent(pull.reserve(SINK_BLOCKS, num_held=3)) == [Settle]


def test_held_blocks_are_released_with_the_others_and_never_in_quarantine(pull: Pull) -> None:
    offered(pull)
    pull.reserve(SINK_BLOCKS, num_held=1)
    pull.blocks_ready(ready(0, 10, 11))
    actions = pull.abandon(Cause.DEADLINE, "late")
    assert released(actions) == [50, 52]
    assert pull.quarantined == (51,)
    assert released(pull.read_done(1, None)) == [51]


@pytest.mark.parametrize("num_held", [-1, 4])
def test_no_more_is_held_than_was_reserved(pull: Pull, num_held: int) -> None:
    offered(pull)
    with pytest.raises(AssertionError):
        pull.reserve(SINK_BLOCKS, num_held=num_held)


# --- pulls of a prefix -------------------------------------------------------------------------------------------


HASHES = tuple(BlockHash(bytes([number]) * 32) for number in range(4))


@pytest.fixture
def prefix() -> Iterator[Pull]:
    """A prefix pull of four blocks, whose invariants are checked at the end."""
    subject = Pull(AT, AttachPrefix(**ABOUT, block_hashes=HASHES))
    yield subject
    subject.check_invariants()


def test_the_life_of_a_prefix_pull(prefix: Pull) -> None:
    assert prefix.attach() == [to_source(AttachPrefix(**ABOUT, block_hashes=HASHES))]
    assert prefix.blocks_ready(ready(0, 10, 11, 12)) == [PullOffered(prefix, 3)], "fewer than asked for will do"
    assert prefix.reserve(SINK_BLOCKS) == [ReadBlocks(0, (10, 11, 12), SINK_BLOCKS, None)]
    assert prefix.read_done(0, None) == [to_source(Settle(**ABOUT, **LEASE))]
    assert prefix.settled(settled()) == [Pulled(prefix, SINK_BLOCKS, ())]
    assert prefix.over


def test_held_blocks_of_a_prefix_are_not_read(prefix: Pull) -> None:
    prefix.blocks_ready(ready(0, 10, 11, 12))
    assert prefix.reserve(SINK_BLOCKS, num_held=2) == [ReadBlocks(2, (12,), (52,), None)]
    assert sent(prefix.read_done(2, None)) == [Settle]


def test_a_prefix_that_is_held_whole_is_settled_at_once(prefix: Pull) -> None:
    prefix.blocks_ready(ready(0, 10, 11, 12))
    assert sent(prefix.reserve(SINK_BLOCKS, num_held=3)) == [Settle]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ready(0), id="an offer that is only opened"),
        pytest.param(ready(0, num_blocks=0), id="nothing"),
        pytest.param(ready(0, 10, 11), id="a part"),
        pytest.param(ready(1, 11, 12), id="the end only"),
        pytest.param(ready(0, 10, 11, 12, 13, 14, num_blocks=5), id="more than was asked for"),
        pytest.param(ready(0, 10, 11, 12, 13), id="more than was announced"),
        pytest.param(ready(0, 10, 11, 12, checksums=(1, 2)), id="too few checksums"),
    ],
)
def test_a_prefix_is_offered_whole_or_not_at_all(prefix: Pull, message: BlocksReady) -> None:
    prefix.attach()
    actions = prefix.blocks_ready(message)
    assert sent(actions) == [Detach]
    assert gave_up(actions) is Cause.TRANSFER


def test_the_cause_with_which_a_prefix_is_refused_is_kept(prefix: Pull) -> None:
    """The sink decides by it whether to ask again; no gateway is told."""
    prefix.attach()
    message = OfferWithdrawn(**ABOUT, cause=Cause.CAPACITY, message="too many")
    assert gave_up(prefix.withdrawn(message)) is Cause.CAPACITY


def test_first_tokens_of_a_prefix_are_nobodys(prefix: Pull) -> None:
    prefix.blocks_ready(ready(0, 10, 11, 12))
    assert prefix.prefill_done(done("stop")) == []
    prefix.reserve(SINK_BLOCKS)
    assert prefix.prefill_done(done(None)) == []
    prefix.read_done(0, None)
    assert prefix.settled(settled()) == [Pulled(prefix, SINK_BLOCKS, ())]


def test_after_a_loss_a_prefix_pull_asks_again(prefix: Pull) -> None:
    prefix.attach()
    prefix.blocks_ready(ready(0, 10, 11, 12))
    assert sent(prefix.attach()) == [AttachPrefix]
    assert prefix.blocks_ready(ready(0, 10, 11, 12)) == []
    prefix.reserve(SINK_BLOCKS)
    assert sent(prefix.attach()) == [AttachPrefix]
    assert prefix.blocks_ready(ready(0, 10, 11, 12)) == []
    prefix.read_done(0, None)
    assert sent(prefix.attach()) == [Settle], "another loan would help nobody"


@pytest.mark.parametrize("reserved", [False, True])
def test_a_prefix_that_is_lent_anew_is_taken_if_nothing_was_read(prefix: Pull, reserved: bool) -> None:
    """The source had lost this sink, and its loan with it."""
    prefix.blocks_ready(ready(0, 10, 11, 12))
    if reserved:
        prefix.reserve(SINK_BLOCKS)
    new: dict[str, Any] = {"lease": LeaseId("l2"), "epoch": 8}
    actions = prefix.blocks_ready(ready(0, 20, 21, 22, **new))
    if reserved:
        assert gave_up(actions) is Cause.LEASE_LOST
        return
    assert actions == []
    assert prefix.reserve(SINK_BLOCKS) == [ReadBlocks(0, (20, 21, 22), SINK_BLOCKS, None)]
    assert prefix.read_done(0, None) == [to_source(Settle(**ABOUT, **new))]


def test_a_source_without_the_prefix_ends_the_pull(prefix: Pull) -> None:
    prefix.attach()
    actions = prefix.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.LEASE_LOST, message="not here"))
    assert gave_up(actions) is Cause.LEASE_LOST


@pytest.mark.parametrize("leaves_out", ["the first block", "the last one"])
def test_a_source_that_leaves_blocks_out_is_not_asked_for_ever(pull: Pull, leaves_out: str) -> None:
    pull.attach()
    pull.blocks_ready(ready(0, 10))
    asked = 0
    for _ in range(2 * MAX_GAPS):
        answer = pull.blocks_ready(ready(2, 12)) if leaves_out == "the first block" else pull.prefill_done(done(None))
        asked += sent(answer) == [Attach]
    assert asked == MAX_GAPS
    assert state_of(pull) is PullState.ABANDONED


def test_messages_that_were_lost_now_and_then_end_no_pull(pull: Pull) -> None:
    pull.attach()
    pull.blocks_ready(ready(0, 10, num_blocks=3 * MAX_GAPS))
    for start in range(1, 2 * MAX_GAPS):
        assert sent(pull.blocks_ready(ready(start + 1, 12, num_blocks=3 * MAX_GAPS))) == [Attach]
        assert sent(pull.blocks_ready(ready(0, *range(10, 11 + start), num_blocks=3 * MAX_GAPS))) == []
    assert state_of(pull) is PullState.OFFERED
