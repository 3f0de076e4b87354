"""The pulls of one worker.

Life cycle of a pull here:

    1. `begin`: the pull attaches as soon as a link to the source is open.
    2. The offer opens: `PullOffered`. The worker calls `reserve` when it has room, or `abandon`.
    3. Blocks are read as the source announces them. The shell reports the end of each read; it is never assumed.
    4. The source settles: `Pulled`, and the blocks belong to the worker. If the pull ends otherwise, every block that
       nothing can write to comes back by `Released`, then `PullFailed` follows. The other blocks are in quarantine.
       They are released when their reads have ended. Reads of which nothing has begun are dropped, and so end at once.

Each pull that has begun ends in exactly one `Pulled` or `PullFailed`. Pure state: actions and consequences are passed
to `emit`, and nothing is carried out here (`kv_transfer.transfers` does that).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Source
from common.contract.messages.handoff import BlocksReady, OfferWithdrawn, PrefillDone, Settled
from common.contract.messages.worker import Tokens
from common.runtime.clock import Clock
from common.runtime.probes import gauge
from kv_transfer.events import (
    AddSource,
    Connect,
    Consequence,
    DropRead,
    DropSource,
    Poll,
    Polled,
    ReadEnded,
    SourceLost,
    SourceOpened,
    SourceReceived,
    StartRead,
    TransferAction,
    TransferEvent,
)
from kv_transfer.pull import Pull, PullAction, PullState, ReadBlocks
from kv_transfer.transport import SLOWEST_READ_BYTES_PER_S, ReadId

log = logging.getLogger(__name__)

MAX_POLL_GAP_S = 1.0
"""Most seconds between two polls that count as time in which reads could end. In a longer gap this worker stood still,
or the mover was busy registering memory."""

Fits = Callable[[Sequence[Tokens]], bool]
"""Returns whether first tokens are those that were asked for."""
Emit = Callable[[TransferAction | Consequence], None]
"""Takes what was decided: an action for the shell, or a consequence for the worker's requests."""


@dataclass(slots=True)
class _Read:
    """A read that is under way."""

    pull: Pull
    start: int
    """Index, in the sequence, of the first block that it reads."""
    offer: int | None
    """Number of the source's offer to the mover (see `Pulls._offers`)."""
    num_bytes: int
    since_s: float
    """The time by `Pulls._polled_s` when it began, lost its pull, had its agent replaced, or was last seen to wait:
    behind an earlier read from its source, or for reads from other sources."""


