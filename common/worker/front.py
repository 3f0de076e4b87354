"""A core's dealings with its gateways that do not depend on the role: which attempts it admits, what it refuses and
counts, whether it drains, and who is told what the prefix cache holds and which suspects compute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import Cancelled, Failed, Phase, Role
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.runtime.fence import AttemptFence
from common.runtime.logs import about
from common.runtime.probes import counter
from common.scheduling.trials import TrialFeed, Trials
from common.worker.agenda import Agenda

log = logging.getLogger(__name__)

_MAX_MESSAGE = 4096
"""Most characters of a failure's message."""


class Front:
    """One worker towards its gateways. Pure state."""

    def __init__(
        self,
        agenda: Agenda,
        pool: BlockPool,
        trials: Trials,
        gateway_of: Callable[[RequestKey], Incarnation | None],
    ) -> None:
        """`gateway_of` returns the gateway of a request, or None if the request has left."""
        self._agenda = agenda
        self._fence = AttemptFence(agenda.clock)
        self._cache_feed = CacheFeed(pool, agenda.send)
        self._trial_feed = TrialFeed(trials, gateway_of, agenda.send)
        self._ended: dict[str, int] = {}
        self.draining = False

    def admits(self, key: RequestKey) -> bool:
        """Whether this attempt is newer than every earlier one of its request; if so, it is remembered."""
        return self._fence.admits(key)

    def phase(self, *, holds_anything: bool) -> Phase:
        """Serving; while draining, DRAINING until the worker holds nothing any more, then DRAINED."""
        if not self.draining:
            return Phase.SERVING
        return Phase.DRAINING if holds_anything else Phase.DRAINED

    # --- ends of requests ----------------------------------------------------------------------------------------

    def refuse(self, gateway: Incarnation, key: RequestKey, cause: Cause, message: str) -> None:
        """Tell a gateway that a request failed here, and count it."""
        fields = about("failed", request=key.request, attempt=key.attempt, cause=cause, why=message)
        log.warning("request %s failed: %s: %s", key.request, cause, message, extra=fields)
        self.count(cause)
        failed = Failed(request=key.request, attempt=key.attempt, cause=cause, message=message[:_MAX_MESSAGE])
        self._agenda.send(gateway, failed)

    def cancelled(self, gateway: Incarnation, key: RequestKey) -> None:
        """Confirm to a gateway that a request has ended as it wished, and count it."""
        self.count(Cause.CANCELLED)
        self._agenda.send(gateway, Cancelled(request=key.request, attempt=key.attempt))

    def count(self, end: str) -> None:
        """Count a request by how it ended."""
        self._ended[end] = self._ended.get(end, 0) + 1

    # --- sessions ------------------------------------------------------------------------------------------------

    def opened(self, peer: Incarnation, role: Role) -> None:
        """Start to tell a gateway which blocks the prefix cache holds and which requests are on trial."""
        if role is Role.GATEWAY:
            self._cache_feed.begin(peer)
            self._trial_feed.begin(peer)

    def lost(self, peer: Incarnation) -> None:
        """A client's session is over."""
        self._cache_feed.end(peer)
        self._trial_feed.end(peer)

    def tell_turn(self) -> bool:
        """Tell gateways which suspects compute next, if that has changed. Returns whether it has."""
        return self._trial_feed.publish()

    def tell_cache(self) -> None:
        """Tell gateways how the prefix cache has changed."""
        self._cache_feed.publish()

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        yield counter("baton_requests_ended", "Requests by how they ended here.", self._ended, "end")
