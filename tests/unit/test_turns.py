"""The rules by which requests take turns: ageing and passing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import MAX_PASSED, Passing, aged


@dataclass(eq=False)
class Waiting:
    """Whoever does not fit."""

    num_passed: int = 0


@pytest.mark.parametrize(("before", "without", "oldest"), [(1.0, (), None), (1.5, (), "a"), (2.5, ("a",), "b")])
def test_aged_is_whoever_has_waited_longest_if_that_is_too_long(
    before: float, without: tuple[str, ...], oldest: str | None
) -> None:
    waiting: LazyHeap[str] = LazyHeap()
    waiting.add("b", 2.0)
    waiting.add("a", 1.0)
    assert aged(waiting, before, without) == oldest


def test_who_does_not_fit_is_passed_a_bounded_number_of_times_in_all_passes_together() -> None:
    big, num_went = Waiting(), 0
    for _ in range(MAX_PASSED):
        passing = Passing()
        passing.refuse(big)
        for _ in range(3):
            if passing.may_go(0):
                passing.went(0)
                num_went += 1
    assert (num_went, big.num_passed) == (MAX_PASSED, MAX_PASSED)


def test_only_those_who_take_what_it_lacks_pass_it() -> None:
    big, passing = Waiting(), Passing()
    passing.refuse(big, rival_rank=1)
    passing.went(0)
    assert big.num_passed == 0
    big.num_passed = MAX_PASSED
    assert [passing.may_go(rank) for rank in range(3)] == [True, False, False]


def test_whoever_was_admitted_before_it_was_refused_has_not_passed_it() -> None:
    big, passing = Waiting(), Passing()
    passing.went(2)
    passing.refuse(big)
    assert big.num_passed == 0
