"""The source's half of a pull: which blocks are offered to which sink, under which lease, until when.

The life cycle of a lease is `kv_transfer.lease.LEASE_TABLE`. A lease pins its blocks from `open` until it ends. The
table then returns `Unpinned`, and only then may the worker reuse the blocks. An ended lease has no entry, so its epoch
matches nothing any more: a sink that settles it afterwards is told `invalid`. (A sink that has been told `valid` is
told so again, because the answer concerns the time before it first asked.)

A cached prefix is *lent*: its lease is complete from the beginning, and bound to the sink that has asked for it. It
also ends when that sink detaches or is lost, because no other sink waits for it.

A sink that has attached is a *reader* until it has settled or detached, even if the lease ends before. Its reads may
still be under way. They do no harm, but they need this worker's progress in order to end. A sink whose session is lost
reads nothing, as far as is known here. If it comes back, it is a reader again of what its Hello lists.

Pure state: events and a time in, actions out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey, new_lease_id
from common.contract.messages.handoff import Attach, AttachPrefix, AttachSequence, Detach, Settle
from common.contract.messages.worker import PromptTimes, Tokens
from kv_transfer.events import LeaseDropped, Released, Send, Unpinned
from kv_transfer.lease import Lease, LeaseEvent, LeaseState, verdict, withdrawn
from kv_transfer.parked import ParkedAttaches

MAX_TOMBSTONES = 4096
"""Most ended leases whose answers are remembered."""
MAX_LOST_READERS = 4096
"""Most readers that are remembered after their session was lost."""

LeaseAction = Send | Unpinned | Released | LeaseDropped


class LeaseTable:
    """Every lease of one worker, at most one per request."""

    def __init__(
        self, *, unattached_ttl_s: float, checksum: Callable[[Sequence[int]], Sequence[int]] | None = None
    ) -> None:
        """`checksum` returns the CRC-32 of each block; None if offers have no checksums."""
        self._unattached_ttl_s = unattached_ttl_s
        self._checksum = checksum
        self._leases: dict[RequestId, Lease] = {}
        self.parked = ParkedAttaches(unattached_ttl_s)
        """Attaches that wait for their Prefill."""
        self._finished: OrderedDict[RequestId, Lease] = OrderedDict()
        """Leases of requests that ended with their first tokens. A sink that attaches late is told that there is
        nothing to read, and that nothing was lost."""
        self._ended: OrderedDict[RequestId, int] = OrderedDict()
        """Request → the newest attempt whose offer has ended. No sink can attach to it any more."""
        self._settled: OrderedDict[LeaseId, tuple[RequestKey, int, Incarnation]] = OrderedDict()
        self._readers: set[tuple[RequestKey, Incarnation]] = set()
        self._lost_readers: OrderedDict[tuple[RequestKey, Incarnation], None] = OrderedDict()
        """Readers whose session was lost. They may be frozen, or cut off, with reads under way."""
        self._epoch = 0
        self.num_expired = 0
        self.num_reclaimed = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    @property
    def num_lent(self) -> int:
        """Leases on cached prefixes."""
        return sum(lease.lent for lease in self._leases.values())

    @property
    def num_lent_blocks(self) -> int:
        """Blocks pinned by leases on cached prefixes, counted once for each lease."""
        return sum(len(lease.block_ids) for lease in self._leases.values() if lease.lent)

    @property
    def num_readers(self) -> int:
        """Number of pulls whose reads may be under way. They need this worker's progress in order to end."""
        return len(self._readers)

    @property
    def num_blocks(self) -> int:
        """Blocks pinned by leases, counted once for each lease."""
        return sum(len(lease.block_ids) for lease in self._leases.values())

    def holds(self, key: RequestKey) -> bool:
        """Whether the lease that was opened for this request and attempt is held."""
        lease = self._leases.get(key.request)
        return lease is not None and not lease.lent and lease.opened_attempt == key.attempt

    def has_settled(self, key: RequestKey, sink: Incarnation) -> bool:
        """True if this sink was already told `valid` for this pull; its Settle is then a retry."""
        return any((settled, by) == (key, sink) for settled, _, by in self._settled.values())

    # --- the offer -----------------------------------------------------------------------------------------------

    def open(self, key: RequestKey, block_ids: Sequence[int], deadline: float, now: float) -> list[LeaseAction]:
        """Pin `block_ids` for a request that has no lease yet, and answer a parked attach."""
        actions: list[LeaseAction] = []
        held = self._leases.get(key.request)
        if held is not None and held.lent:  # lent under the request's own name: its sink is faulty
            actions += self._drop(held, Cause.SUPERSEDED, "the name is a request's")
        lease = self._pin(key, block_ids, deadline, now)
        self.parked.expect_no_more(key.request)
        parked = self.parked.take(key.request, key.attempt)
        if parked is None:
            return actions
        if parked.offered < key.attempt:
            return [*actions, parked.refusal(Cause.SUPERSEDED, "a newer attempt arrived")]
        return [*actions, *self._bind(lease, parked.key.attempt, parked.sink)]

    def lend(
        self, key: RequestKey, block_ids: Sequence[int], sink: Incarnation, deadline: float, now: float
    ) -> list[LeaseAction]:
        """Pin cached blocks for `sink`, under the name of a request that has no lease, and offer all of them."""
        assert block_ids, "a prefix of no blocks"
        lease = self._pin(key, block_ids, deadline, now)
        lease.lent, lease.sink = True, sink
        self._ready(lease, len(lease.block_ids))
        lease.first_tokens = ()
        lease.enter(LeaseEvent.COMPLETE, f"lent to {sink}")
        self._readers.add((key, sink))
        self.parked.unpark(key, sink)
        parked = self.parked.take(key.request)
        refused = [] if parked is None else [parked.refusal(Cause.SUPERSEDED, "it was lent")]
        return [*refused, Send(sink, lease.offer(0))]

    def blocks_ready(
        self, request: RequestId, num_ready: int, checksums: Sequence[int] = (), *, now: float
    ) -> list[LeaseAction]:
        """The step that wrote blocks up to `num_ready` is complete. `checksums` are those of the blocks that became
        ready; without them they are computed, if offers have any."""
        lease = self._leases[request]
        start = lease.num_ready
        assert start <= num_ready <= len(lease.block_ids), lease.story
        if num_ready == start:
            return []
        self._ready(lease, num_ready, checksums)
        if lease.sink is None:
            lease.unattached_since = now
            return []
        return [Send(lease.sink, lease.offer(start))]

    def complete(
        self, request: RequestId, first_tokens: Sequence[Tokens], times: PromptTimes | None = None
    ) -> list[LeaseAction]:
        """The last chunk is done. `times` says how long the first tokens took. If no choice goes on after its first
        token, the lease ends."""
        lease = self._leases[request]
        assert lease.num_ready == len(lease.block_ids), lease.story
        lease.first_tokens = tuple(first_tokens)
        lease.times = times
        lease.enter(LeaseEvent.COMPLETE, "complete")
        actions: list[LeaseAction] = []
        if lease.sink is not None:
            actions.append(Send(lease.sink, lease.done()))
        if all(tokens.finish_reason is not None for tokens in first_tokens):
            self._finished[request] = lease
            while len(self._finished) > MAX_TOMBSTONES:
                self._finished.popitem(last=False)
            actions.append(self._end(lease))
        return actions

    # --- the sink ------------------------------------------------------------------------------------------------

    def attach(
        self, message: Attach | AttachPrefix | AttachSequence, sink: Incarnation, now: float
    ) -> list[LeaseAction]:
        """A sink subscribes, for the first time or again after a loss. It is told everything from the first block on.

        A prefix must have been lent before. An attach to an offer that has ended does not wait.
        """
        lease = self._leases.get(message.request)
        offered = message.offered if isinstance(message, Attach) else message.attempt
        if lease is not None and (lease.lent or isinstance(message, AttachPrefix)):
            if lease.lent and (lease.key, lease.sink) == (message.key, sink):
                return [Send(sink, lease.offer(0))]
            return [Send(sink, withdrawn(message.key, Cause.SUPERSEDED, "this request has a lease of another kind"))]
        if lease is None or offered > lease.opened_attempt:
            assert not isinstance(message, AttachPrefix), message
            if offered <= self._ended.get(message.request, 0):
                if self.has_settled(message.key, sink):
                    return []  # its Settle follows
                finished = self._finished.get(message.request)
                if finished is not None and finished.opened_attempt == offered:
                    return [Send(sink, replace(each, attempt=message.attempt)) for each in finished.last_words()]
                return [Send(sink, withdrawn(message.key, Cause.LEASE_LOST, "this offer has ended"))]
            return [*self.parked.park(message.key, offered, sink, now)]
        if message.attempt < lease.key.attempt or offered < lease.opened_attempt:
            return [Send(sink, withdrawn(message.key, Cause.SUPERSEDED, "a newer attempt is attached"))]
        return self._bind(lease, message.attempt, sink)

    def settle(self, message: Settle, sink: Incarnation) -> list[LeaseAction]:
        """Answer whether the lease was held until now, in this epoch and for this sink. If it was, the lease ends."""
        self.parked.unpark(message.key, sink)  # a sink that settles has read everything and waits for no offer
        lease = self._leases.get(message.request)
        if (
            lease is not None
            and (lease.key, lease.lease, lease.epoch) == (message.key, message.lease, message.epoch)
            and lease.sink == sink
            and lease.complete
        ):
            self._settled[lease.lease] = (lease.key, lease.epoch, sink)
            self._readers.discard((message.key, sink))
            while len(self._settled) > MAX_TOMBSTONES:
                self._settled.popitem(last=False)
            return [Send(sink, verdict(message, valid=True)), self._end(lease, settled=True)]
        told_before = self._settled.get(message.lease) == (message.key, message.epoch, sink)
        return [Send(sink, verdict(message, valid=told_before))]

    def detach(self, message: Detach, sink: Incarnation, now: float) -> list[LeaseAction]:
        """The sink has given up, and its reads have ended. A lease that still stands waits for another sink; a loan
        ends."""
        self._readers.discard((message.key, sink))
        self.parked.unpark(message.key, sink)
        lease = self._leases.get(message.request)
        if lease is not None and lease.key == message.key and lease.sink == sink:
            return self._unbind(lease, now, "detached")
        return []

    def sink_said_hello(self, sink: Incarnation, pulls: Collection[RequestKey], now: float) -> list[LeaseAction]:
        """A sink's session opens, or opens again. The sink has given up all that `pulls` does not name. It may still be
        reading what it names, even if the loss of its session has ended the lease."""
        for reader in [reader for reader in self._lost_readers if reader[1] == sink]:
            del self._lost_readers[reader]
            self._readers.add(reader)
        return self._keep(sink, pulls, now, "given up by its sink")

    def sink_lost(self, sink: Incarnation, now: float) -> list[LeaseAction]:
        """A sink's session is over. What it was reading is remembered, since it may come back."""
        self._lost_readers.update(dict.fromkeys(reader for reader in self._readers if reader[1] == sink))
        while len(self._lost_readers) > MAX_LOST_READERS:
            self._lost_readers.popitem(last=False)
        return self._keep(sink, (), now, "its sink is lost")

    # --- the end -------------------------------------------------------------------------------------------------

    def withdraw(self, request: RequestId, cause: Cause, message: str) -> list[LeaseAction]:
        """End the lease from this side (abort, failure), or refuse the attach that waits for it; inert without either.

        An attach that waits for a newer attempt goes on waiting.
        """
        attempt = self.parked.expect_no_more(request)
        self._note_end(request, attempt)
        parked = self.parked.take(request, attempt)
        actions: list[LeaseAction] = [] if parked is None else [parked.refusal(cause, message)]
        lease = self._leases.get(request)
        if lease is None:
            return actions
        if lease.sink is not None:
            actions.append(Send(lease.sink, withdrawn(lease.key, cause, message)))
        return [*actions, self._end(lease)]

    def expire(self, now: float) -> list[LeaseAction]:
        """End the leases, and refuse the parked attaches, whose time is over: the request's budget, or the wait for a
        sink."""
        actions: list[LeaseAction] = [*self.parked.expire(now)]
        for lease in [lease for lease in self._leases.values() if self._expiry(lease) <= now]:
            self.num_expired += 1
            where = "were offered to a decode worker" if lease.sink is not None else "were waiting for a decode worker"
            late = lease.deadline <= now
            what = "the request's time ran out" if late else "the lease expired"
            cause = Cause.DEADLINE if late else Cause.LEASE_LOST
            why = "the time of the loan is over" if lease.lent else f"{what} while its blocks {where}"
            actions += self._drop(lease, cause, why)
        return actions

    def reclaim(self, num_blocks: int, unattached_before: float) -> list[LeaseAction]:
        """Under pressure: end complete leases that no sink has been attached to since `unattached_before`, the oldest
        first, until `num_blocks` blocks are free."""
        actions: list[LeaseAction] = []
        freed = 0
        for lease in sorted(self._leases.values(), key=lambda lease: lease.unattached_since):
            if freed >= num_blocks or lease.unattached_since > unattached_before:
                break
            if lease.sink is None and lease.complete:
                freed += len(lease.block_ids)
                self.num_reclaimed += 1
                actions += self._drop(lease, Cause.LEASE_LOST, "reclaimed under pressure before a sink attached")
        return actions

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        epochs = [lease.epoch for lease in self._leases.values()]
        assert len(set(epochs)) == len(epochs), "two leases in one epoch"
        assert all(epoch <= self._epoch for epoch in epochs)
        opened = {request: lease.opened_attempt for request, lease in self._leases.items() if not lease.lent}
        self.parked.check_invariants(opened)
        assert len(self._settled) <= MAX_TOMBSTONES
        assert len(self._lost_readers) <= MAX_LOST_READERS
        for request, lease in self._leases.items():
            assert lease.key.request == request, lease.story
            assert 0 <= lease.num_ready <= len(lease.block_ids), lease.story
            assert lease.lease not in self._settled, lease.story
            assert lease.state is not LeaseState.ENDED, lease.story
            assert (lease.state is LeaseState.OPEN) == (lease.num_ready == 0), lease.story
            assert lease.complete == (lease.first_tokens is not None), lease.story
            assert not lease.complete or lease.num_ready == len(lease.block_ids), lease.story
            assert lease.sink is None or (lease.key, lease.sink) in self._readers, lease.story
            assert not lease.lent or (lease.complete and lease.sink is not None), lease.story

    def _expiry(self, lease: Lease) -> float:
        if lease.sink is not None or not lease.complete:
            return lease.deadline
        return min(lease.deadline, lease.unattached_since + self._unattached_ttl_s)

    def _pin(self, key: RequestKey, block_ids: Sequence[int], deadline: float, now: float) -> Lease:
        assert key.request not in self._leases, f"{key} has a lease: {self._leases[key.request].story}"
        self._epoch += 1
        lease = self._leases[key.request] = Lease(
            key=key,
            opened_attempt=key.attempt,
            lease=new_lease_id(),
            epoch=self._epoch,
            block_ids=tuple(block_ids),
            deadline=deadline,
            unattached_since=now,
            checksums=None if self._checksum is None else [],
            story=[f"open {len(block_ids)} blocks"],
        )
        return lease

    def _ready(self, lease: Lease, num_ready: int, checksums: Sequence[int] = ()) -> None:
        """Blocks up to `num_ready` can be read."""
        new, lease.num_ready = lease.block_ids[lease.num_ready : num_ready], num_ready
        lease.enter(LeaseEvent.READY, f"ready {num_ready}")
        if self._checksum is not None and lease.checksums is not None:
            lease.checksums.extend(checksums or self._checksum(new))
            assert len(lease.checksums) == num_ready, "one checksum for each ready block"

    def _bind(self, lease: Lease, attempt: int, sink: Incarnation) -> list[LeaseAction]:
        actions: list[LeaseAction] = []
        if lease.sink is not None and (lease.sink, lease.key.attempt) != (sink, attempt):
            actions.append(Send(lease.sink, withdrawn(lease.key, Cause.SUPERSEDED, "another sink attached")))
        lease.key = RequestKey(lease.key.request, attempt)
        lease.sink = sink
        self._readers.add((lease.key, sink))
        lease.story.append(f"attached by {sink}, attempt {attempt}")
        actions.append(Send(sink, lease.offer(0)))
        if lease.complete:
            actions.append(Send(sink, lease.done()))
        return actions

    def _keep(self, sink: Incarnation, pulls: Collection[RequestKey], now: float, why: str) -> list[LeaseAction]:
        """End what a sink has here except `pulls`."""
        self._readers -= {reader for reader in self._readers if reader[1] == sink and reader[0] not in pulls}
        self.parked.keep(sink, pulls)
        given_up = [lease for lease in self._leases.values() if lease.sink == sink and lease.key not in pulls]
        return [action for lease in given_up for action in self._unbind(lease, now, why)]

    def _unbind(self, lease: Lease, now: float, why: str) -> list[LeaseAction]:
        if lease.lent:
            return [self._end(lease)]
        lease.sink = None
        lease.unattached_since = now
        lease.story.append(why)
        return []

    def _drop(self, lease: Lease, cause: Cause, message: str) -> list[LeaseAction]:
        actions: list[LeaseAction] = []
        if lease.sink is not None:
            actions.append(Send(lease.sink, withdrawn(lease.key, cause, message)))
        if not lease.lent:
            actions.append(LeaseDropped(lease.key, cause, message))
        return [*actions, self._end(lease)]

    def _end(self, lease: Lease, *, settled: bool = False) -> Unpinned | Released:
        del self._leases[lease.key.request]
        lease.enter(LeaseEvent.END, "settled" if settled else "ended")
        if lease.lent:
            return Released(lease.block_ids)
        self._note_end(lease.key.request, lease.opened_attempt)
        return Unpinned(RequestKey(lease.key.request, lease.opened_attempt), lease.block_ids, settled)

    def _note_end(self, request: RequestId, attempt: int) -> None:
        """Record that the offer of this attempt, if there was one, is over."""
        if attempt > self._ended.get(request, 0):
            self._ended[request] = attempt
            self._ended.move_to_end(request)
            while len(self._ended) > MAX_TOMBSTONES:
                self._ended.popitem(last=False)
