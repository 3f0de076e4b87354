"""How fast blocks come, and which way: what the operator sees of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from common.contract.ids import Incarnation
from common.runtime.probes import counter
from kv_transfer.routes import Route, Way

log = logging.getLogger(__name__)


class Bandwidths:
    """Of the reads of one worker."""

    def __init__(self) -> None:
        self.num_sources: dict[Way, int] = dict.fromkeys(Way, 0)
        """Sources by the way of the first read from there."""
        self._bytes_per_second: dict[Way, float] = {}

    def observe(self, source: Incarnation, route: Route, num_bytes: int, seconds: float, *, first: bool) -> None:
        """A read is done; it is the `first` from its source."""
        rate = num_bytes / max(seconds, 1e-9)
        self._bytes_per_second[route.way] = rate
        if first:
            self.num_sources[route.way] += 1
            text = "first read from %s: %d bytes in %.4f s, %.2f GB/s with the connection set up, by %s"
            log.info(text, source, num_bytes, seconds, rate / 1e9, route)

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        text = "Workers from which blocks were read, by the way that they came at first."
        yield counter("baton_sources_read", text, {way.value: n for way, n in self.num_sources.items()}, "way")
        text = "Bytes by seconds of the latest read that came this way."
        family = GaugeMetricFamily("baton_read_bytes_per_second", text, labels=["way"])
        for way, rate in self._bytes_per_second.items():
            family.add_metric([way.value], rate)
        yield family
