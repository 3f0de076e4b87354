"""A pull against whatever a source may send, in whatever order: each reserved block has exactly one end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages.fields import Message
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
from kv_transfer.pull import Pull, PullAction, PullState, ReadBlocks

KEY = RequestKey(RequestId("r1"), 1)
AT = Source(address="p:1", incarnation=Incarnation("p"))
ABOUT: dict[str, Any] = {"request": KEY.request, "attempt": KEY.attempt}
SEQUENCE = AttachSequence(**ABOUT, sequence=RequestKey(RequestId("r1"), 7), choice=2, position=6)
LEASE = (LeaseId("l1"), 3)
OTHER_LEASES = [(LeaseId("l2"), 3), (LeaseId("l1"), 4)]
BASE = {LEASE: 100, OTHER_LEASES[0]: 300, OTHER_LEASES[1]: 400}
"""Source block `BASE[lease] + i` holds block `i` of the sequence."""
HASHES = block_hashes(range(6), 1)


def sent(action: PullAction) -> Message:
    assert isinstance(action, SendToSource)
    assert action.address == AT.address
    return action.message


class Worker:
    """The worker around a pull, and a source that sends anything.

    Sink block `200 + i` is for block `i` of the sequence; the sink may hold the leading ones already. A pull that has
    not begun to read may go over to another lease; one that has may not. A prefix is offered whole, or not at all. The
    pull of a running sequence is like that of a prompt, but for what it asks for.
    """

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.num_blocks = data.draw(st.integers(1, 5), label="blocks")
        self.checksums = data.draw(st.booleans(), label="checksums")
        self.calm = data.draw(st.booleans(), label="calm")
        """Nothing ends the pull before it settles, so that some do."""
        self.num_held = data.draw(st.integers(0, self.num_blocks), label="held")
        self.sink_blocks = tuple(range(200, 200 + self.num_blocks))
        names = HASHES[: data.draw(st.integers(self.num_blocks, len(HASHES)))]
        kinds: list[Attach | AttachPrefix | AttachSequence] = [
            Attach(**ABOUT, offered=data.draw(st.integers(1, 3), label="offered")),
            AttachPrefix(**ABOUT, block_hashes=tuple(names)),
            SEQUENCE,
        ]
        self.asked_for = data.draw(st.sampled_from(kinds), label="asked for")
        self.prefix = isinstance(self.asked_for, AttachPrefix)
        self.pull = Pull(AT, self.asked_for)
        self.wanted = False
        self.reserved = False
        self.reading: dict[int, tuple[int, ...]] = {}
        """Open reads: first block → sink blocks."""
        self.arrived: set[int] = set()
        """Sink blocks that hold what they should: held before, or their read is done."""
        self.ends: Counter[int] = Counter()
        """Sink blocks released or admitted."""
        self.asked = False
        self.told_valid = False
        self.told_tokens: set[tuple[LeaseId, int]] = set()
        """Leases whose first tokens the pull has heard."""
        self.current = LEASE
        """The lease that the pull reads under."""
        self.attached = self.detached = False
        self.over: PullAction | None = None

    # --- what the pull decides -----------------------------------------------------------------------------------

    def check(self, actions: list[PullAction]) -> None:
        for action in actions:
            assert not isinstance(self.over, Pulled), "something happens after the pull is settled"
            late = isinstance(action, Released) or action == SendToSource(AT.address, Detach(**ABOUT))
            assert self.over is None or late, "more than a release, and a word to the source, after the end"
            match action:
                case SendToSource(_, Attach() | AttachPrefix() | AttachSequence() as message):
                    assert message == self.asked_for
                    self.attached = True
                case SendToSource(_, Detach() as message):
                    assert message.key == KEY
                    assert not self.reading, "the source is told before the reads have ended"
                    assert self.attached, "the source is told by a pull that it does not know"
                    assert not self.detached, "the source is told twice"
                    self.detached = True
                case SendToSource(_, Settle() as message):
                    assert not self.reading, "settles while a read is open"
                    assert self.arrived == set(self.sink_blocks), "settles before everything was read"
                    assert self.prefix or self.current in self.told_tokens, "settles without first tokens"
                    assert (message.key, (message.lease, message.epoch)) == (KEY, self.current)
                    self.asked = True
                case PullOffered(_, num_blocks):
                    assert not self.wanted
                    assert num_blocks == self.num_blocks
                    self.wanted = True
                case ReadBlocks():
                    self.check_read(action)
                case Pulled(_, block_ids, first_tokens):
                    assert self.told_valid
                    assert bool(first_tokens) is not self.prefix
                    assert block_ids == self.sink_blocks
                    assert self.arrived == set(block_ids)
                    self.end(block_ids)
                    self.over = action
                case Released(block_ids):
                    self.end(block_ids)
                case PullFailed():
                    self.over = action
                case _:
                    raise AssertionError(action)

    def check_read(self, read: ReadBlocks) -> None:
        start, end = read.start, read.start + len(read.source_blocks)
        assert self.reserved
        assert 0 <= start < end <= self.num_blocks
        base = BASE[self.current]
        assert read.source_blocks == tuple(range(base + start, base + end))
        assert read.sink_blocks == self.sink_blocks[start:end]
        assert read.checksums == (tuple(range(start, end)) if self.checksums else None)
        assert not set(read.sink_blocks) & (self.arrived | self.under_read), "a block is read into twice"
        self.reading[start] = read.sink_blocks

    def end(self, block_ids: tuple[int, ...]) -> None:
        assert self.reserved
        assert set(block_ids) <= set(self.sink_blocks)
        assert not set(block_ids) & self.under_read, "a block that may still be written to changes hands"
        self.ends.update(block_ids)

    @property
    def under_read(self) -> set[int]:
        return {block for blocks in self.reading.values() for block in blocks}

    def check_blocks(self) -> None:
        """What holds between any two events."""
        self.pull.check_invariants()
        assert all(count == 1 for count in self.ends.values()), "a block ends twice"
        if self.reserved:
            held = set(self.sink_blocks) - set(self.ends)
            assert held == (set(self.sink_blocks) if self.over is None else self.under_read), "a block is lost"
        if self.over is not None:
            gave_up = isinstance(self.over, PullFailed)
            assert self.detached == (gave_up and self.attached and not self.reading)
            assert set(self.pull.quarantined) == self.under_read
            assert self.pull.over == (not self.under_read)
            expected = PullState.SETTLED if isinstance(self.over, Pulled) else PullState.ABANDONED
            assert self.pull.state is expected

    # --- the source ----------------------------------------------------------------------------------------------

    def lease(self) -> tuple[LeaseId, int]:
        """Nearly always the one that the pull knows."""
        return self.current if self.calm else self.data.draw(st.sampled_from([self.current] * 14 + OTHER_LEASES))

    def blocks_ready(self) -> None:
        """Any part of the offer, again or early: duplicates, gaps and reordering. Of a prefix nearly always all."""
        start, end = 0, self.num_blocks
        if not self.prefix or (not self.calm and self.data.draw(st.sampled_from([False] * 14 + [True]))):
            start = self.data.draw(st.integers(0, self.num_blocks))
            end = self.data.draw(st.integers(start, self.num_blocks))
        whole = (start, end) == (0, self.num_blocks)
        lease, epoch = self.lease()
        if (
            self.pull.state is PullState.OFFERED
            and start == 0
            and self.data.draw(st.sampled_from([False, False, True]))
        ):
            lease, epoch = self.data.draw(st.sampled_from(OTHER_LEASES))  # nothing was read yet: it may take over
        if self.pull.state is PullState.ATTACHING and (lease, epoch) != LEASE:
            return  # the first lease is the one that is told first
        base = BASE[lease, epoch]
        message = BlocksReady(
            **ABOUT,
            lease=lease,
            epoch=epoch,
            start=start,
            block_ids=tuple(range(base + start, base + end)),
            num_blocks=self.num_blocks,
            checksums=tuple(range(start, end)) if self.checksums else None,
        )
        if self.prefix and not whole and self.pull.state in (PullState.ATTACHING, PullState.OFFERED, PullState.PULLING):
            self.check(self.pull.blocks_ready(message))
            assert isinstance(self.over, PullFailed)
            assert self.over.cause is Cause.TRANSFER
            return
        offered = self.pull.state is PullState.OFFERED
        hears = offered or self.pull.state in (PullState.ATTACHING, PullState.PULLING)
        actions = self.pull.blocks_ready(message)
        if offered and self.pull.state is PullState.OFFERED:
            self.current = (lease, epoch)
        self.check(actions)
        if hears and self.over is None:
            assert (lease, epoch) == self.current, "blocks of two leases are taken for one sequence"

    def prefill_done(self) -> None:
        ended = self.data.draw(st.sampled_from([(False,), (False, False), (False, True), (True, False), (True,)]))
        if self.calm and all(ended):
            return
        lease, epoch = self.lease()
        first_tokens = tuple(
            Tokens(**ABOUT, choice=choice, position=7, token_ids=(1,), finish_reason="stop" if end else None)
            for choice, end in enumerate(ended)
        )
        hears = self.pull.state in (PullState.OFFERED, PullState.PULLING) and not self.prefix
        if hears:
            self.told_tokens.add((lease, epoch))
        self.check(self.pull.prefill_done(PrefillDone(**ABOUT, lease=lease, epoch=epoch, first_tokens=first_tokens)))
        if hears and ((lease, epoch) != self.current or all(ended)):
            assert isinstance(self.over, PullFailed)

    def settled(self) -> None:
        """What a source says: valid only to who has asked, and of the lease that was asked about."""
        lease, epoch = self.data.draw(st.sampled_from([self.current] * 4 + OTHER_LEASES))
        valid = self.data.draw(st.sampled_from([True, True, False])) and (self.asked or (lease, epoch) != self.current)
        if (lease, epoch) == self.current:
            self.told_valid |= valid
        self.check(self.pull.settled(Settled(**ABOUT, lease=lease, epoch=epoch, valid=valid)))

    def withdrawn(self) -> None:
        self.check(self.pull.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.DEADLINE, message="expired")))
        assert self.over is not None

    # --- the worker ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        settling = [Settle] if self.prefix else [type(self.asked_for), Settle]
        states = {PullState.SETTLING: settling, PullState.SETTLED: [], PullState.ABANDONED: []}
        expected = states.get(self.pull.state, [type(self.asked_for)])
        actions = self.pull.attach()
        assert [type(sent(action)) for action in actions] == expected
        self.check(actions)

    def reserve(self) -> None:
        self.reserved = True
        self.arrived.update(self.sink_blocks[: self.num_held])
        self.check(self.pull.reserve(self.sink_blocks, self.num_held))

    def read_done(self) -> None:
        start = self.data.draw(st.sampled_from(sorted(self.reading)))
        failed = self.data.draw(st.sampled_from([False] * 7 + [not self.calm]))
        blocks = self.reading.pop(start)
        if not failed:
            self.arrived.update(blocks)
        self.check(self.pull.read_done(start, "the peer is gone" if failed else None))

    def abandon(self) -> None:
        self.check(self.pull.abandon(Cause.DEADLINE, "the time is up"))
        assert self.over is not None

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next, what leads on more often than what ends it."""
        steps = [self.blocks_ready] * 6 + [self.prefill_done] * 2 + [self.attach] * 2 + [self.settled] * 2
        if self.wanted and not self.reserved and self.over is None:
            steps += [self.reserve] * 6
        if self.reading:
            steps += [self.read_done] * 6
        if self.asked:
            steps += [self.settled] * 6
        return steps if self.calm else [*steps, self.withdrawn, self.abandon]

    def tear_down(self) -> None:
        self.check(self.pull.abandon(Cause.CANCELLED, "teardown"))
        for start in list(self.reading):
            del self.reading[start]
            self.check(self.pull.read_done(start, "fenced"))
        self.check_blocks()
        assert self.pull.over
        assert set(self.ends) == (set(self.sink_blocks) if self.reserved else set())


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_each_reserved_block_is_admitted_or_released_once(data: st.DataObject) -> None:
    worker = Worker(data)
    for _ in range(data.draw(st.integers(5, 30), label="steps")):
        data.draw(st.sampled_from(worker.steps()))()
        worker.check_blocks()
    asked_by = type(worker.asked_for).__name__
    event(f"{asked_by}: {worker.pull.state}, {'with' if worker.reading else 'without'} reads open")
    worker.tear_down()
