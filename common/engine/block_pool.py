"""Who may use which KV block, and which blocks hold a known prefix. No torch, no I/O, no clock.

The life of a block:

    free ── allocate ──► used ── share ──► used (more) ── release … release ──► limbo ─┬─ no name ──► free
                         ▲  ▲                                                     │    └─ a name ───► cached
                         │  └──────────────────────── share ──────────────────────┴──────────────────┤
                         └─────────────────── allocate: evicted, the name goes ──────────────────────┘

A step that was started before the last release may still read or write the block on the device, so the block waits in
*limbo* until every such step has finished. With no step in flight it is free at once.

The prefix cache: a full block whose contents are final is *named* (see `block_hashes`) while somebody uses it. It keeps
its name when nobody does any more, and whoever matches the name may share it again, from limbo as well: what waits for
the steps in flight is the change of its contents, not the reading of them. An unreferenced cached block counts as free;
it loses its name when `allocate` finds no plain free block, least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from common.contract.block_hashes import BlockHash
from common.contract.errors import BatonError


class OutOfBlocksError(BatonError):
    """More blocks were asked for than are free."""


class _Idle:
    """Blocks in the order of their release, of which any can be taken back at any time.

    A queue in which what was taken back stays until it comes to the front, or until there is more of it than of what
    counts: long sequences end with many blocks, and an `OrderedDict` costs several times as much for each.
    """

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._stale: dict[int, int] = {}
        """Block → its entries that do not count; they come before the one that does, if there is one."""
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
        """These, none of which is here, are released, one after the other."""
        self._queue.extend(blocks)

    def remove(self, block: int) -> None:
        """Take back `block`, which is here."""
        self._stale[block] = self._stale.get(block, 0) + 1
        self._num_stale += 1
        self._tidy()

    def pop(self, num: int) -> list[int]:
        """Take the `num` that were released first; there are so many."""
        blocks: list[int] = []
        queue, stale = self._queue, self._stale
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
        """Assert that what does not count is counted, and does not pile up."""
        assert sum(self._stale.values()) == self._num_stale <= len(self) + 16, "entries of blocks taken back pile up"
        assert len(list(self)) == len(self), "an entry that does not count is missing"


class BlockPool:
    """Reference-counted blocks `[0, num_blocks)` and their names; every operation is O(1) per block.

    Plain free blocks are handed out oldest-freed first, before any cached one.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks >= 1, num_blocks
        self._prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # The names of blocks, both ways.
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._named: dict[BlockHash, int] = {}
        # Named blocks without references that no step in flight may name, least recently released first.
        self._unreferenced = _Idle()
        self._num_evicted = 0
        # Names that have come (True) or gone since somebody asked.
        self._changes: dict[BlockHash, bool] = {}
        # block → last step started before its release, in the order of release, hence of steps.
        self._limbo: OrderedDict[int, int] = OrderedDict()
        # Steps in flight, oldest first: a dict for its order and its O(1) removal from the middle.
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

    @property
    def num_evicted(self) -> int:
        """Cached blocks that lost their name to `allocate` so far."""
        return self._num_evicted

    def named(self) -> list[BlockHash]:
        """Every name."""
        return list(self._named)

    def take_changes(self) -> dict[BlockHash, bool]:
        """Names that have come (True) or gone since the last call; each once, as it is now."""
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
        """Take the names of the `num` blocks that were released longest ago."""
        names, named = self._names, self._named
        blocks = self._unreferenced.pop(num)
        for block in blocks:
            name = names[block]
            assert name is not None, f"block {block} is in the cache without a name"
            del named[name]
            names[block] = None
            self._changes[name] = False
        self._num_evicted += num
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which are used or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert self._names[block] is not None, f"block {block} is shared but nobody holds it"
                if block in self._limbo:
                    del self._limbo[block]
                else:
                    self._unreferenced.remove(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`; those that lose their last one become free, maybe after limbo.

        The last block goes first: of a sequence's cached blocks the last is evicted first, since without the blocks
        before it a block can no longer be matched.
        """
        ref_counts = self._ref_counts
        unused: list[int] = []
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            assert count >= 0, f"block {block} is released more often than held"
            ref_counts[block] = count
            if count == 0:
                unused.append(block)
        if self._in_flight:
            self._limbo.update(dict.fromkeys(unused, self._last_step))
        else:
            self._set_free(unused)

    def _set_free(self, blocks: Sequence[int]) -> None:
        names = self._names
        self._unreferenced.extend([block for block in blocks if names[block] is not None])
        self._free.extend([block for block in blocks if names[block] is None])

    def name(self, blocks: Sequence[int], block_hashes: Sequence[BlockHash]) -> None:
        """Let each of `blocks`, which are used, be found by its hash: it is full and holds valid KV that nobody will
        change. Inert for blocks that have a name, for hashes that name another block, and without a prefix cache."""
        if not self._prefix_cache:
            return
        ref_counts, names, named = self._ref_counts, self._names, self._named
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert ref_counts[block] > 0, f"block {block} is named but nobody holds it"
            if names[block] is None and named.setdefault(block_hash, block) == block:
                names[block] = block_hash
                self._changes[block_hash] = True

    def match(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The cached blocks of the leading ones of `block_hashes`, as far as they are cached.

        Takes nothing, so the answer is good until the next `allocate`: whoever wants the blocks shares them first.
        """
        blocks = []
        for block_hash in block_hashes:
            block = self._named.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks`, distinct and just matched, count in `num_free` now and would not once they are shared.

        Used ones and those in limbo do not: sharing them leaves `num_free` as it is.
        """
        return sum(self._ref_counts[block] == 0 and block not in self._limbo for block in blocks)

    @property
    def num_in_flight(self) -> int:
        """Steps that have started, and not finished."""
        return len(self._in_flight)

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
        unused = [block for block, _ in takewhile(lambda each: each[1] < oldest, self._limbo.items())]
        for block in unused:
            del self._limbo[block]
        self._set_free(unused)

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state, that names are one to one, and that limbo is justified."""
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
        assert self._prefix_cache or not names, "a block has a name without a prefix cache"
        assert all((name in self._named) == is_there for name, is_there in self._changes.items()), "a change is wrong"
        assert names.keys().isdisjoint(self._free), "a plain free block has a name"
        assert names.keys() >= set(self._unreferenced), "an unreferenced cached block has no name"
