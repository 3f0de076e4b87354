"""A priority queue from which anything can be taken at any time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items by key, the smallest first, those of equal keys in the order of their arrival.

    Every operation is O(log n), amortised, for each item that it takes or names: what is discarded stays in the heap
    until it comes to the top, or until there is more of it than of what counts.
    """

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._entries: dict[T, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def add(self, item: T, key: Any) -> None:
        """Put `item`, which is not here, in its place."""
        assert item not in self._entries, item
        number = next(self._numbers)
        self._entries[item] = number
        heapq.heappush(self._heap, (key, number, item))

    def discard(self, item: T) -> bool:
        """Take `item` out; whether it was here."""
        if self._entries.pop(item, None) is None:
            return False
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        return True

    def first(self) -> T | None:
        """The item with the smallest key; None when there is none."""
        return self._heap[0][2] if self._clear_top() else None

    def smallest(self, num: int) -> list[T]:
        """The `num` items with the smallest keys, or as many as there are, in order."""
        taken: list[tuple[Any, int, T]] = []
        while len(taken) < num and self._clear_top():
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [entry[2] for entry in taken]

    def _clear_top(self) -> bool:
        """Drop what was discarded from the top of the heap; whether anything is left."""
        while self._heap:
            _, number, item = self._heap[0]
            if self._entries.get(item) == number:
                return True
            heapq.heappop(self._heap)
        return False

    def check_invariants(self) -> None:
        """Assert that every item has its entry, and that what was discarded does not pile up."""
        entries = {(item, number) for _, number, item in self._heap}
        assert entries >= set(self._entries.items()), "an item has no entry"
        assert len(self._heap) <= 2 * len(self._entries) + 16, "discarded entries pile up"
