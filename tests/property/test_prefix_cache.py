"""The prefix cache under random traffic, on a memory that says which prefix each block holds.

Sequences with common prefixes are admitted, computed, forked, grown and released while steps start and end in any
order. A block that is matched holds the very tokens it is asked for, no block is handed out that somebody or a step in
flight still uses, and what is evicted is what was least recently released. The last test shows that the machine can
fail: it finds out every broken pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from common.contract.block_hashes import BlockChain, BlockHash
from common.engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 10
MAX_STEPS_IN_FLIGHT = 3
BLOCK_SIZE = 2
SALT = st.sampled_from(["", "", "a"])
TOKEN = st.sampled_from([0, 0, 0, 1])
PROMPT = st.builds(lambda num, tail: [0] * num + tail, st.integers(1, 3 * BLOCK_SIZE), st.lists(TOKEN, max_size=3))
"""Most begin alike, and part sooner or later."""

Contents = tuple[str, tuple[int, ...]]
"""The salt, and every token from the first of the sequence to the last of the block."""


@dataclass(eq=False)
class HeldTokens:
    """Tokens, the blocks for them, and which of these blocks are computed."""

    salt: str
    token_ids: list[int]
    chain: BlockChain = field(init=False)
    block_table: list[int] = field(default_factory=list)
    num_begun: int = 0
    """Blocks `[0, num_begun)` are computed, or a step in flight computes them."""
    computed: set[int] = field(default_factory=set)
    """Indices into the block table."""

    def __post_init__(self) -> None:
        self.chain = BlockChain(BLOCK_SIZE, self.salt)
        self.chain.extend(self.token_ids, len(self.token_ids))

    @property
    def num_missing(self) -> int:
        return -(-len(self.token_ids) // BLOCK_SIZE) - len(self.block_table)

    def contents(self, index: int) -> Contents:
        return self.salt, tuple(self.token_ids[: (index + 1) * BLOCK_SIZE])

    def hold(self, computed: list[int]) -> None:
        self.block_table = list(computed)
        self.num_begun = len(computed)
        self.computed = set(range(len(computed)))


@dataclass
class Step:
    """What the device reads and writes until the step ends, whatever becomes of the sequences meanwhile."""

    reads: dict[int, Contents] = field(default_factory=dict)
    writes: list[tuple[HeldTokens, int, int]] = field(default_factory=list)
    """(sequence, index, block)."""

    def uses(self, block: int) -> bool:
        return block in self.reads or any(block == written for _, _, written in self.writes)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences and steps on a pool, beside a model of who holds what, what it is called and in which order it goes."""

    def __init__(self, pool: type[BlockPool] = BlockPool) -> None:
        super().__init__()
        self.pool = pool(NUM_BLOCKS)
        self.memory: dict[int, Contents] = {}
        self.sequences: list[HeldTokens] = []
        self.steps: dict[int, Step] = {}
        self.names: dict[Contents, int] = {}
        self.num_evicted = 0
        self.idle = list(range(NUM_BLOCKS))
        """Blocks that may be handed out, with a name or without, in the order of their last release."""
        self.waits_for: dict[int, set[int]] = {}
        """Released blocks, in the order of release, and the steps that were in flight then and still are."""

    # --- the model ---------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return sum(sequence.block_table.count(block) for sequence in self.sequences)

    def share(self, blocks: list[int]) -> None:
        num_left = self.pool.num_free - self.pool.num_unreferenced(blocks)
        self.pool.share(blocks)
        assert self.pool.num_free == num_left, "sharing cost other than foretold"
        for block in blocks:
            if block in self.waits_for:
                event("shared from limbo")
                del self.waits_for[block]
            elif block in self.idle:
                event("shared from the unreferenced")
                self.idle.remove(block)

    def allocate(self, num: int) -> list[int]:
        named = set(self.names.values())
        order = [block for block in self.idle if block not in named] + [block for block in self.idle if block in named]
        blocks = self.pool.allocate(num)
        assert blocks == order[:num], "blocks are handed out in another order than they were released"
        for block in blocks:
            assert self.references(block) == 0, "a block with an owner is handed out"
            assert not any(step.uses(block) for step in self.steps.values()), "a block is handed out during a step"
            self.idle.remove(block)
            self.memory.pop(block, None)
        self.num_evicted += len(named.intersection(blocks))
        self.names = {contents: block for contents, block in self.names.items() if block not in blocks}
        return blocks

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.references(block) == 0:
                if self.steps:
                    self.waits_for[block] = set(self.steps)
                else:
                    self.idle.append(block)

    def complete(self, sequence: HeldTokens) -> None:
        """Give `sequence` the blocks that it lacks; or else it goes, and so does the oldest, which is in the way."""
        if sequence.num_missing > self.pool.num_free:
            event("no room")
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(sequence.num_missing)
            self.release(sequence.block_table)
            if self.sequences:
                self.release(self.sequences.pop(0).block_table)
            return
        sequence.block_table += self.allocate(sequence.num_missing)
        self.sequences.append(sequence)

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(salt=SALT, token_ids=PROMPT)
    def admit(self, salt: str, token_ids: list[int]) -> None:
        sequence = HeldTokens(salt, token_ids)
        matched = self.pool.match(sequence.chain.hashes)
        event(f"{len(matched)} blocks matched")
        for index, block in enumerate(matched):
            assert self.memory[block] == sequence.contents(index), "a matched block holds something else"
        wanted = [self.names.get(sequence.contents(index)) for index in range(len(sequence.chain.hashes))]
        assert matched == (wanted[: wanted.index(None)] if None in wanted else wanted), "a cached block is not found"
        self.share(matched)
        sequence.hold(matched)
        self.complete(sequence)

    @rule(salt=SALT, token_ids=PROMPT, stays=st.booleans())
    def compute_at_once(self, salt: str, token_ids: list[int], stays: bool) -> None:
        """A whole prompt in one step, maybe the last one of the newest sequence: the way to a full cache."""
        self.admit(salt, token_ids)
        self.start_step(NUM_BLOCKS)
        self.end_step(next(reversed(self.steps)), named_first=True)
        if self.sequences and not stays:
            self.release(self.sequences.pop().block_table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token_ids=st.lists(TOKEN, max_size=BLOCK_SIZE + 1))
    def fork(self, data: st.DataObject, token_ids: list[int]) -> None:
        """One more sequence goes on from the computed blocks of another, without any match."""
        parent = data.draw(st.sampled_from(self.sequences))
        num_leading = next(index for index in range(len(parent.block_table) + 1) if index not in parent.computed)
        child = HeldTokens(parent.salt, parent.token_ids[: num_leading * BLOCK_SIZE] + token_ids)
        child.hold(parent.block_table[:num_leading])
        self.share(child.block_table)
        self.complete(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=TOKEN)
    def grow(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if len(sequence.token_ids) % BLOCK_SIZE == 0:
            if self.pool.num_free == 0:
                return
            sequence.block_table += self.allocate(1)
        sequence.token_ids.append(token)
        sequence.chain.extend(sequence.token_ids, len(sequence.token_ids))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.release(sequence.block_table)

    @rule(num_blocks=st.integers(0, 2))
    def start_step(self, num_blocks: int) -> None:
        """Every sequence reads what is computed and computes up to `num_blocks` full blocks more."""
        if len(self.steps) == MAX_STEPS_IN_FLIGHT:
            self.end_step(next(iter(self.steps)), named_first=False)
        step = Step()
        for sequence in self.sequences:
            for index in sequence.computed:
                step.reads[sequence.block_table[index]] = sequence.contents(index)
            end = min(sequence.num_begun + num_blocks, len(sequence.token_ids) // BLOCK_SIZE)
            for index in range(sequence.num_begun, end):
                step.writes.append((sequence, index, sequence.block_table[index]))
            sequence.num_begun = end
        self.steps[self.pool.step_started()] = step

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), named_first=st.booleans())
    def finish_step(self, data: st.DataObject, named_first: bool) -> None:
        self.end_step(data.draw(st.sampled_from(list(self.steps))), named_first)

    def end_step(self, number: int, named_first: bool) -> None:
        step = self.steps.pop(number)
        for block, contents in step.reads.items():
            assert self.memory.get(block) == contents, "a step read a block that was changed under it"
        for sequence, index, block in step.writes:
            assert self.references(block) == (sequence in self.sequences), "a step wrote to somebody else's block"
            self.memory[block] = sequence.contents(index)
        if named_first:
            self.name(step)
        self.pool.step_finished(number)
        for block, steps in list(self.waits_for.items()):
            steps.discard(number)
            if not steps:
                del self.waits_for[block]
                self.idle.append(block)
        if not named_first:
            self.name(step)

    def name(self, step: Step) -> None:
        for sequence, index, block in step.writes:
            if sequence in self.sequences:
                sequence.computed.add(index)
                self.pool.name([block], [sequence.chain.hashes[index]])
                if block not in self.names.values():
                    self.names.setdefault(sequence.contents(index), block)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self.references(block)
        assert self.pool.num_free == len(self.idle)
        assert self.pool.num_limbo == len(self.waits_for)
        assert self.pool.num_used == NUM_BLOCKS - len(self.idle) - len(self.waits_for)
        assert self.pool.num_cached == len(self.names)
        assert self.pool.num_evicted == self.num_evicted
        for contents, block in self.names.items():
            assert self.memory[block] == contents, "a name outlived the contents"

    def teardown(self) -> None:
        while self.sequences:
            self.release(self.sequences.pop().block_table)
        for number in list(self.steps):
            self.end_step(number, named_first=True)
        self.agrees_with_the_model()
        self.allocate(NUM_BLOCKS)
        assert self.pool.num_cached == 0, "a block can never be had again"
        self.pool.check_invariants()


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