class Pulls:
    """Every pull of one worker, and the reads that its abandoned pulls have left."""

    def __init__(
        self,
        *,
        emit: Emit,
        clock: Clock,
        transport: str,
        block_bytes: int,
        quarantine_bound_s: float,
        read_bound_s: float,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._transport = transport
        self._block_bytes = block_bytes
        self._quarantine_bound_s = quarantine_bound_s
        self._read_bound_s = read_bound_s
        self._sources: dict[str, SourceOpened] = {}
        """Address → the source there, while its link is open."""
        self._pulls: dict[RequestId, tuple[Pull, Fits | None]] = {}
        """Pulls that have neither settled nor been given up."""
        self._quarantine: dict[Pull, None] = {}
        """Abandoned pulls with reads under way."""
        self._reads: dict[ReadId, _Read] = {}
        self._polling = False
        """Whether the mover has been asked for a poll, and has not reported it."""
        self._polled_at = clock()
        """When it last reported one."""
        self._polled_s = 0.0
        """Seconds for which the mover has polled."""
        self._offers: dict[Incarnation, int] = {}
        """Source → number of its last offer to the mover, as long as it may be read. When a read of this number fails,
        the source is offered again."""
        self._offer_numbers = itertools.count(1)
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

    def open_pulls(self, address: str) -> Collection[RequestKey]:
        """The pulls from this address that are not over. A Hello to the source lists them."""
        pulls = (*(pull for pull, _ in self._pulls.values()), *self._quarantine)
        return [pull.key for pull in pulls if pull.source.address == address]

    # --- commands of the worker ----------------------------------------------------------------------------------

    def begin(self, pull: Pull, fits: Fits | None = None) -> None:
        """Attach as soon as the source can be reached.

        A request may have one pull at a time. If the first tokens do not fit (`fits`), the pull is abandoned. A source
        that is connected under another address is not connected again: it has one session with this worker.
        """
        assert pull.key.request not in self._pulls, f"{pull.key} is pulled already"
        self._pulls[pull.key.request] = (pull, fits)
        found = self._sources.get(pull.source.address)
        if found is None and (address := self._address_of(pull.source.incarnation)) is not None:
            pull.source, found = replace(pull.source, address=address), self._sources[address]
        if found is None:
            self._emit(Connect(pull.source.address))
        else:
            self._attach(pull, found)

    def reserve(self, pull: Pull, block_ids: Sequence[int], num_held: int = 0) -> None:
        """Read into `block_ids`, one block for each block of the offer. The first `num_held` are valid already, and are
        not read.

        The blocks belong to the pull until `Pulled` or `Released`.
        """
        pull.times.reserved_at = self._clock()
        self._do(pull, pull.reserve(block_ids, num_held))

    def abandon(self, pull: Pull, cause: Cause | None, why: str) -> None:
        """Give up a pull; inert if it is over."""
        self._do(pull, pull.abandon(cause, why))

    def tick(self) -> None:
        """Ask the mover for a poll: the time of reads runs only while it polls. Call this as long as there are
        reads."""
        if self._reads and not self._polling:
            self._polling = True
            self._emit(Poll())

    # --- events of the shell -------------------------------------------------------------------------------------

    def handle(self, event: TransferEvent) -> None:
        """A source or a read has changed."""
        match event:
            case SourceOpened():
                self._on_source_opened(event)
            case SourceReceived(source, message):
                self._on_source_message(source, message)
            case SourceLost():
                self._on_source_lost(event)
            case ReadEnded():
                self._on_read(event)
            case Polled(waiting):
                self._on_polled(waiting)

    def _on_source_opened(self, event: SourceOpened) -> None:
        """Attach every pull from this address, for the first time or again."""
        found = self._sources[event.address] = event
        if event.welcome.transport == self._transport:
            self._offers.setdefault(event.source, next(self._offer_numbers))
            self._emit(AddSource(event.source, event.welcome.transport_metadata))
        for pull in self._pulling_from(event.address):
            self._attach(pull, found)

    def _on_source_message(self, source: Incarnation, message: Message) -> None:
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

    def _on_source_lost(self, event: SourceLost) -> None:
        """Abandon the pulls from a lost source, which cannot be settled any more. Dropping the source is the fence,
        after which its quarantined blocks are released."""
        self._sources.pop(event.address, None)
        for pull in self._pulling_from(event.address):
            self._do(pull, pull.refused(event.cause, f"its source: {event.why}"))
        if event.source is not None:
            self._replace_agent(event.source)

    def _on_read(self, event: ReadEnded) -> None:
        read = self._reads.pop(event.read_id)
        pull = read.pull
        pull.times.read_ended(self._clock())
        broken = event.error is not None and not (event.mismatch or event.dropped)
        if broken and read.offer == self._offers.get(pull.source.incarnation):
            # The transport has destroyed what was broken, and makes another connection for the next read. That read may
            # be under way by now, so the source is not dropped. A source that the transport refused is offered again.
            self._offer(pull.source.incarnation)
        self._do(pull, pull.read_done(read.start, event.error))

    def _on_polled(self, waiting: Collection[ReadId]) -> None:
        """Replace the agents whose reads have lasted too long, or have kept blocks in quarantine for too long.

        Only the oldest open read from each source is judged, because a transport may read in order. The others are
        judged once those before them have ended, or fail with the agent.
        """
        now = self._clock()
        self._polled_s += min(now - self._polled_at, MAX_POLL_GAP_S)
        self._polled_at, self._polling = now, False
        judged: set[Incarnation] = set()
        overdue: list[Source] = []
        for read_id, read in self._reads.items():  # the oldest comes first
            source = read.pull.source
            if read_id in waiting or source.incarnation in judged:
                read.since_s = self._polled_s
            elif self._polled_s - read.since_s > self._bound_s(read):
                read.since_s = self._polled_s
                overdue.append(source)
            judged.add(source.incarnation)
        for source in overdue:
            log.warning("a read from %s does not end: replacing the agent that reads from there", source)
            self._replace_agent(source.incarnation)

    def _bound_s(self, read: _Read) -> float:
        """Seconds that a read may take, or stay in quarantine: more, the more it brings."""
        bound_s = self._quarantine_bound_s if read.pull in self._quarantine else self._read_bound_s
        return bound_s + read.num_bytes / SLOWEST_READ_BYTES_PER_S

    # --- internal steps ------------------------------------------------------------------------------------------

    def _attach(self, pull: Pull, found: SourceOpened) -> None:
        if found.welcome.transport != self._transport:
            message = f"this worker moves blocks by {self._transport}, its source by {found.welcome.transport}"
            self.abandon(pull, Cause.TRANSFER, message)
        elif found.source != pull.source.incarnation:
            self.abandon(pull, Cause.WORKER_LOST, "the source has restarted")
        else:
            self._do(pull, pull.attach())

    def _replace_agent(self, source: Incarnation) -> None:
        """Drop the agent of a source: this is the fence. Each read of its pulls fails. While a link to the source is
        open, it gets a new agent, so that the pulls may be tried again."""
        self._offers.pop(source, None)
        self._emit(DropSource(source))
        self._offer(source)

    def _offer(self, source: Incarnation) -> None:
        """Let the mover read from a source, if a link to it is open. This is inert for a source that it may read."""
        address = self._address_of(source)
        if address is not None and (welcome := self._sources[address].welcome).transport == self._transport:
            self._offers[source] = next(self._offer_numbers)
            self._emit(AddSource(source, welcome.transport_metadata))

    def _address_of(self, source: Incarnation) -> str | None:
        """The address at which a source is connected; None if it is not."""
        return next((address for address, found in self._sources.items() if found.source == source), None)

    def _do(self, pull: Pull, actions: Iterable[PullAction]) -> None:
        """Pass on the actions of a pull, whose state has changed."""
        now = self._clock()
        self._enter(pull)
        self._note(pull, now)
        for action in actions:
            match action:
                case ReadBlocks():
                    self._read(pull, action, now)
                case _:
                    self._emit(action)

    def _read(self, pull: Pull, wanted: ReadBlocks, now: float) -> None:
        if not self._reads:
            self._polled_at = now  # no poll was asked for while no read was open
        read_id, source = ReadId(next(self._read_ids)), pull.source.incarnation
        num_bytes = len(wanted.sink_blocks) * self._block_bytes
        self._reads[read_id] = _Read(pull, wanted.start, self._offers.get(source), num_bytes, self._polled_s)
        pull.times.read_begun(num_bytes, now)
        self._emit(StartRead(read_id, source, wanted.source_blocks, wanted.sink_blocks, wanted.checksums))

    def _enter(self, pull: Pull) -> None:
        """Move a pull to, or off, `_pulls` and `_quarantine`, by its state. Drop what it need not read any more."""
        if pull.over:
            self._quarantine.pop(pull, None)
        elif pull.state is PullState.ABANDONED and pull not in self._quarantine:
            self._quarantine[pull] = None
            for read_id, read in self._reads.items():
                if read.pull is pull:
                    read.since_s = self._polled_s
                    self._emit(DropRead(read_id))
        if pull.state in (PullState.SETTLED, PullState.ABANDONED) and self._has(pull):
            del self._pulls[pull.key.request]

    def _note(self, pull: Pull, now: float) -> None:
        """Note the times of a pull's progress."""
        if pull.told:
            pull.times.told(now)
        if pull.state is PullState.SETTLING and pull.times.read_at is None:
            pull.times.read_at = now

    def _has(self, pull: Pull) -> bool:
        return self._pulls.get(pull.key.request, (None, None))[0] is pull

    def _pulling_from(self, address: str) -> list[Pull]:
        return [pull for pull, _ in self._pulls.values() if pull.source.address == address]

    # --- metrics and invariants ----------------------------------------------------------------------------------

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        yield gauge("baton_pulls", "Pulls that have begun and not ended.", self.num_pulls)
        yield gauge("baton_reads", "Reads under way.", self.num_reads)
        yield gauge("baton_blocks_quarantined", "Blocks that an unfinished read may write to.", self.num_quarantined)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for pull, _ in self._pulls.values():
            pull.check_invariants()
            assert pull.state not in (PullState.SETTLED, PullState.ABANDONED), pull.story
        for pull in self._quarantine:
            assert pull.quarantined, pull.story
        for read in self._reads.values():
            assert self._has(read.pull) or read.pull in self._quarantine, read.pull.story
