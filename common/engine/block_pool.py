"""Who may use which KV block. Reference counts and a free list; no torch, no I/O, no clock.

The life of a block:

    free ── allocate ──► used (1 reference) ── share ──► used (more) ── release … release ──► limbo ──► free

A step that was started before the last release may still read or write the block on the device, so the block waits in
*limbo* until every such step has finished. With no step in flight it is free at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from common.contract.errors import BatonError


class OutOfBlocksError(BatonError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Reference-counted blocks `[0, num_blocks)`; every operation is O(1) per block.

    Free blocks are handed out oldest-freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # (last step started before the release, block), in the order of release, hence of steps.
        self._limbo: deque[tuple[int, int]] = deque()
        # Steps in flight, oldest first: a dict for its order and its O(1) removal from the middle.
        self._in_flight: dict[int, None] = {}
        self._last_step = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_limbo(self) -> int:
        """Released blocks that wait for a step in flight."""
        return len(self._limbo)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - len(self._limbo)

    def ref_count(self, block: int) -> int:
        """References to `block`; 0 when it is free or in limbo."""
        return self._ref_counts[block]

    def allocate(self, num: int) -> list[int]:
        """Take `num` free blocks, each with one reference.

        Raises `OutOfBlocksError`, and takes none, if fewer are free; callers compare with `num_free` first.
        """
        if num > len(self._free):
            raise OutOfBlocksError(f"{num} blocks wanted, {len(self._free)} free of {self.num_blocks}")
        blocks = [self._free.popleft() for _ in range(num)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which are used."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is shared but nobody holds it"
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those that lose their last one become free, maybe after limbo."""
        for block in blocks:
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} is released more often than held"
            self._ref_counts[block] = count
            if count == 0:
                if self._in_flight:
                    self._limbo.append((self._last_step, block))
                else:
                    self._free.append(block)

    def step_started(self) -> int:
        """A step that may name any block now used is about to run; its number."""
        self._last_step += 1
        self._in_flight[self._last_step] = None
        return self._last_step

    def step_finished(self, step: int) -> None:
        """Step `step` has ended on the device; steps may finish in any order."""
        assert step in self._in_flight, f"step {step} is not in flight"
        del self._in_flight[step]
        oldest = next(iter(self._in_flight), self._last_step + 1)
        while self._limbo and self._limbo[0][0] < oldest:
            self._free.append(self._limbo.popleft()[1])

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state and that limbo holds only what a step in flight may name."""
        limbo = [block for _, block in self._limbo]
        idle = [*self._free, *limbo]
        assert len(set(idle)) == len(idle), "a block is free or in limbo twice"
        assert all(count >= 0 for count in self._ref_counts), "a negative reference count"
        unreferenced = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert unreferenced == set(idle), "a block without references is neither free nor in limbo, or the reverse"
        assert self.num_used == sum(count > 0 for count in self._ref_counts)
        oldest = next(iter(self._in_flight), self._last_step + 1)
        assert list(self._in_flight) == sorted(self._in_flight), "steps in flight are out of order"
        steps = [step for step, _ in self._limbo]
        assert steps == sorted(steps), "limbo is out of order"
        assert all(step >= oldest for step in steps), "a block in limbo waits for no step"
