"""Counters and histograms: plain numbers, which become Prometheus metrics only when scraped.

The classes of `prometheus_client` take a lock for each bucket and sum, and check their labels, which costs several
times as much. Here every update happens on the event loop, so no lock is needed. Engine steps are counted in the same
way.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Count:
    """The value of a counter for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, number: int = 1) -> None:
        """Add `number`."""
        self.value += number


class Distribution:
    """The values of a histogram for one set of labels."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class PlainCounter(Collector):
    """A counter."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        always: Mapping[str, str] = MappingProxyType({}),
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`always` are labels with their values, which do not vary."""
        self._name, self._text, self._always = name, text, tuple(always.values())
        self._names = (*always, *labels)
        self._counts: dict[tuple[str, ...], Count] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count for these values of the labels."""
        count = self._counts.get(values)
        if count is None:
            count = self._counts[values] = Count()
        return count

    def collect(self) -> Iterable[Metric]:
        """The metric of this moment."""
        family = CounterMetricFamily(self._name, self._text, labels=self._names)
        for values, count in self._counts.items():
            family.add_metric((*self._always, *values), count.value)
        yield family


class PlainHistogram(Collector):
    """A histogram."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        always: Mapping[str, str] = MappingProxyType({}),
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`bounds` are the buckets' upper bounds, in ascending order, without infinity. `always` are labels with their
        values, which do not vary."""
        self._name, self._text, self._always = name, text, tuple(always.values())
        self._names = (*always, *labels)
        self._bounds = tuple(bounds)
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        if not labels:
            self.observe = self.labels().observe
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """The distribution for these values of the labels."""
        found = self._distributions.get(values)
        if found is None:
            found = self._distributions[values] = Distribution(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        """The metric of this moment."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, found in self._distributions.items():
            counts = list(zip(names, itertools.accumulate(found.counts), strict=True))
            family.add_metric((*self._always, *values), counts, found.sum)
        yield family


def step_tokens(model: str) -> PlainHistogram:
    """A histogram of the tokens (prompt and decode) in each engine step, with vLLM's name and buckets."""
    bounds = (1, 8, *(2**power for power in range(4, 15)))
    return PlainHistogram("vllm:iteration_tokens_total", "Tokens of a step.", bounds, always={"model_name": model})
