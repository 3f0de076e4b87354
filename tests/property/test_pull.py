"""A pull against whatever a source may send, in whatever order: each reserved block has exactly one end."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages import (
    Attach,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
    Source,
    Tokens,
)
from kv_transfer.sink import Action, Admit, GaveUp, Pull, PullState, Release, SendToSource, StartRead, WantBlocks

KEY = RequestKey(RequestId("r1"), 1)
ABOUT = {"request": KEY.request, "attempt": KEY.attempt}
LEASE = (LeaseId("l1"), 3)
OTHERS = [(LeaseId("l2"), 3), (LeaseId("l1"), 4)]

leases = st.sampled_from([LEASE] * 30 + OTHERS)
"""Nearly always the one lease."""
rarely = st.sampled_from([False] * 9 + [True])


class PullMachine(RuleBasedStateMachine):
    """Source block `100 + i` holds block `i` of the sequence; sink block `200 + i` is for it.

    Under another lease than the first the source would offer other blocks.
    """

    @initialize(num_blocks=st.integers(1, 5), checksums=st.booleans(), begin=st.sampled_from(PullState))
    def start_pull(self, num_blocks: int, checksums: bool, begin: PullState) -> None:
        self.num_blocks = num_blocks
        self.checksums = checksums
        self.pull = Pull(KEY, Source(address="p:1", incarnation=Incarnation("p")))
        self.wanted = False
        self.reserved = False
        self.reading: dict[int, tuple[int, ...]] = {}
        """Open reads: first block → sink blocks."""
        self.arrived: set[int] = set()
        """Sink blocks whose read is done."""
        self.ends: Counter[int] = Counter()
        """Sink blocks released or admitted."""
        self.asked: set[tuple[LeaseId, int]] = set()
        self.told_valid = False
        self.told_tokens = False
        self.over: Action | None = None
        if begin is not PullState.ATTACHING:
            self.check(self.pull.blocks_ready(self.offer(0, 0, LEASE)))
        if begin not in (PullState.ATTACHING, PullState.OFFERED):
            self.reserve()

    @property
    def sink_blocks(self) -> tuple[int, ...]:
        return tuple(range(200, 200 + self.num_blocks))

    def check(self, actions: list[Action]) -> None:
        for action in actions:
            assert not isinstance(self.over, Admit), "something happens after the pull is settled"
            assert self.over is None or isinstance(action, Release), "more than a release after the end"
            match action:
                case SendToSource(Attach() | Detach()):
                    pass
                case SendToSource(Settle() as message):
                    assert not self.reading, "settles while a read is open"
                    assert self.arrived == set(self.sink_blocks), "settles before everything was read"
                    assert self.told_tokens
                    self.asked.add((message.lease, message.epoch))
                case WantBlocks(num_blocks):
                    assert not self.wanted
                    assert num_blocks == self.num_blocks
                    self.wanted = True
                case StartRead():
                    self.check_read(action)
                case Admit(block_ids, _):
                    assert self.told_valid
                    assert block_ids == self.sink_blocks
                    assert self.arrived == set(block_ids)
                    self.end(block_ids)
                    self.over = action
                case Release(block_ids):
                    self.end(block_ids)
                case GaveUp():
                    self.over = action
                case _:
                    raise AssertionError(action)

    def check_read(self, read: StartRead) -> None:
        assert self.reserved
        start, source_blocks, sink_blocks = read.start, read.source_blocks, read.sink_blocks
        end = start + len(source_blocks)
        assert 0 <= start < end <= self.num_blocks
        assert source_blocks == tuple(range(100 + start, 100 + end))
        assert sink_blocks == self.sink_blocks[start:end]
        assert read.checksums == (tuple(range(start, end)) if self.checksums else None)
        assert not set(sink_blocks) & self.arrived, "a block is read twice"
        assert not any(set(sink_blocks) & set(blocks) for blocks in self.reading.values()), "two reads into one block"
        self.reading[start] = sink_blocks

    def end(self, block_ids: tuple[int, ...]) -> None:
        assert self.reserved
        assert set(block_ids) <= set(self.sink_blocks)
        under_read = {block for blocks in self.reading.values() for block in blocks}
        assert not set(block_ids) & under_read, "a block that may still be written to changes hands"
        self.ends.update(block_ids)

    # --- the source ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), lease=leases)
    def blocks_ready(self, data: st.DataObject, lease: tuple[LeaseId, int]) -> None:
        """Any part of the offer, again or early: duplicates, gaps and reordering."""
        start = data.draw(st.integers(0, self.num_blocks))
        end = data.draw(st.integers(start, self.num_blocks))
        self.check(self.pull.blocks_ready(self.offer(start, end, lease)))

    @rule()
    def everything_ready(self) -> None:
        self.check(self.pull.blocks_ready(self.offer(0, self.num_blocks, LEASE)))

    def offer(self, start: int, end: int, lease: tuple[LeaseId, int]) -> BlocksReady:
        base = 100 if lease == LEASE else 300
        return BlocksReady(
            **ABOUT,
            lease=lease[0],
            epoch=lease[1],
            start=start,
            block_ids=tuple(range(base + start, base + end)),
            num_blocks=self.num_blocks,
            checksums=tuple(range(start, end)) if self.checksums else None,
        )

    @rule(lease=leases, ended=st.sampled_from([(False,), (False, True), (False, False), (True, False), (True,)]))
    def prefill_done(self, lease: tuple[LeaseId, int], ended: tuple[bool, ...]) -> None:
        first_tokens = tuple(
            Tokens(**ABOUT, choice=choice, position=7, token_ids=(1,), finish_reason="stop" if end else None)
            for choice, end in enumerate(ended)
        )
        self.told_tokens = True
        self.check(
            self.pull.prefill_done(PrefillDone(**ABOUT, lease=lease[0], epoch=lease[1], first_tokens=first_tokens))
        )

    @precondition(lambda self: self.asked)
    @rule(valid=st.sampled_from([True, True, False]), lease=leases)
    def settled(self, valid: bool, lease: tuple[LeaseId, int]) -> None:
        """Valid is said only to who asked: of a lease that was asked about."""
        self.told_valid |= valid and lease in self.asked
        if lease in self.asked or not valid:
            self.check(self.pull.settled(Settled(**ABOUT, lease=lease[0], epoch=lease[1], valid=valid)))

    @precondition(lambda self: not self.asked)
    @rule(lease=leases)
    def settled_unasked(self, lease: tuple[LeaseId, int]) -> None:
        assert self.pull.settled(Settled(**ABOUT, lease=lease[0], epoch=lease[1], valid=True)) == []

    # --- the worker around it ------------------------------------------------------------------------------------

    @rule()
    def attach(self) -> None:
        actions = self.pull.attach()
        expected = {PullState.SETTLING: Settle, PullState.SETTLED: None, PullState.ABANDONED: None}
        expects = expected.get(self.pull.state, Attach)
        assert [type(action.message) for action in actions] == ([] if expects is None else [expects])
        self.check(actions)

    @precondition(lambda self: self.wanted and not self.reserved and self.over is None)
    @rule()
    def reserve(self) -> None:
        self.reserved = True
        self.check(self.pull.reserve(self.sink_blocks))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=rarely)
    def read_done(self, data: st.DataObject, fails: bool) -> None:
        start = data.draw(st.sampled_from(sorted(self.reading)))
        blocks = self.reading.pop(start)
        if not fails:
            self.arrived.update(blocks)
        self.check(self.pull.read_done(start, "the peer is gone" if fails else None))

    @precondition(lambda self: self.over is None)
    @rule(how=st.sampled_from([None] * 8 + ["withdrawn", "abandoned"]), detach=st.booleans())
    def end_it(self, how: str | None, detach: bool) -> None:
        """Rarely, or nothing else would happen."""
        if how == "withdrawn":
            self.check(self.pull.withdrawn(OfferWithdrawn(**ABOUT, cause=Cause.DEADLINE, message="expired")))
        elif how == "abandoned":
            self.check(self.pull.abandon(Cause.DEADLINE, "the time is up", detach=detach))
        assert (self.over is not None) == (how is not None)

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def blocks_add_up(self) -> None:
        self.pull.check_invariants()
        assert all(count == 1 for count in self.ends.values()), "a block ends twice"
        under_read = {block for blocks in self.reading.values() for block in blocks}
        if self.reserved:
            held = set(self.sink_blocks) - set(self.ends)
            assert held == (set(self.sink_blocks) if self.over is None else under_read), "a block is lost"
        if self.over is not None:
            assert set(self.pull.quarantined) == (under_read if isinstance(self.over, GaveUp) else set())
            assert self.pull.over == (not under_read)
            expected = PullState.SETTLED if isinstance(self.over, Admit) else PullState.ABANDONED
            assert self.pull.state is expected

    def teardown(self) -> None:
        if not hasattr(self, "pull"):
            return
        self.check(self.pull.abandon(Cause.CANCELLED, "teardown", detach=True))
        for start in list(self.reading):
            del self.reading[start]
            self.check(self.pull.read_done(start, "fenced"))
        self.blocks_add_up()
        assert self.pull.over
        assert set(self.ends) == (set(self.sink_blocks) if self.reserved else set())


TestPull = PullMachine.TestCase
TestPull.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
