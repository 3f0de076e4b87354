"""A priority queue from which anything can be taken at any time: order, and what it costs."""

from __future__ import annotations

import pytest

from common.scheduling.lazy_heap import LazyHeap


def heap(**keys: object) -> LazyHeap[str]:
    made: LazyHeap[str] = LazyHeap()
    for item, key in keys.items():
        made.add(item, key)
    return made


def test_an_empty_one_has_no_first() -> None:
    empty = heap()
    assert empty.first() is None
    assert empty.smallest(3) == []
    assert len(empty) == 0


def test_the_smallest_key_comes_first() -> None:
    made = heap(b=2, c=3, a=1)
    assert made.first() == "a"
    assert made.smallest(2) == ["a", "b"]
    assert made.smallest(9) == ["a", "b", "c"]
    assert made.first() == "a", "looking takes nothing"


def test_equal_keys_come_in_the_order_of_arrival() -> None:
    assert heap(z=1, y=1, x=1).smallest(3) == ["z", "y", "x"]


def test_keys_are_compared_and_items_never() -> None:
    made: LazyHeap[object] = LazyHeap()
    items = [object() for _ in range(9)]
    for item in items:
        made.add(item, (1, "same"))
    assert made.smallest(9) == items


def test_what_is_discarded_is_gone_wherever_it_was() -> None:
    made = heap(a=1, b=2, c=3)
    for item in ("b", "b", "never here"):
        made.discard(item)
    assert made.smallest(3) == ["a", "c"]
    made.discard("a")
    assert made.first() == "c"
    assert list(made) == ["c"]


def test_what_was_discarded_can_come_back_with_another_key() -> None:
    made = heap(a=1, b=2)
    made.discard("a")
    made.add("a", 3)
    assert made.smallest(2) == ["b", "a"]
    made.discard("a")
    made.add("a", 0)
    assert made.smallest(2) == ["a", "b"], "the older entries count no more"


def test_nothing_is_here_twice() -> None:
    with pytest.raises(AssertionError):
        heap(a=1).add("a", 2)


def test_what_was_discarded_does_not_pile_up() -> None:
    """Someone small stays at the top, so that nothing behind it is ever popped."""
    made: LazyHeap[int] = LazyHeap()
    made.add(-1, -1)
    for number in range(10_000):
        made.add(number, number)
        made.discard(number)
        made.check_invariants()
    assert len(made) == 1


class Key:
    """A key that counts its comparisons."""

    num_compared = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Key) -> bool:
        Key.num_compared += 1
        return self.value < other.value


@pytest.mark.parametrize("front_first", [True, False])
def test_an_operation_costs_about_the_logarithm(front_first: bool) -> None:
    num = 4096
    made: LazyHeap[int] = LazyHeap()
    Key.num_compared = 0
    for number in range(num):
        made.add(number, Key(number * 7919 % num))
    order = made.smallest(num)
    for number in order if front_first else reversed(order):
        made.first()
        made.discard(number)
    # Equal keys are compared both ways, entries are pushed, popped, pushed again and popped at last.
    assert Key.num_compared <= 12 * num * 12
