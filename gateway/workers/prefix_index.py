"""Which worker holds which blocks, as reported by the workers. Pure state.

A worker reports the content of its cache when a session opens, and its changes from then on (`CacheEvents`). So every
gateway knows it, whichever gateway's requests filled the cache. The index lags by a message's transit, and block names
are truncated hashes, so it is a hint. A wrong hint costs time, never a token.

A name is stored once, however many workers hold the block, with its holders as bits of an integer. Blocks that are
reported together mostly have the same holders, and then share the integer. A name takes about 120 bytes, and at a bound
those that were neither reported nor asked for the longest are forgotten: then a worker holds more than the index says.

Life cycle of a worker's bit:

    free ──► live ──► dead: the worker is gone, or lists its cache anew; names may still have the bit
      ▲                 │
      └─────────────────┘ all names have been looked through, a part of them with each report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash
from common.contract.messages.worker import CacheEvents
from gateway.workers.worker_life import WorkerLife

NUM_PARTS: Final = 256
"""Names are divided by their first byte, so that no event takes the time of looking through all of them."""
_FORGOTTEN_SHARE: Final = 1 / 8
"""Share of a part that is forgotten when the part is full."""


class PrefixIndex:
    """The blocks of each connected worker."""

    def __init__(self, max_names: int = 2_000_000) -> None:
        """At most `max_names` names are stored, and at least one in each part."""
        self._max_in_part = max(1, max_names // NUM_PARTS)
        self._parts: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]
        """Name → bits of its holders, dead ones included; in the order in which they were last reported or asked
        for."""
        self._bits: dict[WorkerLife, int] = {}
        """The bit of each worker."""
        self._lives: dict[int, WorkerLife] = {}
        """Bit → its worker."""
        self._live = 0
        """All bits of workers."""
        self._num_held: Counter[int] = Counter()
        """Bit of a worker → names with it."""
        self._free: list[int] = []
        self._dead = self._cleaned = 0
        """Dead bits, and those of them that are being removed from all names."""
        self._next_part = 0
        """Next part from which `_cleaned` is removed."""
        self.num_forgotten = 0
        """Names forgotten because the index was full."""

    def apply(self, life: WorkerLife, events: CacheEvents) -> None:
        """Apply a worker's report of its cache."""
        if events.begins:
            self.forget(life)
        bit = self._bits.get(life) or self._admit(life)
        self._remove(bit, events.removed)
        self._store(bit, events.stored)
        self._clean_a_part()

    def forget(self, life: WorkerLife) -> None:
        """Forget a worker's blocks, because its process or its session has ended."""
        bit = self._bits.pop(life, 0)
        if bit:
            del self._lives[bit]
            self._num_held.pop(bit, None)
            self._live ^= bit
            self._dead |= bit

    @property
    def num_blocks(self) -> int:
        """Blocks of all workers; a block that several workers hold counts once for each."""
        return self._num_held.total()

    @property
    def num_names(self) -> int:
        """Names stored."""
        return sum(map(len, self._parts))

    def longest(self, block_hashes: Sequence[BlockHash]) -> dict[WorkerLife, int]:
        """Number of leading blocks of a sequence that each worker holds; a block counts only if the worker holds all
        before it. Workers that hold none are left out."""
        longest: dict[WorkerLife, int] = {}
        holders, num_held = self._live, 0
        for block_hash in block_hashes:
            name = block_hash[:SHORT_NAME_BYTES]
            part = self._parts[name[0]]
            still = holders & part.get(name, 0)
            if num_held:
                longest |= self._each_has(holders ^ still, num_held)
            holders = still
            if not holders:
                break
            num_held += 1
            part[name] = part.pop(name)
        if num_held:
            longest |= self._each_has(holders, num_held)
        return longest

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._bits == {life: bit for bit, life in self._lives.items()}
        assert self._live == sum(self._lives)
        assert sum(self._free) + self._live + self._dead == (1 << self._num_bits) - 1, "a bit is lost, or used twice"
        assert self._cleaned & ~self._dead == 0
        num_held: Counter[int] = Counter()
        for number, part in enumerate(self._parts):
            assert len(part) <= self._max_in_part
            for name, holders in part.items():
                assert name[0] == number
                assert holders & ~(self._live | self._dead) == 0
                assert holders, "nobody has it"
                num_held.update(_each(holders & self._live))
        assert num_held == +self._num_held

    def _each_has(self, holders: int, num_held: int) -> dict[WorkerLife, int]:
        return {self._lives[bit]: num_held for bit in _each(holders)}

    @property
    def _num_bits(self) -> int:
        return len(self._free) + len(self._lives) + self._dead.bit_count()

    def _admit(self, life: WorkerLife) -> int:
        bit = self._free.pop() if self._free else 1 << self._num_bits
        self._bits[life], self._lives[bit] = bit, life
        self._live |= bit
        return bit

    def _store(self, bit: int, names: bytes) -> None:
        with_bit = {0: bit}
        """Holders → the same with this one: one integer for all names that have the same holders."""
        for name in _split(names):
            part = self._parts[name[0]]
            before = part.pop(name, 0)
            if not before and len(part) >= self._max_in_part:
                self._forget_oldest(part)
            after = with_bit.get(before)
            if after is None:
                after = with_bit[before] = before | bit
            part[name] = after
            self._num_held[bit] += not (before & bit)

    def _remove(self, bit: int, names: bytes) -> None:
        for name in _split(names):
            part = self._parts[name[0]]
            before = part.get(name, 0)
            if before & bit:
                self._num_held[bit] -= 1
                if before == bit:
                    del part[name]
                else:
                    part[name] = before ^ bit

    def _forget_oldest(self, part: dict[bytes, int]) -> None:
        oldest = list(islice(part, max(1, int(_FORGOTTEN_SHARE * len(part)))))
        self.num_forgotten += len(oldest)
        for holders, num in Counter([part.pop(name) for name in oldest]).items():
            for bit in _each(holders & self._live):
                self._num_held[bit] -= num

    def _clean_a_part(self) -> None:
        """Remove dead bits from the names of one part. After the last part, the bits that were removed from all of them
        are free."""
        if not self._cleaned:
            self._cleaned, self._next_part = self._dead, 0
        if not self._cleaned:
            return
        part, kept = self._parts[self._next_part], dict[int, int]()
        for name, holders in list(part.items()):
            if holders & self._cleaned:
                if holders not in kept:
                    kept[holders] = holders & ~self._cleaned
                if kept[holders]:
                    part[name] = kept[holders]
                else:
                    del part[name]
        self._next_part += 1
        if self._next_part == NUM_PARTS:
            self._free += _each(self._cleaned)
            self._dead ^= self._cleaned
            self._cleaned = 0


def _each(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit


def _split(names: bytes) -> list[bytes]:
    return [names[start : start + SHORT_NAME_BYTES] for start in range(0, len(names), SHORT_NAME_BYTES)]
