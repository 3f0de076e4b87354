"""Ownership of KV blocks by reference counts, and the prefix cache. No torch, no I/O, no clock.

The life of a block:

    free ── allocate ──► used ── share ──► used (more) ── release … release ──► limbo ─┬─ no name ──► free
                         ▲  ▲                                                     │    └─ a name ───► cached
                         │  └──────────────────────── share ──────────────────────┴──────────────────┤
                         └─────────────────── allocate: evicted, the name goes ──────────────────────┘

A step that was started before the last release may still read or write the block on the device, so the block waits in
*limbo* until every such step has finished. If no step is in flight, the block skips limbo.

The prefix cache: a full block whose contents are final can be *named* by its hash (see `block_hashes`) while it has a
reference. It keeps the name when its last reference is released, and a caller that matches the name may share the block
again. It may do so from limbo as well: while steps are in flight, the block's contents must not change, but they may be
read. A cached block without references counts as free. It loses its name when `allocate` finds no plain free block; the
block that was released longest ago is evicted first. A block whose KV has proved invalid is *spoiled* until its last
reference is released: it loses its name, and gets none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from common.contract.block_hashes import BlockHash
from common.contract.errors import BatonError


class OutOfBlocksError(BatonError):
    """More blocks were asked for than are free."""


class _Idle:
    """Unreferenced cached blocks in the order of their release. Any of them can be removed at any time.

    `remove` leaves a stale entry in the queue. A stale entry is dropped when it reaches the front. All are dropped at
    once when there are over 16 more of them than valid entries. (A long sequence releases many blocks at its end, and
    an `OrderedDict` costs several times as much per block.)
    """

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._stale: dict[int, int] = {}
        """Block → number of its stale entries. They precede its valid entry, if it has one."""
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._queue) - self._num_stale

    def __iter__(self) -> Iterator[int]:
        stale = dict(self._stale)
        for block in self._queue:
            if stale.get(block, 0):
                stale[block] -= 1
            else:
                yield block

    def extend(self, blocks: Sequence[int]) -> None:
        """Append `blocks`, in the order of their release. None of them may be in the queue already."""
        self._queue.extend(blocks)

    def remove(self, block: int) -> None:
        """Remove `block`, which must be in the queue."""
        self._stale[block] = self._stale.get(block, 0) + 1
        self._num_stale += 1
        self._tidy()

    def pop(self, num: int) -> list[int]:
        """Take the `num` blocks that were released first. The queue must hold at least `num` blocks."""
        blocks: list[int] = []
        queue, stale = self._queue, self._stale
        if not stale:
            return [queue.popleft() for _ in range(num)]
        while len(blocks) < num:
            block = queue.popleft()
            if block not in stale:
                blocks.append(block)
                continue
            stale[block] -= 1
            self._num_stale -= 1
            if not stale[block]:
                del stale[block]
        self._tidy()
        return blocks

    def _tidy(self) -> None:
        if self._num_stale > len(self) + 16:
            self._queue = deque(self)
            self._stale.clear()
            self._num_stale = 0

    def check_invariants(self) -> None:
        """Assert that stale entries are counted correctly, and that their number is bounded."""
        assert sum(self._stale.values()) == self._num_stale <= len(self) + 16, "entries of blocks taken back pile up"
        assert len(list(self)) == len(self), "an entry that does not count is missing"


class BlockPool:
    """Reference-counted blocks `[0, num_blocks)` and their names; every operation is O(1) per block.

    Plain free blocks are handed out oldest-freed first, before any cached one.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks >= 1, num_blocks
        self.prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # Block → name, and name → block.
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._named: dict[BlockHash, int] = {}
        # Named blocks without references and outside limbo, in the order of their release.
        self._unreferenced = _Idle()
        self._spoiled: set[int] = set()
        self.num_evicted = 0
        """Cached blocks that lost their name to `allocate` so far."""
        self.num_names_lost = 0
        """Names that blocks have lost so far. What `match` has found stays valid while it is the same."""
        # Names added (True) or removed (False) since the last `take_changes`.
        self._changes: dict[BlockHash, bool] = {}
        # Block → last step that started before its release. Entries are in the order of release, so the steps ascend.
        self._limbo: dict[int, int] = {}
        # Steps in flight, oldest first. A dict keeps the order, and removes from the middle in O(1).
        self._in_flight: dict[int, None] = {}
        self._last_step = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: plain free ones, and cached ones that can be evicted."""
        return len(self._free) + len(self._unreferenced)

    @property
    def num_limbo(self) -> int:
        """Released blocks, cached or not, that wait for a step in flight."""
        return len(self._limbo)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free - self.num_limbo

    @property
    def num_cached(self) -> int:
        """Blocks that have a name: used, in limbo or unreferenced."""
        return len(self._named)

    def named(self) -> list[BlockHash]:
        """The names of all cached blocks."""
        return list(self._named)

    def take_changes(self) -> dict[BlockHash, bool]:
        """Names added (True) or removed (False) since the last call. A name that changed several times occurs once,
        with its present state."""
        changes, self._changes = self._changes, {}
        return changes

    def ref_count(self, block: int) -> int:
        """References to `block`; 0 when it is free, cached and unreferenced, or in limbo."""
        return self._ref_counts[block]

    def allocate(self, num: int) -> list[int]:
        """Take `num` blocks, each with one reference and no name: plain free ones first, then evicted ones.

        Raises `OutOfBlocksError`, and takes none, if fewer are free; callers compare with `num_free` first.
        """
        if num > self.num_free:
            raise OutOfBlocksError(f"{num} blocks wanted, {self.num_free} free of {self.num_blocks}")
        free = self._free
        blocks = [free.popleft() for _ in range(min(num, len(free)))]
        blocks += self._evict(num - len(blocks))
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def _evict(self, num: int) -> list[int]:
        """Take the `num` unreferenced cached blocks that were released longest ago, and remove their names."""
        names, named = self._names, self._named
        blocks = self._unreferenced.pop(num)
        for block in blocks:
            name = names[block]
            assert name is not None, f"block {block} is in the cache without a name"
            del named[name]
            names[block] = None
            self._changes[name] = False
        self.num_evicted += num
        self.num_names_lost += num
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`. Each must be used or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert self._names[block] is not None, f"block {block} is shared but nobody holds it"
                if block in self._limbo:
                    del self._limbo[block]
                else:
                    self._unreferenced.remove(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`. A block that loses its last one becomes free: at once, or after limbo
        if a step is in flight.

        Blocks are released from the last to the first, so that the last cached block of a sequence is evicted first: a
        block can no longer be matched once a block before it is gone.
        """
        ref_counts = self._ref_counts
        unused: list[int] = []
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            assert count >= 0, f"block {block} is released more often than held"
            ref_counts[block] = count
            if count == 0:
                unused.append(block)
        if self._spoiled:
            self._spoiled.difference_update(unused)
        if self._in_flight:
            self._limbo.update(dict.fromkeys(unused, self._last_step))
        else:
            self._set_free(unused)

    def _set_free(self, blocks: Sequence[int]) -> None:
        names = self._names
        self._unreferenced.extend([block for block in blocks if names[block] is not None])
        self._free.extend([block for block in blocks if names[block] is None])

    def name(self, blocks: Sequence[int], block_hashes: Sequence[BlockHash]) -> None:
        """Give each of `blocks` its hash as a name, by which `match` finds it. Each must have a reference, be full, and
        hold valid KV that nobody will change.

        Inert for a block that has a name or is spoiled, for a hash that names another block, and without a prefix
        cache.
        """
        if not self.prefix_cache:
            return
        assert all(map(self._ref_counts.__getitem__, blocks)), f"one of blocks {blocks} is named but nobody holds it"
        names, set_default, spoiled = self._names, self._named.setdefault, self._spoiled
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if names[block] is None and block not in spoiled and set_default(block_hash, block) == block:
                names[block] = block_hash
                self._changes[block_hash] = True

    def forget(self, blocks: Iterable[int]) -> None:
        """Take away the names of `blocks`, whose KV has proved invalid, for good: nobody else finds it, whoever holds
        them. Each must have a reference."""
        for block in blocks:
            assert self._ref_counts[block], f"block {block} is to be forgotten but nobody holds it"
            self._spoiled.add(block)
            name = self._names[block]
            if name is not None:
                del self._named[name]
                self._names[block] = None
                self._changes[name] = False
                self.num_names_lost += 1

    def match(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The cached blocks of the leading ones of `block_hashes`, up to the first hash that is not cached.

        Takes no references, so the answer is good until the next `allocate`: share the blocks before that.
        """
        blocks = []
        for block_hash in block_hashes:
            block = self._named.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count in `num_free` now, and will not once they are shared. They must be distinct and
        just matched.

        Used blocks and blocks in limbo do not count: sharing them leaves `num_free` unchanged.
        """
        return sum(self._ref_counts[block] == 0 and block not in self._limbo for block in blocks)

    def num_private(self, blocks: Iterable[int]) -> int:
        """How many of `blocks`, which one sequence holds, no other one holds."""
        return sum(self._ref_counts[block] == 1 for block in blocks)

    @property
    def num_in_flight(self) -> int:
        """Steps that have started and not finished."""
        return len(self._in_flight)

    def step_started(self) -> int:
        """Record that a step starts, which may read or write any block now used. Returns the step's number."""
        self._last_step += 1
        self._in_flight[self._last_step] = None
        return self._last_step

    def step_finished(self, step: int) -> None:
        """Record that `step` has ended on the device. Steps may finish in any order."""
        assert step in self._in_flight, f"step {step} is not in flight"
        del self._in_flight[step]
        oldest = next(iter(self._in_flight), self._last_step + 1)
        waiting = {block: step for block, step in self._limbo.items() if step >= oldest}
        unused = list(self._limbo)[: len(self._limbo) - len(waiting)]
        self._limbo = waiting
        self._set_free(unused)

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state, that names are unique, and that each block in limbo waits
        for a step in flight."""
        idle = [*self._free, *self._unreferenced, *self._limbo]
        assert len(set(idle)) == len(idle), "a block is free, cached and unreferenced, or in limbo twice"
        assert all(count >= 0 for count in self._ref_counts), "a negative reference count"
        unreferenced = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert unreferenced == set(idle), "a block without references is in no list, or one with references is in one"
        assert self.num_used == sum(count > 0 for count in self._ref_counts)
        self._unreferenced.check_invariants()
        self._check_names()
        oldest = next(iter(self._in_flight), self._last_step + 1)
        assert list(self._in_flight) == sorted(self._in_flight), "steps in flight are out of order"
        steps = list(self._limbo.values())
        assert steps == sorted(steps), "limbo is out of order"
        assert all(step >= oldest for step in steps), "a block in limbo waits for no step"

    def _check_names(self) -> None:
        names = {block: name for block, name in enumerate(self._names) if name is not None}
        assert self._named == {name: block for block, name in names.items()}, "the two maps of names differ"
        assert len(self._named) == len(names), "two blocks have one name"
        assert self.prefix_cache or not names, "a block has a name without a prefix cache"
        assert all((name in self._named) == is_there for name, is_there in self._changes.items()), "a change is wrong"
        assert names.keys().isdisjoint(self._free), "a plain free block has a name"
        assert names.keys().isdisjoint(self._spoiled), "a spoiled block has a name"
        assert all(self._ref_counts[block] for block in self._spoiled), "nobody holds a spoiled block"
        assert names.keys() >= set(self._unreferenced), "an unreferenced cached block has no name"
