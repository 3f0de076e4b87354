"""Service classes: the order in which waiting requests are served, and what each aims at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Latency targets that a request must meet to count as goodput."""

    ttft_s: float = math.inf
    """Arrival to first token."""
    itl_s: float = math.inf
    """Mean gap between the tokens of each choice."""


NO_TARGETS: Mapping[Tier, Target] = dict.fromkeys(Tier, Target())
"""Whatever comes is in time."""
