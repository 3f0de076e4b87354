"""The rules by which requests take turns, in both pools: ageing and passing.

A request that has waited for too long is *aged*: its tier then gets one turn, token or place in `AGED_SHARE`, whatever
higher tiers want. A request that does not fit lets later ones *pass*, a bounded number of times. The order by tier,
tenant and deadline is that of `common.scheduling.fair_queue`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Final, Protocol, TypeVar

from common.scheduling.lazy_heap import LazyHeap

T = TypeVar("T", bound=Hashable)

AGED_SHARE: Final = 8
"""An aged lower tier gets one turn, token or place in this many."""
MAX_PASSED: Final = 16
"""Number of later requests that may be admitted before a waiting request that does not fit. After that, none may."""


def aged(waiting: LazyHeap[T], before: float, without: Collection[T] = ()) -> T | None:
    """The item of `waiting`, ordered by the time since when, that has waited longest, if it has waited since before the
    time `before`; else None. Items in `without` do not count."""
    if without:
        oldest = next((item for item in waiting.smallest(len(without) + 1) if item not in without), None)
    else:
        oldest = waiting.first()
    return oldest if oldest is not None and waiting.key(oldest) < before else None


class Waiter(Protocol):
    """Whatever waits for room."""

    num_passed: int
    """Later ones that were admitted while this one did not fit."""


class Passing:
    """One pass over those that wait for room, in order: which of them did not fit, and who may go before them."""

    def __init__(self) -> None:
        self._refused: list[tuple[Waiter, int]] = []

    def refuse(self, waiter: Waiter, rival_rank: int = 0) -> None:
        """`waiter` does not fit: it lacks what tiers of `rival_rank` and below take."""
        self._refused.append((waiter, rival_rank))

    def may_go(self, rank: int) -> bool:
        """Whether a request of the tier of `rank` may still be admitted."""
        return all(each.num_passed < MAX_PASSED or rank < rival_rank for each, rival_rank in self._refused)

    def went(self, rank: int) -> None:
        """A request of the tier of `rank` was admitted."""
        for each, rival_rank in self._refused:
            each.num_passed += rank >= rival_rank
