"""Metrics that are updated with every token: plain numbers, which become Prometheus metrics only when scraped.

The classes of `prometheus_client` take a lock for each bucket and sum, and check their labels, which costs several
times as much. Here every update happens on the event loop, so no lock is needed. Engine steps are counted in the same
way.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class TokenHistogram(Collector):
    """A histogram with one label."""

    def __init__(self, name: str, text: str, label: tuple[str, str], bounds: Sequence[float]) -> None:
        """`bounds` are the buckets' upper bounds, in ascending order, without infinity."""
        self._name, self._text, self._label = name, text, label
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The metric of this moment."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label[0]])
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(
            [self._label[1]], list(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum
        )
        yield family


def step_tokens(model: str) -> TokenHistogram:
    """A histogram of the tokens (prompt and decode) in each engine step, with vLLM's name and buckets."""
    bounds = (1, 8, *(2**power for power in range(4, 15)))
    return TokenHistogram("vllm:iteration_tokens_total", "Tokens of a step.", ("model_name", model), bounds)


class TokenCounter(Collector):
    """A counter with one label."""

    def __init__(self, name: str, text: str, label: tuple[str, str]) -> None:
        self._name, self._text, self._label = name, text, label
        self._value = 0

    def inc(self, number: int) -> None:
        """Add `number` to the counter."""
        self._value += number

    def collect(self) -> Iterable[Metric]:
        """The metric of this moment."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label[0]])
        family.add_metric([self._label[1]], self._value)
        yield family
