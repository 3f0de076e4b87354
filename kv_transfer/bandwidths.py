"""The rates of reads and the ways that they take, for the operator: in the log, in `/ready` and as metrics."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from common.contract.ids import Incarnation
from common.runtime.probes import counter, gauge
from kv_transfer.routes import ReadRoute, Way

log = logging.getLogger(__name__)

MAX_SOURCES = 4096
"""Most sources that are remembered. One that is read from again after so many others counts once more."""


class Bandwidths:
    """Records the reads of one worker, into memory of `device`."""

    def __init__(self, device: str) -> None:
        self.num_fallbacks = 0
        """Sources whose first read fell back to a slow way (`ReadRoute.falls_back`)."""
        self._device = device
        self.num_sources: dict[Way, int] = dict.fromkeys(Way, 0)
        """Way → number of sources whose first read came that way."""
        self._bytes_per_second: dict[Way, float] = {}
        self._known: OrderedDict[Incarnation, None] = OrderedDict()
        """Sources from which a read is done, in the order of their latest reads."""

    def observe(self, source: Incarnation, route: ReadRoute, num_bytes: int, seconds: float) -> None:
        """Record a read that is done. `seconds` is its duration."""
        rate = num_bytes / max(seconds, 1e-9)
        self._bytes_per_second[route.way] = rate
        first = source not in self._known
        self._known[source] = None
        self._known.move_to_end(source)
        if len(self._known) > MAX_SOURCES:
            self._known.popitem(last=False)
        if first:
            self.num_sources[route.way] += 1
            text = "first read from %s: %d bytes in %.4f s, %.2f GB/s with the connection set up, by %s"
            log.info(text, source, num_bytes, seconds, rate / 1e9, route)
            self._look_for_fallback(source, route)

    def _look_for_fallback(self, source: Incarnation, route: ReadRoute) -> None:
        if self._device == "cuda" and route.same_host and route.way is not Way.CUDA_IPC:
            text = (
                "%s is on this host, but blocks come from its GPU by %s and not by cuda_ipc: are both workers in one "
                "PID and IPC namespace, and do their containers have both GPUs? (CUDA_VISIBLE_DEVICES may differ)"
            )
            log.warning(text, source, route)
        if not route.falls_back(self._device):
            return
        if not self.num_fallbacks:
            text = (
                "UCX has fallen back: blocks from %s come by %s. Others are counted in baton_transfer_fallbacks_total "
                "and not logged; --require-rdma refuses them"
            )
            log.warning(text, source, route)
        self.num_fallbacks += 1

    def state(self) -> Mapping[str, object]:
        """For `/ready`: the number of sources by way, without ways that have none, and the number of fallbacks among
        them."""
        ways = {way.value: num for way, num in self.num_sources.items() if num}
        return {"sources_read": ways, "fallbacks": self.num_fallbacks}

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        text = "Workers from which blocks were read, by the way that they came at first."
        yield counter("baton_sources_read", text, {way.value: n for way, n in self.num_sources.items()}, "way")
        text = "Workers from which blocks came neither by RDMA nor by NVLink, though NIXL moves them."
        yield counter("baton_transfer_fallbacks", text, self.num_fallbacks)
        text = "Bytes by seconds of the latest read that came this way."
        rates = {way.value: rate for way, rate in self._bytes_per_second.items()}
        yield gauge("baton_read_bytes_per_second", text, rates, "way")
