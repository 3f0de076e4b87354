"""The pull side of a worker: carries out its pulls.

Life cycle of a pull in the worker:

    1. `begin`: the pull attaches as soon as a link to the source is open.
    2. The offer opens: `on_want_blocks`. The worker calls `reserve` when it has room, or `abandon`.
    3. Blocks are read as the source announces them. The mover reports the end of each read; it is never assumed.
    4. The source settles: `on_pulled`, and the blocks belong to the worker. If the pull ends otherwise, `on_release` is
       called for every block that nothing can write to, then `on_gave_up`. The other blocks are in quarantine. They are
       released when their reads have ended.

Each pull that has begun ends in exactly one `on_pulled` or `on_gave_up`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause, TransferError
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.messages import (
    BlocksReady,
    Message,
    OfferWithdrawn,
    PrefillDone,
    Role,
    Settled,
    Source,
    Tokens,
    Welcome,
)
from common.runtime.clock import Clock
from common.runtime.config import WorkerSettings
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import PeerNetworks
from common.runtime.probes import counter, gauge
from kv_transfer.mover import Mover
from kv_transfer.pull_times import PullTimes
from kv_transfer.regions import Region
from kv_transfer.sink import Action, Admit, GaveUp, Pull, PullState, Release, SendToSource, StartRead, WantBlocks
from kv_transfer.source_links import SourceLinks
from kv_transfer.transport import ReadId, Transport

log = logging.getLogger(__name__)

Fits = Callable[[Sequence[Tokens]], bool]
"""Returns whether first tokens are those that were asked for."""


class IntakeEvents(Protocol):
    """The calls by which a worker learns about its pulls. Every method may call the intake again."""

    def on_want_blocks(self, pull: Pull, num_blocks: int) -> None:
        """The offer is open: call `reserve` when there is room, or `abandon`. Called once per pull."""

    def on_pulled(self, pull: Pull, block_ids: Sequence[int], first_tokens: Sequence[Tokens]) -> None:
        """The pull is settled and valid: the reserved blocks hold the KV. A pull of a prefix has no first tokens."""

    def on_release(self, block_ids: Sequence[int]) -> None:
        """These reserved blocks, held ones included, no longer belong to a pull, and nothing writes to them."""

    def on_gave_up(self, pull: Pull, cause: Cause | None, message: str) -> None:
        """The pull is over, by `abandon` or otherwise. `cause` is the one that `abandon` was given. It is also None if
        the first tokens ended the request (`Pull.ended_with`)."""


@dataclass(slots=True)
class _Read:
    """A read that is under way."""

    pull: Pull
    start: int
    """Index, in the sequence, of the first block that it reads."""
    agent: int
    """Number of the agent that reads (see `Intake._agents`)."""
    since: float
    """When it began, or when its agent was last replaced."""


class Intake:
    """Connects pulls, links to sources and the mover. Runs on the event loop's thread.

    It owns the worker's one mover, which serves the reads of peers too (`mover.set_serving`).
    """

    def __init__(
        self,
        settings: WorkerSettings,
        me: Incarnation,
        role: Role,
        fingerprint: Fingerprint,
        region: Region,
        make_transport: Callable[[], Transport],
        events: IntakeEvents,
        clock: Clock,
    ) -> None:
        self.mover = Mover(region, make_transport, self._on_read, self.on_died)
        self.transport_metadata = b""
        """What sinks need in order to read from this worker; known once started."""
        self._transport = settings.transport
        self._quarantine_bound_s = settings.quarantine_bound_s
        self._read_bound_s = settings.read_bound_s
        self._block_bytes = region.block_bytes
        self._events = events
        self._clock = clock
        peers, keys = PeerNetworks.of(settings), CurveKeys.load(settings.curve_keys)
        self._links = SourceLinks(me, role, fingerprint, self, clock, settings.pulse, peers, keys)
        self._pulls: dict[RequestId, tuple[Pull, Fits | None]] = {}
        """Pulls that have neither settled nor been given up."""
        self._quarantine: dict[Pull, float] = {}
        """Abandoned pulls with reads under way → when they were abandoned, or when their agent was last replaced."""
        self._reads: dict[ReadId, _Read] = {}
        self._agents: dict[Incarnation, int] = {}
        """Source → how often the agent that reads from it was replaced."""
        self._read_ids = itertools.count()

    @property
    def num_pulls(self) -> int:
        """Pulls that have neither settled nor been given up."""
        return len(self._pulls)

    @property
    def num_reads(self) -> int:
        """Reads under way."""
        return len(self._reads)

    @property
    def num_quarantined(self) -> int:
        """Blocks that an unfinished read of an abandoned pull may still write to."""
        return sum(len(pull.quarantined) for pull in self._quarantine)

    # --- life cycle ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` when it cannot work here."""
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport_metadata = await self.mover.start()

    async def run(self) -> None:
        """Wait until cancelled. If the mover's thread or a link dies of a bug, raise that error."""
        await self._died

    async def close(self) -> None:
        """End every read and every link."""
        await self.mover.close()  # before the links: sources must go on serving the reads that the mover lets end
        await self._links.close()

    # --- commands of the worker ----------------------------------------------------------------------------------

    def begin(self, pull: Pull, fits: Fits | None = None) -> None:
        """Attach as soon as the source can be reached; `on_gave_up` may be called before this returns.

        A request may have one pull at a time. If the first tokens do not fit (`fits`), the pull is abandoned.
        """
        assert pull.key.request not in self._pulls, f"{pull.key} is pulled already"
        self._pulls[pull.key.request] = (pull, fits)
        pull.times = PullTimes()
        source = self._links.need(pull.source.address)
        if source is not None:
            self._attach(pull, source, self._links.welcome(pull.source.address))

    def reserve(self, pull: Pull, block_ids: Sequence[int], num_held: int = 0) -> None:
        """Read into `block_ids`, one block for each block of the offer. The first `num_held` are valid already, and are
        not read.

        The blocks belong to the pull until `on_pulled` or `on_release`.
        """
        assert pull.times is not None
        pull.times.reserved_at = self._clock()
        self._do(pull, pull.reserve(block_ids, num_held))

    def revoke(self, pull: Pull) -> None:
        """Give the blocks that were reserved for a `revocable` pull back to the worker. `reserve` may be called
        again."""
        pull.revoke()

    def abandon(self, pull: Pull, cause: Cause | None, why: str) -> None:
        """Give up a pull; inert if it is over."""
        self._do(pull, pull.abandon(cause, why))

    def tick(self, now: float) -> None:
        """Replace agents whose reads have lasted too long, or have kept blocks in quarantine for too long. Call this as
        long as there are reads or quarantined blocks."""
        overdue = {pull.source for pull, since in self._quarantine.items() if now - since > self._quarantine_bound_s}
        overdue |= {read.pull.source for read in self._reads.values() if now - read.since > self._read_bound_s}
        for source in overdue:
            log.warning("a read from %s does not end: replacing the agent that reads from there", source)
            self._replace_agent(source)
            for pull in self._quarantine:
                if pull.source == source:
                    self._quarantine[pull] = now
            for read in self._reads.values():
                if read.pull.source == source:
                    read.since = now

    def _replace_agent(self, source: Source) -> None:
        """Replace the agent of a source that is still there: this is the fence. Each of its pulls fails, and may be
        tried again."""
        self._agents[source.incarnation] = self._agents.get(source.incarnation, 0) + 1
        self.mover.drop_source(source.incarnation)
        if self._links.at(source.address) == source.incarnation:
            self.mover.add_source(source.incarnation, self._links.welcome(source.address).transport_metadata)

    # --- events from sources and the mover -----------------------------------------------------------------------

    def open_pulls(self, address: str) -> Collection[RequestKey]:
        """The pulls from this address that are not over."""
        pulls = (*(pull for pull, _ in self._pulls.values()), *self._quarantine)
        return [pull.key for pull in pulls if pull.source.address == address]

    def on_source_open(self, address: str, source: Incarnation, welcome: Welcome) -> None:
        """Attach every pull from this address, for the first time or again."""
        if welcome.transport == self._transport:
            self.mover.add_source(source, welcome.transport_metadata)
        for pull in self._pulling_from(address):
            self._attach(pull, source, welcome)

    def on_source_message(self, source: Incarnation, message: Message) -> None:
        """A message from a source, about one of its pulls."""
        if not isinstance(message, BlocksReady | PrefillDone | Settled | OfferWithdrawn):
            return
        pull, fits = self._pulls.get(message.request, (None, None))
        if pull is None or pull.key != message.key or pull.source.incarnation != source:
            return
        match message:
            case BlocksReady():
                self._do(pull, pull.blocks_ready(message))
            case PrefillDone() if fits is not None and not fits(message.first_tokens):
                self.abandon(pull, Cause.TRANSFER, "the first tokens are not those asked for")
            case PrefillDone():
                self._do(pull, pull.prefill_done(message))
            case Settled():
                self._do(pull, pull.settled(message))
            case OfferWithdrawn():
                self._do(pull, pull.withdrawn(message))

    def on_source_lost(self, address: str, source: Incarnation | None, cause: Cause, why: str) -> None:
        """Abandon the pulls from a lost source, which cannot be settled any more. Dropping the source is the fence,
        after which its quarantined blocks are released."""
        for pull in self._pulling_from(address):
            self.abandon(pull, cause, f"the source at {address}: {why}")
        if source is not None:
            self._agents[source] = self._agents.get(source, 0) + 1
            self.mover.drop_source(source)

    def on_died(self, error: BaseException) -> None:
        """The mover's thread or a link's task has died of a bug: make `run` raise the error, so that the worker
        ends."""
        if not self._died.done():
            self._died.set_exception(error)

    def _on_read(self, read_id: ReadId, error: TransferError | None) -> None:
        read = self._reads.pop(read_id)
        pull = read.pull
        assert pull.times is not None
        pull.times.read_ended(self._clock())
        if error is not None and read.agent == self._agents.get(pull.source.incarnation, 0):
            # Its connection may be broken for good. The next pull gets a new one.
            self._replace_agent(pull.source)
        self._do(pull, pull.read_done(read.start, None if error is None else str(error)))

    # --- internal steps ------------------------------------------------------------------------------------------

    def _attach(self, pull: Pull, source: Incarnation, welcome: Welcome) -> None:
        if welcome.transport != self._transport:
            message = f"this worker moves blocks by {self._transport}, its source by {welcome.transport}"
            self.abandon(pull, Cause.TRANSFER, message)
        elif source != pull.source.incarnation:
            self.abandon(pull, Cause.WORKER_LOST, "the source has restarted")
        else:
            self._do(pull, pull.attach())

    def _do(self, pull: Pull, actions: Iterable[Action]) -> None:
        """Carry out the actions of a pull. The books are updated first, so that the calls to the worker find them in
        order."""
        self._enter(pull)
        now = self._clock()
        self._note(pull, now)
        for action in actions:
            match action:
                case SendToSource(message):
                    self._links.send(pull.source.address, message)
                case StartRead():
                    read_id = ReadId(next(self._read_ids))
                    source = pull.source.incarnation
                    self._reads[read_id] = _Read(pull, action.start, self._agents.get(source, 0), now)
                    assert pull.times is not None
                    pull.times.read_begun(len(action.sink_blocks) * self._block_bytes, now)
                    self.mover.read(read_id, source, action.source_blocks, action.sink_blocks, action.checksums)
                case WantBlocks(num_blocks):
                    self._events.on_want_blocks(pull, num_blocks)
                case Admit(block_ids, first_tokens):
                    self._events.on_pulled(pull, block_ids, first_tokens)
                case Release(block_ids):
                    self._events.on_release(block_ids)
                case GaveUp(cause, message):
                    self._events.on_gave_up(pull, cause, message)

    def _enter(self, pull: Pull) -> None:
        """Move a pull to, or off, the books `_pulls` and `_quarantine`, by its state."""
        if pull.over:
            self._quarantine.pop(pull, None)
        elif pull.state is PullState.ABANDONED:
            self._quarantine.setdefault(pull, self._clock())
        if pull.state in (PullState.SETTLED, PullState.ABANDONED) and self._has(pull):
            del self._pulls[pull.key.request]

    def _note(self, pull: Pull, now: float) -> None:
        """Note the times of a pull's progress. A pull that is given up before it began has no times."""
        times = pull.times
        if times is None:
            return
        if pull.told:
            times.told(now)
        if pull.state is PullState.SETTLING and times.read_at is None:
            times.read_at = now

    def _has(self, pull: Pull) -> bool:
        return self._pulls.get(pull.key.request, (None, None))[0] is pull

    def _pulling_from(self, address: str) -> list[Pull]:
        return [pull for pull, _ in self._pulls.values() if pull.source.address == address]

    # --- metrics and invariants ----------------------------------------------------------------------------------

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        mover = self.mover
        yield gauge("baton_pulls", "Pulls that have begun and not ended.", self.num_pulls)
        yield gauge("baton_reads", "Reads under way.", self.num_reads)
        yield gauge("baton_blocks_quarantined", "Blocks that an unfinished read may write to.", self.num_quarantined)
        yield counter("baton_transfer_bytes", "Bytes pulled.", mover.num_blocks_read * self._block_bytes)
        yield counter("baton_transfer_seconds", "Durations of reads, summed; reads overlap.", mover.read_seconds)
        yield counter("baton_transfer_failures", "Reads that failed.", mover.num_reads_failed)
        yield from mover.bandwidths.metrics()
        text = "Times that the KV cache is registered for transfers now."
        yield gauge("baton_kv_registrations", text, mover.num_registrations)
        text = "Registrations that made room for a read from another source."
        yield counter("baton_kv_registrations_evicted", text, mover.num_evicted)
        yield counter("baton_sources_refused", "Addresses outside the peers' networks.", self._links.num_refused)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for pull, _ in self._pulls.values():
            pull.check_invariants()
            assert pull.state not in (PullState.SETTLED, PullState.ABANDONED), pull.story
        for pull in self._quarantine:
            assert pull.quarantined, pull.story
        for read in self._reads.values():
            assert self._has(read.pull) or read.pull in self._quarantine, read.pull.story
