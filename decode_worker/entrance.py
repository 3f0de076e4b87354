"""The way into a decode worker's memory: which requests are admitted, and which preempted sequences come back.

A request is admitted by a forecast of the blocks that all sequences will need (`decode_worker.admission`), not by the
worst case. Preempted sequences come back before any request of their tier or a lower one is admitted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.fair_queue import FairQueue
from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import Passing
from decode_worker.admission import Admission, Newcomer, Pressure, quantile_of
from decode_worker.local_prompts import LocalPrompts
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, DecodeRequest, RequestEvent, RequestState, StageEvent
from decode_worker.running_batch import RunningBatch, seniority

_LOOK_AHEAD = 4
"""Waiting requests that are tried if the first of them does not fit."""
AT_ENTRANCE = (RequestState.WAITING, RequestState.RESERVED, RequestState.COMPUTING)
"""States of a request from `Entrance.want` until it begins."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a pull: its blocks, of which the first `num_held` already hold the right KV."""

    request: DecodeRequest
    block_ids: list[int]
    num_held: int


class Entrance:
    """Requests that wait for room, reservations, and preempted sequences that wait for blocks. Pure state."""

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        admission: Admission,
        batch: RunningBatch,
        prompts: LocalPrompts,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._admission = admission
        self._batch = batch
        self._prompts = prompts
        self.waiting: FairQueue[DecodeRequest] = FairQueue(ageing_s=policy.ageing_s)
        self.reserved: dict[DecodeRequest, list[int]] = {}
        """Requests whose pull has not settled → blocks of the pull."""
        self._newest_unread: LazyHeap[DecodeRequest] = LazyHeap()
        """Requests of `reserved` whose pull may not have read yet, the newest of the lowest tier first."""
        self._promised: set[DecodeRequest] = set()
        """Requests of `reserved` for whose sequences, which move here, places in the batch are kept."""
        self.preempted: LazyHeap[DecodeChoice] = LazyHeap()
        self.unmasked: set[DecodeChoice] = set()
        """Sequences whose next mask is not known yet. They are in no step, and do not come back."""
        self._num_orders = 0
        self._pressure: Pressure | None = None
        """What was refused to the highest tier since `reserve` was called last."""
        self._look_again = True
        self._free_when_refused = 0
        self._looked_at = 0
        """The step at which `reserve` last looked at those that wait."""
        self.num_prefix_queried = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.num_prefix_hit = 0
        """Prompt tokens that were found in the prefix cache."""

    # --- waiting -------------------------------------------------------------------------------------------------

    def want(self, request: DecodeRequest, now: float) -> None:
        """The request waits for room: its offer is open, or its prompt is to be computed here."""
        work = request.work
        request.enter(RequestEvent.WANT)
        self.look_up(request)
        num_tokens = 0 if request.pull is not None else len(work.token_ids)
        deadline = self._prompts.due_at(request, 0, num_tokens)
        self.waiting.add(request, tier=work.tier, tenant=work.tenant, deadline=deadline, now=now)
        self._look_again = True

    def look_up(self, request: DecodeRequest) -> list[int]:
        """The leading blocks of the request's tokens that the prefix cache has, and may be used; their tokens are
        noted."""
        request.chain.extend(request.work.token_ids, len(request.work.token_ids))
        held = self._pool.match(request.chain.hashes[: self._num_usable(request)])
        request.num_cached = len(held) * self._policy.block_size
        return held

    def want_again(self, request: DecodeRequest) -> None:
        """The request, which had room, waits again."""
        request.sent_back = True
        self.want(request, request.arrived)

    def stand_by(self, choice: DecodeChoice, now: float) -> None:
        """A sequence without blocks waits for some."""
        choice.enter(StageEvent.PREEMPT)
        choice.preempted_at, choice.num_passed = now, 0
        choice.paused(now)
        self.preempted.add(choice, seniority(choice))
        self._look_again = True

    def mask_awaited(self, choice: DecodeChoice) -> None:
        """The sequence's next mask is not known yet: until it is, the sequence is in no step, and is not resumed."""
        self.unmasked.add(choice)

    def mask_known(self, choice: DecodeChoice) -> None:
        """The sequence's next mask is known, or not needed any more."""
        self.unmasked.discard(choice)
        if choice in self.preempted:
            self._look_again = True

    def look_again(self) -> None:
        """Who was refused may have room now, although no block has become free."""
        self._look_again = True

    def requests(self) -> set[DecodeRequest]:
        """The requests that have come in and have not begun: those in a state of `AT_ENTRANCE`."""
        return {*self.waiting, *self.reserved, *self._prompts.of_requests}

    def forget(self, request: DecodeRequest) -> list[int]:
        """Remove a request that has not begun, whatever its state. Returns the blocks of its reservation, if it has
        one: the owner of the pull releases them."""
        self.waiting.discard(request)
        self._newest_unread.discard(request)
        self._promised.discard(request)
        self._look_again = True
        reserved = self.reserved.pop(request, [])
        prompt = self._prompts.take(request)
        if prompt is not None:
            self._pool.release(prompt.block_table)
        if reserved or prompt is not None:
            self._pool.release(request.fork_blocks)
            request.fork_blocks = []
            for index in request.work.choices:
                self._admission.leave((request, index))
        return reserved

    def settled(self, request: DecodeRequest) -> None:
        """The reserved blocks hold valid KV: they are the request's."""
        del self.reserved[request]
        self._newest_unread.discard(request)
        self._promised.discard(request)

    def promise_place(self, request: DecodeRequest) -> bool:
        """Whether the sequence of `request`, which moves here and has its blocks, will have a place in the batch when
        it begins. If so, the place is kept: until the pull has settled, no more sequences are let in than can run."""
        rank = request.work.tier.rank
        if not self._admission.has_places_at_once(rank, self._batch.num_kept_from(rank)):
            return False
        self._promised.add(request)
        return True

    @property
    def has_pressure(self) -> bool:
        """Whether lower tiers must make room for a waiting request when the next step is planned."""
        return self._pressure is not None

    def take_pressure(self) -> Pressure | None:
        """The room that lower tiers must make for a waiting request; it is returned once."""
        pressure, self._pressure = self._pressure, None
        return pressure

    def num_lacking(self, pressure: Pressure, freed: int = 0, ending: int = 0) -> int:
        """Blocks that are lacking still, now or later, if `freed` and `ending` become free when this step has ended."""
        return self._admission.num_lacking(self._batch.step, pressure, freed=freed, ending=ending)

    @property
    def can_relieve(self) -> bool:
        """Whether reservations of lower tiers can give, without a step, blocks that a waiting request lacks."""
        if self._pressure is None:
            return False
        rank = self._pressure.rank
        return any(request.work.tier.rank > rank and not request.gave_way for request in self.unread())

    def unread(self) -> list[DecodeRequest]:
        """Requests whose reservations can be taken back, because nothing was read into them."""
        return [request for request in self._newest_unread if _unread(request)]

    def newest_unread(self) -> DecodeRequest | None:
        """The newest request of the lowest tier among those that `unread` returns; None if there is none."""
        while (unread := self._newest_unread.first()) is not None and not _unread(unread):
            self._newest_unread.discard(unread)
        return unread

    # --- letting in ----------------------------------------------------------------------------------------------

    def reserve(self, now: float) -> list[Reservation]:
        """Admit what fits, by tier; of a tier, preempted sequences before waiting requests. Returns reservations of
        requests that may pull."""
        unchanged = not self._look_again and self._pool.num_free <= self._free_when_refused
        if unchanged and not self._forecast_is_old and not self._waited_long(self._next_preempted(), now):
            self._free_when_refused = self._pool.num_free
            return []
        self._pressure = None
        granted: list[Reservation] = []
        while self._let_one_in(now, granted):
            pass
        self._look_again = False
        self._free_when_refused = self._pool.num_free
        self._looked_at = self._batch.step
        return granted

    @property
    def _forecast_is_old(self) -> bool:
        """Whether somebody waits who was refused at least a block's worth of steps ago. The forecast falls as present
        sequences near their ends."""
        waits = len(self.waiting) > 0 or len(self.preempted) > 0
        return waits and self._batch.step - self._looked_at >= self._policy.block_size

    def _let_one_in(self, now: float, granted: list[Reservation]) -> bool:
        """Admit or resume the next request or sequence that may; returns whether there was one. Requests of higher
        tiers pass a preempted sequence that has waited beyond the ageing time only as often as one that does not
        fit."""
        back = self._next_preempted()
        passing, any_refused = Passing(), False
        waited_long = self._waited_long(back, now)
        if back is not None and waited_long:
            passing.refuse(back)
        for request in self._candidates(now, len(Tier) if back is None else back.request.work.tier.rank):
            rank = request.work.tier.rank
            if not passing.may_go(rank):
                break
            if self._admit(request, now, granted):
                passing.went(rank)
                return True
            passing.refuse(request)
            any_refused = True
        # Blocks that a request of a higher tier waits for go to a lower tier only if that has waited long.
        return back is not None and (waited_long or not any_refused) and self._resume(back, now)

    def _waited_long(self, preempted: DecodeChoice | None, now: float) -> bool:
        return preempted is not None and now - preempted.preempted_at > self._policy.ageing_s

    def _candidates(self, now: float, least_rank: int) -> Iterator[DecodeRequest]:
        """Waiting requests of a rank below `least_rank`: the first one, and some more in case it does not fit."""
        first = self.waiting.first(now)
        yield from (request for request in first if request.work.tier.rank < least_rank)
        if len(self.waiting) < 2:
            return
        for request in self.waiting.first(now, _LOOK_AHEAD):
            if request not in first and request.work.tier.rank < least_rank:
                yield request

    def _admit(self, request: DecodeRequest, now: float, granted: list[Reservation]) -> bool:
        work = request.work
        num_tokens, size = len(work.token_ids), self._policy.block_size
        held = self.look_up(request)
        # If even an empty pool has too few blocks for all forks, those without a block begin preempted.
        num_spare = self._pool.num_blocks - self._policy.blocks_for(num_tokens)
        num_forks = min(len(work.choices) - 1, num_spare) if num_tokens % size else 0
        num_new = self._policy.blocks_for(num_tokens) - len(held) + num_forks
        order = self._num_orders
        steps = [
            self._admission.steps_left(work, num_tokens + 1, quantile_of(order + index))
            for index in range(len(work.choices))
        ]
        # If the prompt's last block is not full, each choice that begins with blocks has its own. Others are shared:
        # they are free once the last of these choices has ended.
        private = [num_new - num_forks, *(int(index < num_forks) for index in range(len(work.choices) - 1))]
        num_begin = 1 + num_forks if num_tokens % size else len(work.choices)
        last = max(range(num_begin), key=steps.__getitem__)
        private[0], private[last] = private[last], private[0]
        newcomers = list(zip(steps, private, strict=True))
        if not self._has_room(work.tier.rank, num_new, held, newcomers, at_once=work.moving):
            return False
        self.waiting.take(request, now)
        self._num_orders += len(work.choices)
        request.order = order
        self._pool.share(held)
        blocks = held + self._pool.allocate(num_new - num_forks)
        request.fork_blocks = self._pool.allocate(num_forks)
        for index, newcomer in zip(work.choices, newcomers, strict=True):
            self._admission.enter((request, index), newcomer)
        if not (request.sent_back or work.moving):  # a sequence that moves has its tokens from its source
            self.num_prefix_queried += num_tokens
            self.num_prefix_hit += len(held) * size
        if request.pull is not None:
            request.enter(RequestEvent.RESERVE)
            self.reserved[request] = blocks
            if not work.moving:
                self._newest_unread.add(request, (-work.tier.rank, -order))
            granted.append(Reservation(request, blocks, len(held)))
        else:
            request.enter(RequestEvent.COMPUTE)
            self._prompts.add(request, None, work.token_ids, request.num_cached, blocks, now)
        return True

    def _num_usable(self, request: DecodeRequest) -> int:
        """Leading blocks of the request's tokens that may come from the prefix cache. A prompt that is computed here
        always computes its last token, for its logits; and every token if all are to be scored."""
        if request.work.prompt_logprobs is not None:
            return 0
        return (len(request.work.token_ids) - (request.pull is None)) // self._policy.block_size

    def match_again(self) -> None:
        """A step has computed chunks of prompts. Other prompts that are computed here, and begin like one of these, get
        its blocks for tokens that they have not computed, and release their own. A step in flight has no chunks
        (`may_run_ahead`), so nothing is written to these."""
        size = self._policy.block_size
        for request, prompt in self._prompts.of_requests.items():
            start, names = prompt.num_computed // size, request.chain.hashes
            found = self._pool.match(names[index] for index in range(start, self._num_usable(request)))
            if not found:
                continue
            end, table = start + len(found), prompt.block_table
            self._pool.share(found)
            self._pool.release(table[start:end])
            num_found = end * size - prompt.num_computed
            request.num_cached += num_found
            self.num_prefix_hit += 0 if request.sent_back else num_found
            self._prompts.found(prompt, [*table[:start], *found, *table[end:]], end * size)
            self._admission.found(request, len(found))

    def _next_preempted(self) -> DecodeChoice | None:
        """The preempted sequence that comes back first. Its mask must be known, because the last chunk may sample a
        token."""
        first = self.preempted.smallest(1 + len(self.unmasked))
        return next((choice for choice in first if choice not in self.unmasked), None)

    def _resume(self, choice: DecodeChoice, now: float) -> bool:
        """Give a preempted sequence blocks again."""
        sequence, work = choice.sequence, choice.request.work
        swapped = bool(choice.host_slots)
        usable = sequence.num_computed if swapped else sequence.num_tokens - 1
        held = self._pool.match(choice.chain.hashes[: usable // self._policy.block_size])
        num_new = self._policy.blocks_for(sequence.num_tokens) - len(held)
        newcomer = self._admission.steps_left(work, sequence.num_tokens, choice.quantile), num_new
        if not self._has_room(work.tier.rank, num_new, held, [newcomer]):
            return False
        self.preempted.discard(choice)
        self._pool.share(held)
        sequence.block_table = array("q", held + self._pool.allocate(num_new))
        self._admission.enter(choice.key, newcomer)
        if swapped:
            choice.num_kept = len(held)
            self._batch.add(choice, now)
        else:
            sequence.num_computed = len(held) * self._policy.block_size
            choice.enter(StageEvent.RECOMPUTE)
            self._prompts.add(
                choice.request,
                choice,
                list(sequence.token_ids),
                sequence.num_computed,
                sequence.block_table,
                choice.request.arrived,
            )
        return True

    def _has_room(
        self, rank: int, num_new: int, held: Sequence[int], newcomers: Sequence[Newcomer], *, at_once: bool = False
    ) -> bool:
        """Whether `num_new` blocks, beside the cached blocks `held`, can be given away now without any sequence lacking
        blocks later, and places are left: in the batch if the newcomers must run `at_once`, or a place is promised. If
        lower tiers hold blocks, it is noted that they must make room."""
        at_once = at_once or bool(self._promised)
        num_places = len(newcomers) + (self._batch.num_kept_from(rank) if at_once else 0)
        has_places = self._admission.has_places_at_once if at_once else self._admission.has_places
        if not has_places(rank, num_places):
            return False
        asked = Pressure(rank, num_new, held, self._batch.num_due_next + self._batch.num_ready, newcomers)
        has_room = self.num_lacking(asked) <= 0
        if not has_room and self._admission.any_below(rank) and (self._pressure is None or rank < self._pressure.rank):
            self._pressure = asked
        return has_room

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.waiting.check_invariants()
        assert all(request.state is RequestState.WAITING for request in self.waiting)
        assert all(request.state is RequestState.RESERVED for request in self.reserved)
        unread = {request for request in self.reserved if _unread(request) and not request.work.moving}
        assert unread <= set(self._newest_unread) <= self.reserved.keys()
        assert self._promised <= {request for request in self.reserved if request.work.moving}


def _unread(request: DecodeRequest) -> bool:
    return request.pull is not None and request.pull.revocable
