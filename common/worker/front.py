"""What a core of either role has to do with other processes: the open requests of its gateways, what it refuses and
counts, whether it drains, its pulls and leases, and who is told what the prefix cache holds and which suspects
compute."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Resume
from common.contract.messages.handoff import Attach, AttachPrefix, Detach, Settle
from common.contract.messages.session import Phase, Role
from common.contract.messages.worker import Cancelled, Failed
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.runtime.config import WorkerSettings
from common.runtime.fence import AttemptFence
from common.runtime.logs import about
from common.runtime.probes import counter, gauge
from common.scheduling.trials import TrialFeed, Trials
from common.worker.agenda import Agenda
from common.worker.events import Event, Received, SessionOpened
from kv_transfer.events import Consequence, Polled, ReadEnded, Released, SourceLost, SourceOpened, SourceReceived
from kv_transfer.lender import UNATTACHED_TTL_S, FindPrefix, Lender
from kv_transfer.pulls import Pulls
from kv_transfer.regions import Region

log = logging.getLogger(__name__)

_MAX_MESSAGE = 4096
"""Most characters of a failure's message."""


class GatewayRequest(Protocol):
    """A request of a gateway, in either role."""

    @property
    def gateway(self) -> Incarnation:
        """The gateway that sent it, and gets the answers."""

    @property
    def key(self) -> RequestKey:
        """Its id and its attempt."""


_Request = TypeVar("_Request", bound=GatewayRequest)


