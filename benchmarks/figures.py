"""What several measurements make of their values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """A quantile that is one of the values: between two values, the larger one, so P99 of 100 values is the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Collection[float]) -> dict[str, float]:
    """Minimum, median, 90th percentile and maximum."""
    return {
        "min": min(values),
        "p50": statistics.median(values),
        "p90": quantile(values, 0.9),
        "max": max(values),
        "n": len(values),
    }


def compared(rounds: Iterable[tuple[float, float]]) -> dict[str, float]:
    """The medians of two systems that take turns, and the ratios of the rounds; a round is (ours, theirs)."""
    ours, theirs = zip(*rounds, strict=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds, to the nanosecond.

    Linux has a clock for each process id.
    """
    return time.clock_gettime((~pid << 3) | 2)
