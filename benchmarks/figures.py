"""What several measurements make of their values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable

from benchmarks.load.summary import percentile


def spread(values: Collection[float]) -> dict[str, float]:
    """Minimum, median, 90th percentile and maximum."""
    return {
        "min": min(values),
        "p50": statistics.median(values),
        "p90": percentile(values, 90),
        "max": max(values),
        "n": len(values),
    }


def compared(rounds: Iterable[tuple[float, float]]) -> dict[str, float | None]:
    """The medians of two systems that take turns, and the ratios of the rounds; a round is (ours, theirs).

    The ratios are None if theirs is 0 in a round.
    """
    ours, theirs = zip(*rounds, strict=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if all(theirs) else []
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
    }


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds, to the nanosecond.

    Linux has a clock for each process id.
    """
    return time.clock_gettime((~pid << 3) | 2)