class Front(Generic[_Request]):
    """One worker towards other processes. Pure state."""

    def __init__(
        self,
        agenda: Agenda,
        settings: WorkerSettings,
        block_size: int,
        pool: BlockPool,
        trials: Trials,
        region: Region,
        find_prefix: FindPrefix,
        unattached_ttl_s: float = UNATTACHED_TTL_S,
    ) -> None:
        self._agenda = agenda
        self._settings = settings
        self._block_size = block_size
        self._pool = pool
        self.checksum: Callable[[Sequence[int]], Sequence[int]] | None = region.crc32 if settings.checksums else None
        """CRC-32 of each block; None if the deployment does not use checksums."""
        self.pulls = Pulls(
            emit=agenda.emit,
            clock=agenda.clock,
            transport=settings.transport,
            block_bytes=region.block_bytes,
            quarantine_bound_s=settings.quarantine_bound_s,
            read_bound_s=settings.read_bound_s,
        )
        self.lender = Lender(
            emit=agenda.emit,
            clock=agenda.clock,
            block_bytes=region.block_bytes,
            find_prefix=find_prefix,
            unattached_ttl_s=unattached_ttl_s,
            checksum=self.checksum,
        )
        self.fence = AttemptFence(agenda.clock)
        self._cache_feed = CacheFeed(pool, agenda.send)
        self._trial_feed = TrialFeed(trials, self._gateway_of, agenda.send)
        self._gateways: dict[Incarnation, None] = {}
        """The gateways that have a session, in the order in which they came."""
        self._ended: dict[str, int] = {}
        self.requests: dict[RequestId, _Request] = {}
        """Requests that have not ended here."""
        self.finished: OrderedDict[RequestId, _Request] = OrderedDict()
        """Requests that have ended, until the gateway acknowledges it. Only decode workers keep any."""
        self.draining = False
        self._leaving = False
        """Whether the process ends when it is drained."""

    def handle(self, event: Event | Consequence) -> None:
        """An event or a consequence that means the same in both roles; a message that does not is ignored."""
        match event:
            case SourceOpened() | SourceReceived() | SourceLost() | ReadEnded() | Polled():
                self.pulls.handle(event)
            case Released(block_ids):
                self._pool.release(block_ids)
            case SessionOpened(peer, role):
                if role is Role.GATEWAY:
                    self._gateways[peer] = None
                    self._cache_feed.begin(peer)
                    self._trial_feed.begin(peer)
            case Received(peer, Attach() | AttachPrefix() | Settle() | Detach() as message):
                self.lender.on_message(peer, message)
            case Received(_, Resume()):
                self.draining = self._leaving  # serve again, unless the process is ending
            case Received(_, message):
                log.warning("%s is not for a worker of this role; ignored", type(message).__name__)
            case _:
                raise AssertionError(event)

    def drain(self, *, leaving: bool = False) -> bool:
        """Take no new work. Gateways learn it by the next heartbeat. Returns whether that is new. If the process is
        `leaving`, it never takes new work again."""
        self._leaving = self._leaving or leaving
        if self.draining:
            return False
        log.info("draining: %d requests are open", len(self.requests))
        self.draining = True
        return True

    def tick(self, now: float) -> None:
        """End the leases that are overdue at `now`, and let the mover look at open reads."""
        self.pulls.tick()
        self.lender.expire(now)

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

    def hello(self, peer: Incarnation, listed: Collection[RequestKey]) -> list[_Request]:
        """A session opens, perhaps again: the client has given up the pulls that it does not list. Returns the requests
        that it has given up."""
        self.lender.on_hello(peer, listed)
        given_up = [request for request in self._owned_by(peer) if request.key not in listed]
        self._count_orphans(peer, given_up)
        return given_up

    def lost(self, peer: Incarnation) -> list[_Request]:
        """A client's session is over; returns its requests."""
        self.lender.on_peer_lost(peer)
        self._gateways.pop(peer, None)
        owned = self._owned_by(peer)
        self._count_orphans(peer, owned)
        return owned

    def open_requests(self, peer: Incarnation) -> tuple[RequestKey, ...]:
        """The requests of a gateway that are open here, or wait for its acknowledgement."""
        return tuple(request.key for request in self._owned_by(peer))

    def _count_orphans(self, gateway: Incarnation, requests: Iterable[_Request]) -> None:
        """Count those that are open as cancelled: they end without a message."""
        num_open = sum(request.key.request in self.requests for request in requests)
        for _ in range(num_open):
            self.count(Cause.CANCELLED)
        if num_open:
            log.info("%d open requests end here: gateway %s no longer has them", num_open, gateway)

    def _owned_by(self, gateway: Incarnation) -> list[_Request]:
        return [each for each in (*self.requests.values(), *self.finished.values()) if each.gateway == gateway]

    def _gateway_of(self, key: RequestKey) -> Incarnation | None:
        """The gateway of a request; None if the request has left."""
        request = self.requests.get(key.request)
        return request.gateway if request is not None and request.key == key else None

    def tell_turn(self) -> bool:
        """Tell gateways which suspects compute next, if that has changed. Returns whether it has."""
        return self._trial_feed.publish(self._gateways)

    def tell_cache(self) -> None:
        """Tell gateways how the prefix cache has changed."""
        self._cache_feed.publish(self._gateways)

    # --- what others see -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is here that a tick could end."""
        return not (self.requests or self.pulls.num_reads or self.lender.num_leases or self.lender.num_parked)

    @property
    def phase(self) -> Phase:
        """Serving; while draining, DRAINING until nothing is held here any more, then DRAINED."""
        if not self.draining:
            return Phase.SERVING
        pulls, lender = self.pulls, self.lender
        exchanged = pulls.num_pulls or pulls.num_quarantined or lender.num_leases or lender.num_readers
        return Phase.DRAINING if self.requests or self.finished or exchanged else Phase.DRAINED

    def counts(self) -> Mapping[str, object]:
        """What is held in either role. At rest all counts but `blocks_total` and `blocks_cached` are zero."""
        pool = self._pool
        return {
            "blocks_used": pool.num_used,
            "blocks_limbo": pool.num_limbo,
            "blocks_total": pool.num_blocks,
            "blocks_cached": pool.num_cached,
            "reads": self.pulls.num_reads,
            "blocks_quarantined": self.pulls.num_quarantined,
            "leases": self.lender.num_leases,
            "readers": self.lender.num_readers,
            "parked": self.lender.num_parked,
            "requests": len(self.requests),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        pool, model = self._pool, self._settings.model
        used = {model: pool.num_used / pool.num_blocks}
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache.", used, "model_name")
        sizes = {(model, str(self._block_size), str(pool.num_blocks)): 1}
        labels = ("model_name", "block_size", "num_gpu_blocks")
        yield gauge("vllm:cache_config_info", "How large the KV cache is.", sizes, *labels)
        yield gauge("baton_blocks_cached", "Blocks known by name.", pool.num_cached)
        yield counter("baton_blocks_evicted", "Cached blocks that were given away.", pool.num_evicted)
        yield from self.pulls.metrics()
        yield from self.lender.metrics()
        yield counter("baton_requests_ended", "Requests by how they ended here.", self._ended, "end")

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._pool.check_invariants()
        self.pulls.check_invariants()
        self.lender.check_invariants()
        assert not self.requests.keys() & self.finished.keys(), "open, and finished"
