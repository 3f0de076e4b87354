"""Service classes: whose turn comes first where work waits."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Tier(StrEnum):
    """A request's service class, the most urgent first."""

    INTERACTIVE = "interactive"
    """Somebody is watching the tokens appear."""
    STANDARD = "standard"
    BATCH = "batch"
    """Throughput matters, no single answer is waited for."""

    @property
    def rank(self) -> int:
        """0 for the most urgent."""
        return _RANKS[self]


def by_tier(counts: Iterable[tuple[Tier, int]]) -> tuple[int, int, int]:
    """Sums for each tier, the most urgent first."""
    sums = dict.fromkeys(Tier, 0)
    for tier, count in counts:
        sums[tier] += count
    return sums[Tier.INTERACTIVE], sums[Tier.STANDARD], sums[Tier.BATCH]


_RANKS = {tier: rank for rank, tier in enumerate(Tier)}
