"""The block pool against a model that keeps, for every block, its owners, its name and the steps that may name it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.contract.block_hashes import BlockHash
from common.engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 12
HASHES = [BlockHash(hashlib.sha256(bytes([number])).digest()) for number in range(8)]


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners hold references to lists of blocks, and name some; steps start and finish in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix_cache = True
        self.pool = BlockPool(NUM_BLOCKS)
        self.names: dict[int, BlockHash] = {}
        self.num_evicted = self.num_lost = 0
        self.spoiled: set[int] = set()
        self.owners: list[list[int]] = []
        self.in_flight: list[int] = []
        self.waits_for: dict[int, set[int]] = {}
        """Released blocks, and the steps that were in flight when they were."""

    def references(self, block: int) -> int:
        return sum(owned.count(block) for owned in self.owners)

    @initialize(prefix_cache=st.sampled_from([True, True, False]))
    def choose(self, prefix_cache: bool) -> None:
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(NUM_BLOCKS, prefix_cache=prefix_cache)

    def is_evictable(self, block: int) -> bool:
        return self.references(block) == 0 and block not in self.waits_for

    @rule(num=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num: int) -> None:
        before = self.pool.num_free
        if num > before:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(num)
            assert self.pool.num_free == before
            return
        num_plain = before - sum(self.is_evictable(block) for block in self.names)
        blocks = self.pool.allocate(num)
        assert len(set(blocks)) == num
        evicted = [block for block in blocks if block in self.names]
        assert blocks[min(num, num_plain) :] == evicted, "a cached block is evicted while a plain one is free"
        self.num_evicted += len(evicted)
        self.num_lost += len(evicted)
        for block in evicted:
            del self.names[block]
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

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def name(self, data: st.DataObject, block_hash: BlockHash) -> None:
        block = data.draw(st.sampled_from([block for owned in self.owners for block in owned]))
        self.pool.name([block], [block_hash])
        has_none = block not in self.names and block not in self.spoiled
        if self.prefix_cache and has_none and block_hash not in self.names.values():
            self.names[block] = block_hash

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Its KV has proved invalid: whoever holds it, it has no name until all have released it."""
        owned = data.draw(st.sampled_from(self.owners))
        blocks = owned[: data.draw(st.integers(0, len(owned)))]
        self.pool.forget(blocks)
        self.spoiled |= set(blocks)
        self.num_lost += sum(self.names.pop(block, None) is not None for block in blocks)

    @rule(wanted=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def match(self, wanted: list[BlockHash]) -> None:
        """Whatever is cached may be shared, in whichever state it is."""
        block_of = {block_hash: block for block, block_hash in self.names.items()}
        num_leading = next((i for i, block_hash in enumerate(wanted) if block_hash not in block_of), len(wanted))
        matched = self.pool.match(iter(wanted))
        assert matched == [block_of[block_hash] for block_hash in wanted[:num_leading]]
        num_unreferenced = self.pool.num_unreferenced(matched)
        assert num_unreferenced == sum(self.is_evictable(block) for block in matched)
        num_free = self.pool.num_free
        self.pool.share(matched)
        assert self.pool.num_free == num_free - num_unreferenced
        for block in matched:
            self.waits_for.pop(block, None)
        self.owners.append(matched)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owned = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owned)
        for block in owned:
            if self.references(block) == 0:
                self.spoiled.discard(block)
                if self.in_flight:
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
        assert self.pool.num_cached == len(self.names)
        assert self.pool.num_evicted == self.num_evicted
        assert self.pool.num_names_lost == self.num_lost
        assert self.pool.num_free + self.pool.num_used + self.pool.num_limbo == self.pool.num_blocks

    def teardown(self) -> None:
        for owned in self.owners:
            self.pool.release(owned)
        for step in self.in_flight:
            self.pool.step_finished(step)
        self.pool.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS, "blocks leaked"


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


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
    with pytest.raises(AssertionError, match="named but nobody holds it"):
        pool.name(blocks[:1], HASHES[:1])
    with pytest.raises(AssertionError, match="not in flight"):
        pool.step_finished(1)


