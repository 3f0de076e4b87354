"""Live migration: a running sequence moves from one decode worker to another by the pull protocol, in two stages.

    sink                                             source (draining)
      │ AttachPrefix (names of full blocks) ───────────►│ goes on generating
      │◄────────────────────────── BlocksReady ─────────│
      │ READ, Settle, Settled                           │ goes on generating
      │ AttachSequence (what it has of the tokens) ────►│ the step in flight ends; the sequence is cut
      │◄── BlocksReady (all), PrefillDone (the rest) ───│ Cut to the gateway
      │ READ of the last blocks, Settle ───────────────►│
      │◄────────────────────────── Settled(valid) ──────│ Moved to the gateway; the blocks are free
      │ the next step has the sequence                  │

The first stage copies while the sequence runs, so the amount left for the second stage, and with it the pause, does not
grow with the sequence (Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024, section
4.2). The first stage names blocks by their contents, as any pull of a cached prefix does. A source without a prefix
cache has none by that name: the second stage then reads everything, and the pause does grow with the sequence.

The first stage may fail otherwise, or bring only a beginning: the source has lent too many prefixes already, a read
fails, or the source has named only some of the blocks. If the second stage would then read more than `MAX_TAIL_BLOCKS`
blocks that the sink lacks, the move fails before the source is asked to cut the sequence, and the gateway begins
another one later.

The first stage may take so long that the sequence has run far ahead of it: many sequences move at once, or the sink's
machine is busy. Then the source does not cut the sequence (`MAX_TAIL_BLOCKS`, `MAX_PUT_OFF`). The move fails, and the
gateway begins another one. That move reads only the new blocks ahead: the sink's prefix cache has the others.

If the sequence has a grammar, the sink reads the tokens that it knows within the grammar while blocks are read. Once
the second stage has settled, only the later tokens are left to read before the sequence can have its next one.

A sequence that is cut stands still until the sink's batch has it. So the sink takes it only if it has a place in the
batch, not just room to wait for one. It asks for the place before the first stage, and again before the second, since
others may have come in; from then on it keeps the place until the pull has settled. Without one the move fails, and
the source goes on.

The source never continues a sequence that it has cut. If the sink fails, the gateway begins another attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey, new_request_id
from common.contract.messages.fields import MAX_PREFIX_BLOCKS, MAX_TOLD_TOKENS, Message
from common.contract.messages.gateway import Decode
from common.contract.messages.handoff import AttachPrefix, AttachSequence
from common.contract.messages.worker import Cut, Moved, Tokens
from common.engine.block_pool import BlockPool
from decode_worker.entrance import Reservation
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.events import Consequence, PullFailed
from kv_transfer.lease import withdrawn
from kv_transfer.lender import Lender
from kv_transfer.pull import Pull
from kv_transfer.pulls import Pulls

MAX_TAIL_BLOCKS = 4
"""Largest lead of a sequence over the tokens that its sink knows, in blocks' worth of tokens, at which it is cut. Also
the most blocks of those tokens that the second stage reads because the first one has not brought them."""
MAX_PUT_OFF = 3
"""Times that a sequence is not cut because of its lead. After that it is cut anyway: the sink is too slow to catch
up."""


@dataclass(eq=False)
class Departures:
    """Sequences that other workers want to continue. Each keeps its blocks until a sink has proved that it has them."""

    _scheduler: DecodeScheduler
    _pool: BlockPool
    _lender: Lender
    _send: Callable[[Incarnation, Message], None]
    _block_size: int
    _wanted: dict[DecodeChoice, AttachSequence] = field(init=False, default_factory=dict)
    """Sequences that are cut when the step in flight has ended."""
    _cut: dict[RequestKey, DecodeChoice] = field(init=False, default_factory=dict)
    """Sequences that were cut, by the key of the sink's pull."""
    num_moved: int = field(init=False, default=0)
    """Sequences that other workers have continued."""

    @property
    def awaited(self) -> bool:
        """Whether sequences are to be cut as soon as no step is in flight."""
        return bool(self._wanted)

    def attach(self, sink: Incarnation, message: AttachSequence, choice: DecodeChoice | None) -> None:
        """A sink asks for a sequence, or asks again after messages were lost. `choice` is the sequence, or None if
        it is not here."""
        if message.key in self._cut or message in self._wanted.values():
            self._lender.on_message(sink, message)
            return
        if self._lender.has_settled(message.key, sink):
            return  # the sink has the sequence; its Settle follows
        if (
            choice is None
            or choice.stage is not ChoiceStage.RUNNING
            or not choice.first_position <= message.position < choice.sequence.num_tokens
        ):
            self._send(sink, withdrawn(message.key, Cause.LEASE_LOST, "this sequence does not run here"))
            return
        if not self._may_take(message, choice):
            self._send(sink, withdrawn(message.key, Cause.SUPERSEDED, "this name is another's, or a newer attempt's"))
            return
        if self._has_run_ahead(message, choice):
            choice.num_put_off += 1
            self._send(sink, withdrawn(message.key, Cause.LEASE_LOST, "the sequence has run ahead of what was read"))
            return
        before = self._wanted.get(choice)
        if before is not None and before.request != message.request:
            self._lender.withdraw(before.request, Cause.SUPERSEDED, "the sequence moves to another worker")
        self._lender.expect(message.key, choice.request.deadline)
        self._lender.on_message(sink, message)
        self._wanted[choice] = message

    def _may_take(self, message: AttachSequence, choice: DecodeChoice) -> bool:
        """Whether no other sink has the lease on this request, or is about to get it. There is one lease under each
        request id."""
        others = [key for key in self._cut if key.request == message.request]
        others += [
            wanted.key
            for other, wanted in self._wanted.items()
            if wanted.request == message.request and (other is not choice or wanted.attempt > message.attempt)
        ]
        return not others

    def _has_run_ahead(self, message: AttachSequence, choice: DecodeChoice) -> bool:
        """Whether the sink should read ahead once more, because the sequence has got too many tokens since the position
        up to which the sink has read ahead."""
        num_ahead = choice.sequence.num_tokens - message.position
        return num_ahead > MAX_TAIL_BLOCKS * self._block_size and choice.num_put_off < MAX_PUT_OFF

    def cut(self) -> None:
        """Stop the wanted sequences and offer their blocks. No step may be in flight."""
        wanted, self._wanted = self._wanted, {}
        for choice, message in wanted.items():
            if choice.stage is not ChoiceStage.RUNNING or not self._lender.awaits(message.key):
                self._lender.withdraw(message.request, Cause.LEASE_LOST, "the sequence does not run any more")
                continue
            if choice.sequence.num_tokens - message.position > MAX_TOLD_TOKENS:
                self._lender.withdraw(message.request, Cause.LEASE_LOST, "the sequence has run too far meanwhile")
                continue
            request = choice.request
            blocks = self._scheduler.sequences.leave(choice)
            self._cut[message.key] = choice
            self._tell_cut(choice)
            self._lender.open(message.key, blocks, request.deadline)
            self._lender.blocks_ready(message.request, len(blocks))
            self._lender.complete(message.request, [choice.tokens(message.position)])

    def unpinned(self, key: RequestKey, block_ids: Sequence[int]) -> DecodeChoice | None:
        """The lease on a sequence has ended. Returns the sequence if its request is still open here."""
        self._pool.release(block_ids)
        return self._cut.pop(key, None)

    def leave(self, choice: DecodeChoice, *, settled: bool) -> None:
        """A sequence that was cut is nothing of this worker's any more: another worker continues it (`settled`), or it
        is given up, and the gateway begins it again."""
        choice.moved = True
        self.num_moved += settled
        self._tell_moved(choice)

    def tell_again(self, choice: DecodeChoice) -> None:
        """Repeat to a gateway that lost messages that a sequence was cut, or has moved."""
        if choice.moved:
            self._tell_moved(choice)
        elif choice in self._cut.values():
            self._tell_cut(choice)

    def _tell_cut(self, choice: DecodeChoice) -> None:
        request, sequence = choice.request, choice.sequence
        request_id, attempt = request.key
        cut = Cut(request=request_id, attempt=attempt, choice=sequence.choice, position=sequence.num_tokens)
        self._send(request.gateway, cut)

    def _tell_moved(self, choice: DecodeChoice) -> None:
        request_id, attempt = choice.request.key
        moved = Moved(request=request_id, attempt=attempt, choice=choice.sequence.choice)
        self._send(choice.request.gateway, moved)

    def give_up(self, choice: DecodeChoice) -> None:
        """Nobody needs a sequence any more that was cut: withdraw its lease."""
        for key in [key for key, cut in self._cut.items() if cut is choice]:
            self._lender.withdraw(key.request, Cause.LEASE_LOST, "the gateway needs no more of the sequence from here")

    def forget(self, request: DecodeRequest) -> None:
        """The request has ended here: withdraw the leases on its sequences."""
        for choice in request.choices:
            message = self._wanted.pop(choice, None)
            if message is not None:
                self._lender.withdraw(message.request, Cause.LEASE_LOST, "the sequence has ended")
        for key in [key for key, choice in self._cut.items() if choice.request is request]:
            del self._cut[key]
            self._lender.withdraw(key.request, Cause.LEASE_LOST, "the request is over")


