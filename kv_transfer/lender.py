"""The offers of one worker to its sinks.

Life cycle of a lent prefix:

    1. AttachPrefix arrives. The worker finds the leading blocks that its cache holds, and takes references to them.
    2. They are pinned under a lease for this sink, and offered at once: a cached block is complete and never changes.
    3. Settle(valid), Detach, the loss of the sink or its time ends the lease. The worker drops its references.

The worker itself opens, extends and completes the offers of requests that are being computed. Pure state: actions and
consequences are passed to `emit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from prometheus_client.metrics_core import Metric

from common.contract.block_hashes import BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.handoff import Attach, AttachPrefix, AttachSequence, BlocksReady, Detach, Settle
from common.contract.messages.worker import PromptTimes, Tokens
from common.runtime.clock import Clock
from common.runtime.probes import counter, gauge
from kv_transfer.events import Consequence, Send, Serve, TransferAction
from kv_transfer.lease import withdrawn
from kv_transfer.lease_table import LeaseAction, LeaseTable
from kv_transfer.transport import SLOWEST_READ_BYTES_PER_S

LENT_TTL_S = 30.0
"""Longest time, in seconds, that a cached prefix stays pinned for a sink, besides what the reads of it and of all that
is lent already may take at `SLOWEST_READ_BYTES_PER_S`: reads from one worker wait for each other."""
UNATTACHED_TTL_S = 30.0
"""Seconds that an offer waits for a sink to attach, and an attach that is early for its offer, unless a setting says
otherwise."""
MAX_LENT = 256
"""Most cached prefixes that are lent at once. Further ones are refused."""


FindPrefix = Callable[[Sequence[BlockHash]], Sequence[int]]
"""Finds the leading ones of these blocks that are cached here, and takes a reference to each for the lender. Returns
none if none is cached, or if a reference would break a promise to a running request."""


class Lender:
    """The offers of one worker. It emits `Serve` when peers may begin to read, again whenever they learn of more to
    read, and when none may read any more.

    `checksum` returns the CRC-32 of blocks. It is given if the deployment runs with checksums.
    """

    def __init__(
        self,
        *,
        emit: Callable[[TransferAction | Consequence], None],
        clock: Clock,
        block_bytes: int,
        find_prefix: FindPrefix,
        unattached_ttl_s: float = UNATTACHED_TTL_S,
        checksum: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._block_bytes = block_bytes
        self._find_prefix = find_prefix
        self._leases = LeaseTable(unattached_ttl_s=unattached_ttl_s, checksum=checksum)
        self._serving = False
        self._num_prefixes_lent = 0

    @property
    def num_leases(self) -> int:
        """Leases held, lent prefixes included."""
        return len(self._leases)

    @property
    def num_readers(self) -> int:
        """Number of pulls whose reads may be under way."""
        return self._leases.num_readers

    @property
    def num_parked(self) -> int:
        """Number of attaches that wait for their Prefill."""
        return len(self._leases.parked)

    # --- messages of sinks ---------------------------------------------------------------------------------------

    def on_message(self, sink: Incarnation, message: Attach | AttachPrefix | AttachSequence | Settle | Detach) -> None:
        """Handle a message from a sink. An attach to a running sequence waits until the worker opens its lease."""
        match message:
            case Attach() | AttachSequence():
                self._do(self._leases.attach(message, sink, self._clock()))
            case AttachPrefix():
                self._lend(sink, message)
            case Settle():
                self._do(self._leases.settle(message, sink))
            case Detach():
                self._do(self._leases.detach(message, sink, self._clock()))

    def on_hello(self, peer: Incarnation, open_requests: Collection[RequestKey]) -> None:
        """A session with a peer has opened, perhaps again. The peer has given up the pulls that it does not list.

        It may still be reading those that it lists, even if its session was lost meanwhile.
        """
        self._do(self._leases.sink_said_hello(peer, set(open_requests), self._clock()))

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A sink is lost. Its leases wait for another sink, and prefixes that were lent to it are returned."""
        self._do(self._leases.sink_lost(peer, self._clock()))

    def _lend(self, sink: Incarnation, message: AttachPrefix) -> None:
        now = self._clock()
        if message.request in self._leases:
            self._do(self._leases.attach(message, sink, now))
            return
        if self._leases.num_lent >= MAX_LENT:
            refusal = withdrawn(message.key, Cause.CAPACITY, f"{MAX_LENT} prefixes are lent already")
            self._emit(Send(sink, refusal))
            return
        block_ids = self._find_prefix(message.block_hashes)
        if not block_ids:
            refusal = withdrawn(message.key, Cause.LEASE_LOST, "nothing of this prefix is cached or can be spared")
            self._emit(Send(sink, refusal))
            return
        assert len(block_ids) <= len(message.block_hashes), "more blocks than were asked for"
        self._num_prefixes_lent += 1
        num_blocks = self._leases.num_lent_blocks + len(block_ids)
        deadline = now + LENT_TTL_S + num_blocks * self._block_bytes / SLOWEST_READ_BYTES_PER_S
        self._do(self._leases.lend(message.key, block_ids, sink, deadline, now))

    # --- offers of the worker ------------------------------------------------------------------------------------

    def expect(self, key: RequestKey, deadline: float) -> None:
        """A request waits for its blocks until `deadline`; `open` or `withdraw` follows."""
        self._leases.parked.expect(key, deadline)

    def holds(self, key: RequestKey) -> bool:
        """Whether the lease that was opened for this request is held."""
        return self._leases.holds(key)

    def awaits(self, key: RequestKey) -> bool:
        """Whether a sink that has attached waits for this offer."""
        return self._leases.parked.awaits(key)

    def has_settled(self, key: RequestKey, sink: Incarnation) -> bool:
        """Whether this sink has been told that what it pulled is valid."""
        return self._leases.has_settled(key, sink)

    def open(self, key: RequestKey, block_ids: Sequence[int], deadline: float) -> None:
        """Offer the blocks of a request that is about to be computed; the caller has taken a reference to each."""
        self._do(self._leases.open(key, block_ids, deadline, self._clock()))

    def blocks_ready(self, request: RequestId, num_ready: int, checksums: Sequence[int] = ()) -> None:
        """The step that wrote blocks up to `num_ready` is complete. `checksums` are those of the blocks that became
        ready; without them they are computed, if the deployment has any."""
        self._do(self._leases.blocks_ready(request, num_ready, checksums, now=self._clock()))

    def complete(self, request: RequestId, first_tokens: Sequence[Tokens], times: PromptTimes | None = None) -> None:
        """The last chunk is done. `times` says how long the first tokens took."""
        self._do(self._leases.complete(request, first_tokens, times))

    def withdraw(self, request: RequestId, cause: Cause, message: str) -> None:
        """End the request's lease, or refuse the attach that waits for it (after abort or failure); inert without
        either."""
        self._do(self._leases.withdraw(request, cause, message))

    # --- time and pressure ---------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End the leases, and refuse the parked attaches, whose time is over."""
        self._do(self._leases.expire(now))

    def reclaim(self, num_blocks: int, unattached_before: float) -> None:
        """Under pressure: end complete offers that no sink has been attached to since `unattached_before`, the oldest
        first, until `num_blocks` blocks are free."""
        self._do(self._leases.reclaim(num_blocks, unattached_before))

    # --- metrics and invariants ----------------------------------------------------------------------------------

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        yield gauge("baton_leases", "Leases held.", len(self._leases))
        yield gauge("baton_readers", "Pulls whose reads may be under way.", self._leases.num_readers)
        yield gauge("baton_lease_blocks", "Blocks pinned by leases.", self._leases.num_blocks)
        yield gauge("baton_attaches_parked", "Attaches waiting for their prefill.", len(self._leases.parked))
        yield counter("baton_leases_expired", "Leases that outlived their time.", self._leases.num_expired)
        yield counter("baton_leases_reclaimed", "Leases dropped under pressure.", self._leases.num_reclaimed)
        yield counter("baton_prefixes_lent", "Cached prefixes offered to other workers.", self._num_prefixes_lent)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._leases.check_invariants()
        assert self._leases.num_lent <= MAX_LENT
        assert self._serving == (self._leases.num_readers > 0)

    def _do(self, actions: Sequence[LeaseAction]) -> None:
        """Pass on the actions of the lease table, and let the transport make progress while a peer may be reading."""
        serving = self._leases.num_readers > 0
        messages = (each.message for each in actions if isinstance(each, Send))
        num_blocks = sum(len(each.block_ids) for each in messages if isinstance(each, BlocksReady))
        if serving != self._serving or (serving and num_blocks):
            self._serving = serving
            self._emit(Serve(serving, num_blocks))
        for action in actions:
            self._emit(action)