def cached(pool: BlockPool, block_hashes: list[BlockHash]) -> list[int]:
    """A sequence that has come and gone."""
    blocks = pool.allocate(len(block_hashes))
    for block, block_hash in zip(blocks, block_hashes, strict=True):
        pool.name([block], [block_hash])
    pool.release(blocks)
    return blocks


def test_the_last_block_of_the_sequence_released_first_is_evicted_first() -> None:
    pool = BlockPool(5)
    first, second = cached(pool, HASHES[:2]), cached(pool, HASHES[2:4])
    (plain,) = set(range(5)) - {*first, *second}
    assert pool.allocate(4) == [plain, first[1], first[0], second[1]]
    assert (pool.num_free, pool.num_cached, pool.num_evicted) == (1, 1, 3)
    assert pool.match(HASHES[:2]) == []
    assert pool.match(HASHES[2:4]) == [second[0]]


def test_a_prefix_used_again_is_evicted_later() -> None:
    pool = BlockPool(4)
    first, second = cached(pool, HASHES[:2]), cached(pool, HASHES[2:4])
    pool.share(first)
    assert pool.num_free == 2
    pool.release(first)
    assert pool.allocate(2) == [second[1], second[0]]


def test_a_block_in_limbo_is_shared_but_not_evicted() -> None:
    pool = BlockPool(2)
    step = pool.step_started()
    first, second = cached(pool, HASHES[:2])
    assert (pool.num_free, pool.num_limbo, pool.num_cached) == (0, 2, 2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert pool.match(HASHES[:2]) == [first, second]
    assert pool.num_unreferenced([first, second]) == 0, "sharing them takes nothing from `num_free`"
    pool.share([first])
    pool.step_finished(step)
    assert (pool.num_free, pool.num_limbo, pool.num_used) == (1, 0, 1)
    assert pool.num_unreferenced([first, second]) == 1
    assert pool.allocate(1) == [second]


def test_a_name_is_given_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name([first], HASHES[:1])
    pool.name([second], HASHES[:1])  # The same contents, computed twice.
    pool.name([first], HASHES[1:2])
    assert pool.match(HASHES[:1]) == [first]
    assert pool.match(HASHES[1:2]) == []
    pool.release([first, second])
    assert pool.allocate(1) == [second], "the block without a name is plain"


def test_what_is_forgotten_is_named_no_more_while_anybody_holds_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.name([block], [HASHES[0]])
    pool.share([block])
    lost = pool.num_names_lost
    pool.forget([block])
    assert pool.num_names_lost == lost + 1
    pool.release([block])
    pool.name([block], [HASHES[0]])
    assert pool.match([HASHES[0]]) == []
    pool.check_invariants()
    pool.release([block])
    again = pool.allocate(2)
    pool.name([block], [HASHES[0]])
    assert pool.match([HASHES[0]]) == [block], "its next owner has computed it anew"
    pool.release(again)
    pool.check_invariants()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(2, prefix_cache=False)
    cached(pool, HASHES[:2])
    assert pool.match(HASHES[:2]) == []
    assert (pool.num_free, pool.num_cached, pool.num_evicted) == (2, 0, 0)


def test_what_was_taken_back_does_not_pile_up_when_the_rest_is_given_away() -> None:
    """30 blocks are cached and released, the last 20 of these taken back, and the others evicted."""
    pool = BlockPool(30)
    blocks = pool.allocate(30)
    names = [BlockHash(hashlib.sha256(bytes([1, number])).digest()) for number in range(30)]
    pool.name(blocks, names)
    for block in blocks:
        pool.release([block])
    pool.share(blocks[10:])
    pool.check_invariants()
    assert pool.allocate(10) == blocks[:10]
    pool.check_invariants()
