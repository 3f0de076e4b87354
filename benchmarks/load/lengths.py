"""The lengths of prompts and answers: the named workloads, fitted to published statistics.

If mean and standard deviation are published (Azure 2023), a log-normal distribution has the same two. If quantiles and
the mean are published (ShareGPT-GPT4, Mooncake), the quantile function is linear between knots, which include the
published quantiles. Mooncake's other knots are quantiles of its trace; the mean is then within 2 % of the published
one. ShareGPT's extremes and quartiles are not published; they are chosen so that the mean is the published one. Prompt
and answer are drawn independently of each other.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, random: Random) -> int:
        """Draw a number of tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant length."""

    tokens: int

    def draw(self, random: Random) -> int:
        """The length."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution, given by mean and standard deviation in tokens, before rounding."""

    mean: float
    sd: float

    def draw(self, random: Random) -> int:
        """A sample, rounded, and at least 1."""
        variance = math.log1p((self.sd / self.mean) ** 2)
        return max(1, round(random.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))))


@dataclass(frozen=True, slots=True)
class Knots:
    """A quantile function, linear between `points` of (share of requests, tokens), from share 0 to 1."""

    points: tuple[tuple[float, int], ...]

    @property
    def mean(self) -> float:
        """The mean in tokens, before rounding."""
        return math.fsum((v - u) * (a + b) / 2 for (u, a), (v, b) in itertools.pairwise(self.points))

    def draw(self, random: Random) -> int:
        """The quantile of a uniform number."""
        share = random.random()
        index = bisect.bisect_right(self.points, share, key=lambda point: point[0]) - 1
        (u, a), (v, b) = self.points[index : index + 2]
        return max(1, round(a + (b - a) * (share - u) / (v - u)))


@dataclass(frozen=True, slots=True)
class Clipped:
    """Another distribution, cut at `most` tokens."""

    lengths: Lengths
    most: int

    def draw(self, random: Random) -> int:
        """A sample of the other distribution, at most `most`."""
        return min(self.lengths.draw(random), self.most)


_SHAREGPT = (
    Knots(((0, 4), (0.5, 74), (0.75, 186), (0.95, 1484), (1, 2000))),
    Knots(((0, 4), (0.25, 188), (0.5, 487), (0.95, 988), (1, 1400))),
)
_MOONCAKE = (
    Knots(
        (
            *((0, 891), (0.1, 964), (0.15, 1261), (0.25, 2306), (0.4, 4993), (0.5, 6909), (0.6, 9570), (0.75, 15367)),
            *((0.85, 21464), (0.9, 27367), (0.95, 39550), (0.97, 52215), (0.98, 66449), (0.99, 85400), (1, 126195)),
        )
    ),
    Knots(
        (
            *((0, 1), (0.05, 10), (0.1, 24), (0.25, 156), (0.5, 350), (0.75, 472)),
            *((0.9, 597), (0.97, 800), (0.99, 1118), (1, 2000)),
        )
    ),
)

WORKLOADS: Mapping[str, tuple[Lengths, Lengths]] = {
    "azure-code": (LogNormal(2048, 1973), LogNormal(28, 60)),
    "azure-conv": (LogNormal(1155, 1109), LogNormal(211, 163)),
    "sharegpt": _SHAREGPT,
    "mooncake-conv": _MOONCAKE,
}
"""Prompts and answers of each named workload."""


def clipped(lengths: Lengths, most: int | None) -> Lengths:
    """`lengths` cut at `most` tokens, if `most` is not None."""
    return lengths if most is None else Clipped(lengths, most)
