"""The block pool against a model that keeps, for every block, its owners and the steps that may name it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 12


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners hold references to lists of blocks; steps start and finish in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []
        self.in_flight: list[int] = []
        self.waits_for: dict[int, set[int]] = {}
        """Released blocks, and the steps that were in flight when they were."""

    def references(self, block: int) -> int:
        return sum(owned.count(block) for owned in self.owners)

    @rule(num=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num: int) -> None:
        before = self.pool.num_free
        if num > before:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(num)
            assert self.pool.num_free == before
            return
        blocks = self.pool.allocate(num)
        assert len(set(blocks)) == num
        for block in blocks:
            assert self.references(block) == 0, "a block with an owner is handed out"
            assert block not in self.waits_for, "a block is handed out that a step in flight may name"
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owned = data.draw(st.sampled_from(self.owners))
        prefix = owned[: data.draw(st.integers(0, len(owned)))]
        self.pool.share(prefix)
        self.owners.append(prefix)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owned = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owned)
        for block in owned:
            if self.references(block) == 0 and self.in_flight:
                self.waits_for[block] = set(self.in_flight)

    @rule()
    def start_step(self) -> None:
        self.in_flight.append(self.pool.step_started())

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish_step(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(step)
        self.pool.step_finished(step)
        self.waits_for = {block: steps - {step} for block, steps in self.waits_for.items() if steps - {step}}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self.references(block)
        assert self.pool.num_used == sum(self.references(block) > 0 for block in range(NUM_BLOCKS))
        assert self.pool.num_limbo == len(self.waits_for)
        assert self.pool.num_free + self.pool.num_used + self.pool.num_limbo == self.pool.num_blocks

    def teardown(self) -> None:
        for owned in self.owners:
            self.pool.release(owned)
        for step in self.in_flight:
            self.pool.step_finished(step)
        self.pool.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS, "blocks leaked"


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_block_freed_first_is_handed_out_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in (blocks[2], blocks[0], blocks[3]):
        pool.release([block])
    assert pool.allocate(3) == [blocks[2], blocks[0], blocks[3]]


def test_a_block_waits_for_the_step_in_flight() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    step = pool.step_started()
    pool.release([block])
    assert (pool.num_free, pool.num_limbo, pool.num_used) == (1, 1, 0)
    later = pool.step_started()
    pool.step_finished(step)
    assert (pool.num_free, pool.num_limbo) == (2, 0), "a step started after the release cannot name the block"
    pool.step_finished(later)


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.share(blocks)
    with pytest.raises(AssertionError, match="not in flight"):
        pool.step_finished(1)
