"""Service classes: the order in which waiting requests are served."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Tier(StrEnum):
    """A request's service class, the most urgent first."""

    INTERACTIVE = "interactive"
    """A person watches the tokens appear."""
    STANDARD = "standard"
    BATCH = "batch"
    """Throughput matters; nobody waits for a single answer."""

    @property
    def rank(self) -> int:
        """0 for the most urgent."""
        return _RANKS[self]


def by_tier(counts: Iterable[tuple[Tier, int]]) -> tuple[int, int, int]:
    """The sum of the counts of each tier, the most urgent tier first."""
    sums = dict.fromkeys(Tier, 0)
    for tier, count in counts:
        sums[tier] += count
    return sums[Tier.INTERACTIVE], sums[Tier.STANDARD], sums[Tier.BATCH]


_RANKS = {tier: rank for rank, tier in enumerate(Tier)}
