"""Which items are to be looked at before which step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Calendar(Generic[T]):
    """Items, each under one step. What is entered for a later step costs nothing until then."""

    def __init__(self) -> None:
        self._items: defaultdict[int, dict[T, None]] = defaultdict(dict)
        self._steps: dict[T, int] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._steps)

    def __getitem__(self, item: T) -> int:
        """The step of `item`, which must be here."""
        return self._steps[item]

    def num_at(self, step: int) -> int:
        """Number of items of a step."""
        return len(self._items.get(step, ()))

    def put(self, step: int, items: Collection[T]) -> None:
        """Enter `items`, none of which may be here."""
        self._items[step].update(dict.fromkeys(items))
        self._steps.update(dict.fromkeys(items, step))

    def take(self, step: int) -> list[T]:
        """Remove the items of `step`, and return them in the order in which they were entered."""
        items = list(self._items.pop(step, ()))
        for item in items:
            del self._steps[item]
        return items

    def discard(self, item: T) -> None:
        """Remove `item`. Does nothing if it is not here."""
        step = self._steps.pop(item, None)
        if step is not None:
            del self._items[step][item]
            if not self._items[step]:
                del self._items[step]

    def check_invariants(self) -> None:
        """Assert that each item is under its step, and under no other."""
        assert self._steps == {item: step for step, items in self._items.items() for item in items}
