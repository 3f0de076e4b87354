"""When requests arrive. Times are seconds from the first arrival, which is at 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal


def arrival_times(
    process: Literal["poisson", "gamma", "constant"], rate: float, count: int, cv: float, random: Random
) -> list[float]:
    """The times of `count` arrivals, `rate` per second on average; all at 0 if `rate` is infinite.

    Gamma-distributed gaps have the coefficient of variation `cv`: 1 is Poisson, above 1 arrivals come in bursts.
    """
    if math.isinf(rate):
        return [0.0] * count
    gap: Callable[[], float]
    match process:
        case "poisson":
            gap = lambda: random.expovariate(rate)  # noqa: E731
        case "gamma":
            gap = lambda: random.gammavariate(1 / cv**2, cv**2 / rate)  # noqa: E731
        case "constant":
            return [index / rate for index in range(count)]
    return list(itertools.accumulate((gap() for _ in range(count - 1)), initial=0.0))


def jittered(times_s: Sequence[float], random: Random) -> list[float]:
    """Spread each group of equal times evenly over the time until the next group; sorted.

    A trace whose clock ticks every few seconds would otherwise arrive in bursts that did not exist. The last group is
    spread over as much time as the group before it.
    """
    ticks = sorted(set(times_s))
    if len(ticks) == 1:
        return [0.0] * len(times_s)
    widths = [later - earlier for earlier, later in itertools.pairwise(ticks)]
    width = dict(zip(ticks, [*widths, widths[-1]], strict=True))
    spread = sorted(time_s + random.random() * width[time_s] for time_s in times_s)
    return [time_s - spread[0] for time_s in spread]


def scaled(times_s: Sequence[float], rate: float | None) -> list[float]:
    """The times stretched or compressed so that `rate` requests arrive per second on average, in the same pattern."""
    if rate is None or len(times_s) < 2 or times_s[-1] == 0:
        return list(times_s)
    factor = (len(times_s) - 1) / rate / times_s[-1]
    return [time_s * factor for time_s in times_s]