@dataclass(slots=True, eq=False)
class _Arrival:
    request: DecodeRequest
    block_ids: list[int]
    num_held: int
    ahead: Pull | None = None
    """The pull of the first stage while it is under way."""

    @property
    def num_lacking(self) -> int:
        """Blocks with the KV of known tokens that this worker does not have."""
        return len(self.block_ids) - self.num_held


@dataclass(eq=False)
class Arrivals:
    """Sequences that move to this worker. Blocks are reserved before the source is asked for anything, and a place in
    the batch before it is asked to cut the sequence."""

    _scheduler: DecodeScheduler
    _pool: BlockPool
    _pulls: Pulls
    _emit: Callable[[Consequence], None]
    _policy: Policy
    _vocab_size: int
    _arrivals: dict[DecodeRequest, _Arrival] = field(init=False, default_factory=dict)
    """Moves until the second stage owns the blocks."""
    num_tail_blocks: int = field(init=False, default=0)
    """Blocks that were read while their sequences stood still."""

    def __contains__(self, request: DecodeRequest) -> bool:
        return request in self._arrivals

    def begin(self, reservation: Reservation) -> None:
        """Room is reserved: read ahead the blocks that the source has of the sequence now."""
        request = reservation.request
        arrival = self._arrivals[request] = _Arrival(request, reservation.block_ids, reservation.num_held)
        num_full = len(request.work.token_ids) // self._policy.block_size
        names = request.chain.hashes[: min(num_full, MAX_PREFIX_BLOCKS)]
        if len(names) <= reservation.num_held:
            self._attach(arrival)
            return
        assert request.work.source is not None
        wanted = AttachPrefix(request=new_request_id(), attempt=1, block_hashes=tuple(names))
        arrival.ahead = Pull(request.work.source, wanted)
        self._pulls.begin(arrival.ahead)

    def reads_ahead(self, pull: Pull) -> bool:
        """Whether this pull is the first stage of a move."""
        return self._of(pull) is not None

    def offered_ahead(self, ahead: Pull, num_blocks: int) -> None:
        """The source offers blocks of the first stage."""
        arrival = self._of(ahead)
        assert arrival is not None
        if num_blocks <= arrival.num_held:
            self._pulls.abandon(ahead, Cause.CAPACITY, "the source lends no more than this worker has")
            return
        blocks = arrival.block_ids[:num_blocks]
        self._pool.share(blocks)
        self._pulls.reserve(ahead, blocks, arrival.num_held)

    def pulled_ahead(self, ahead: Pull, block_ids: Sequence[int]) -> None:
        """The first stage has ended with valid blocks. The move fails if the source has lent fewer than it was asked
        for, and this worker still lacks more than `MAX_TAIL_BLOCKS`."""
        arrival = self._of(ahead)
        assert arrival is not None
        assert ahead.block_hashes is not None
        arrival.ahead, arrival.num_held = None, len(block_ids)
        arrival.request.ahead = ahead.times
        self._pool.name(block_ids, arrival.request.chain.hashes[: len(block_ids)])  # in case the second stage fails
        self._pool.release(block_ids)
        if len(block_ids) < len(ahead.block_hashes) and arrival.num_lacking > MAX_TAIL_BLOCKS:
            self._fail(arrival, Cause.LEASE_LOST, "the source lends only a beginning of the sequence now")
        else:
            self._attach(arrival)

    def gave_up_ahead(self, ahead: Pull, cause: Cause | None, why: str) -> None:
        """The first stage has failed, or was abandoned, for `cause`. Begins the second stage, or fails the move.

        The move fails if a read may still write to the blocks. It also fails if this worker lacks more than
        `MAX_TAIL_BLOCKS`, unless the source has nothing to lend (`LEASE_LOST` without an offer): it has no prefix
        cache, so a later move could not read them ahead either. What has become of the source keeps its cause, and a
        source that cannot lend so much now is no failure of this worker: it is not blamed for either.
        """
        arrival = self._of(ahead)
        assert arrival is not None
        arrival.ahead = None
        lends_nothing = cause is Cause.LEASE_LOST and ahead.num_blocks is None
        if not ahead.quarantined and (arrival.num_lacking <= MAX_TAIL_BLOCKS or lends_nothing):
            self._attach(arrival)
            return
        if cause not in (Cause.WORKER_LOST, Cause.FINGERPRINT):
            cause = Cause.LEASE_LOST if cause is Cause.CAPACITY else Cause.TRANSFER
        self._fail(arrival, cause, f"reading ahead failed: {why}")

    def offered(self, request: DecodeRequest, num_blocks: int) -> None:
        """The sequence was cut and is offered: read the blocks that are not here."""
        arrival = self._arrivals[request]
        assert request.pull is not None
        blocks = arrival.block_ids
        num_more = num_blocks - len(blocks)
        if num_more < 0:
            self._pulls.abandon(request.pull, Cause.TRANSFER, "the source offers less of the sequence than it had")
        elif num_more > self._pool.num_free:
            self._pulls.abandon(request.pull, Cause.CAPACITY, "the sequence has outgrown the room for it")
        else:
            del self._arrivals[request]
            self.num_tail_blocks += num_blocks - arrival.num_held
            self._pulls.reserve(request.pull, blocks + self._pool.allocate(num_more), arrival.num_held)

    def forget(self, request: DecodeRequest) -> None:
        """The request has ended: release the blocks that the second stage has not taken over."""
        arrival = self._arrivals.pop(request, None)
        if arrival is not None:
            if arrival.ahead is not None:
                self._pulls.abandon(arrival.ahead, None, "the request is over")
            self._pool.release(arrival.block_ids)

    def _attach(self, arrival: _Arrival) -> None:
        """Begin the second stage, if the sequence will have a place in the batch: others may have taken it during the
        first one."""
        pull = arrival.request.pull
        assert pull is not None
        if not self._scheduler.entrance.promise_place(arrival.request):
            self._fail(arrival, Cause.CAPACITY, "the batch has become full; where the sequence is, it can go on")
            return
        self._pulls.begin(pull, partial(self._goes_on, arrival.request))

    def _fail(self, arrival: _Arrival, cause: Cause, why: str) -> None:
        """Give the move up between its stages. Nothing was asked of the source that would have to be withdrawn."""
        assert arrival.request.pull is not None
        self._emit(PullFailed(arrival.request.pull, cause, why))

    def _goes_on(self, request: DecodeRequest, tokens: Sequence[Tokens]) -> bool:
        """Whether the sequence can go on here from the `tokens` that the source tells of."""
        assert request.pull is not None
        return goes_on(tokens, request.work, self._policy, self._vocab_size, request.pull.num_blocks)

    def _of(self, ahead: Pull) -> _Arrival | None:
        return next((arrival for arrival in self._arrivals.values() if arrival.ahead is ahead), None)


