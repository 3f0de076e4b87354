"""A priority queue from which any item can be removed at any time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items by key, the smallest first; items with equal keys in the order in which they were added.

    Every operation takes O(log n) time, amortised, per item that it takes or names. The entry of a discarded item stays
    in the heap until it reaches the top, or until there are more than twice as many entries as items (plus 16).
    """

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._entries: dict[T, tuple[Any, int, T]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def add(self, item: T, key: Any) -> None:
        """Add `item`, which must not be in the heap."""
        assert item not in self._entries, item
        entry = self._entries[item] = key, next(self._numbers), item
        heapq.heappush(self._heap, entry)

    def key(self, item: T) -> Any:
        """The key with which `item`, which must be in the heap, was added."""
        return self._entries[item][0]

    def discard(self, item: T) -> None:
        """Remove `item`; nothing happens if it is not here."""
        if self._entries.pop(item, None) is None:
            return
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self) -> T | None:
        """The item with the smallest key; None when there is none."""
        return self._heap[0][2] if self._clear_top() else None

    def smallest(self, num: int) -> list[T]:
        """The `num` items with the smallest keys, or all if there are fewer, in order."""
        if num == 1:  # the most frequent question: no entry has to be taken out to answer it
            return [self._heap[0][2]] if self._clear_top() else []
        taken: list[tuple[Any, int, T]] = []
        while len(taken) < num and self._clear_top():
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [entry[2] for entry in taken]

    def _clear_top(self) -> bool:
        """Drop entries of discarded items from the top of the heap. Returns whether an item is left."""
        while self._heap:
            if self._entries.get(self._heap[0][2]) is self._heap[0]:
                return True
            heapq.heappop(self._heap)
        return False

    def check_invariants(self) -> None:
        """Assert that every item has its entry, and that entries of discarded items do not pile up."""
        assert set(map(id, self._heap)) >= set(map(id, self._entries.values())), "an item has no entry"
        assert len(self._heap) <= 2 * len(self._entries) + 16, "discarded entries pile up"