# --- pools that are broken -------------------------------------------------------------------------------------------


class Broken(BlockPool):
    """Is found out by the machine, not by its own conscience."""

    def check_invariants(self) -> None:
        pass

    def _evict_first(self, first: list[int], num: int) -> list[int]:
        order = [*first, *(block for block in self._unreferenced if block not in first)]
        self._unreferenced = type(self._unreferenced)()
        self._unreferenced.extend(order)
        return super()._evict(num)


class EvictsUsedBlocks(Broken):
    def _evict(self, num: int) -> list[int]:
        used = [block for block, name in enumerate(self._names) if name is not None and self._ref_counts[block]]
        return self._evict_first(used[: min(num, 1)], num)


class EvictsTheLatest(Broken):
    def _evict(self, num: int) -> list[int]:
        return self._evict_first(list(self._unreferenced)[-1:], num)


class KeepsTheNameOfTheEvicted(Broken):
    def _evict(self, num: int) -> list[int]:
        if not num:
            return []
        block = next(iter(self._unreferenced))
        name = self._names[block]
        assert name is not None
        evicted = super()._evict(num)
        self._names[block], self._named[name] = name, block
        return evicted


class ForgetsLimbo(Broken):
    def release(self, blocks: Sequence[int]) -> None:
        in_flight, self._in_flight = self._in_flight, {}
        super().release(blocks)
        self._in_flight = in_flight


class LeavesWhatIsSharedInLimbo(Broken):
    def share(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        waiting = {block: self._limbo[block] for block in blocks if block in self._limbo}
        super().share(blocks)
        self._limbo.update(waiting)


class ReleasesTheFirstBlockFirst(Broken):
    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


class NamesTwoBlocksAlike(Broken):
    def name(self, blocks: Sequence[int], block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._named.pop(block_hash, None)
        super().name(blocks, block_hashes)


@pytest.mark.parametrize("pool", Broken.__subclasses__())
def test_the_machine_finds_out_a_broken_pool(pool: type[Broken]) -> None:
    class BrokenMachine(PrefixCacheMachine):
        def __init__(self) -> None:
            super().__init__(pool)

    search = settings(
        max_examples=300,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, LookupError)) as found:
        run_state_machine_as_test(BrokenMachine, settings=search)
    first: BaseException = found.value
    while first.__context__ is not None:  # teardown fails as well, whatever has failed before it
        first = first.__context__
    assert isinstance(first, AssertionError | LookupError)