def pull_of(work: Decode) -> Pull:
    """The pull of the second stage, for a sequence whose tokens `work.token_ids` are known here."""
    assert work.source is not None
    assert work.offered is not None
    wanted = AttachSequence(
        request=work.request,
        attempt=work.attempt,
        sequence=work.offered,
        choice=work.choices[0],
        position=len(work.token_ids),
    )
    return Pull(work.source, wanted)


def known(tokens: Tokens, vocab_size: int) -> bool:
    """Whether a source has told of tokens of the model only: the engine cannot compute others."""
    return all(token < vocab_size for token in tokens.token_ids)


def first_tokens_fit(tokens: Sequence[Tokens], work: Decode, vocab_size: int) -> bool:
    """Whether `tokens` are first tokens for `work`: one for each of its choices, at the right position."""
    return tuple(first.choice for first in tokens) == work.choices and all(
        known(first, vocab_size)
        and (first.position, len(first.token_ids)) == (len(work.token_ids), 1)
        and (first.logprobs is None) == (work.sampling.logprobs is None)
        for first in tokens
    )


def goes_on(tokens: Sequence[Tokens], work: Decode, policy: Policy, vocab_size: int, num_blocks: int | None) -> bool:
    """Whether `tokens` are those that a cut sequence has beyond `work.token_ids`, with at least the one that has no KV
    yet. The sequence must be shorter than its limit, at which it would have ended. Its KV must take the `num_blocks` of
    the offer, unless that is not known (None) because messages were lost."""
    if len(tokens) != 1:
        return False
    [said] = tokens
    num_tokens = len(work.token_ids) + len(said.token_ids)
    return (
        known(said, vocab_size)
        and (said.choice, said.position, said.finish_reason) == (work.choices[0], len(work.token_ids), None)
        and (said.logprobs is None) == (work.sampling.logprobs is None)
        and num_tokens < min(work.prompt_len + work.sampling.max_tokens, policy.max_sequence_tokens)
        and num_blocks in (None, policy.blocks_for(num_tokens - 1))
    )
