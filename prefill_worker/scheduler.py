"""Decides which prompts get blocks, and which of their tokens the next step computes.

When a request is admitted, it gets every block that its prompt needs. So an admitted prefill never waits for another
request, and the pools cannot deadlock: a decode worker reserves its blocks only after this. Blocks of the prompt's
beginning that the prefix cache has are shared; only the rest is allocated and computed. A prompt is not admitted while
a running one is about to compute blocks that it needs, too: it finds them in the prefix cache afterwards.

Pure state: it takes requests, finished steps and a time, and returns decisions. A decision costs much less than a pass
over all waiting requests.

The life cycle of a request is `prefill_worker.request.PROMPT_TABLE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from common.contract.block_hashes import block_hashes
from common.contract.tiers import Tier, by_tier
from common.engine.block_pool import BlockPool
from common.scheduling.chunked_prefill import Chunk, ChunkQueue, Urgency
from common.scheduling.costs import Costs
from common.scheduling.fair_queue import FairQueue
from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.trials import Trials
from common.scheduling.turns import Passing
from prefill_worker.request import PrefillRequest, PromptEvent, PromptState
from prefill_worker.room import Backlog, Horizon, TierHoldings, worth_waiting_for

LOOK_AHEAD = 16
"""Waiting requests that are tried if the first of them does not fit."""
LONGEST_LOOK = 128
"""Waiting requests that are looked at, with those that are not tried because they wait for other prompts."""
SHARED_STEP_S = 0.1
"""Longest expected duration, in seconds, of a step that several prompts share. Each prompt waits for the end of the
step, and so is delayed by those that came after it; longer steps do not compute faster."""
LEAST_CHUNK_TOKENS = 64
"""Fewest tokens to which measured costs shorten a chunk. On a CPU, chunks of 64 tokens make a prompt take 1.06 to 1.2
times as long as chunks of 512 do, and smaller ones longer."""
STEPS_AHEAD = 2
"""Steps for which prompts are admitted: the next one, and one more, so that leases and pulls begin early."""
_Horizons = Mapping[Tier, tuple[Horizon, Horizon]]
"""Tier → the horizon of prompts that are computed, and that of prompts on hold."""


class PrefillScheduler:
    """Admits waiting prompts and plans steps.

    Order: by tier, then the tenant that has received the least service, then the deadline. Several prompts share a
    step.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        chunk_size: int,
        token_budget: int,
        max_waiting: int,
        ageing_s: float,
        ttft_target_s: Callable[[Tier], float],
        costs: Costs,
        most_samples: int = sys.maxsize,
        expected_pull: Callable[[PrefillRequest, int, float], int] = lambda request, num_here, now: 0,
    ) -> None:
        """A step samples at most `most_samples` first tokens, or those of one prompt. `expected_pull` tells whether a
        prompt is put on hold if it is admitted, as `PrefixPulls.expected` does."""
        self._pool = pool
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._token_budget = token_budget
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._ttft_target_s = ttft_target_s
        self._longest_step_s = min(map(ttft_target_s, Tier)) / 2
        """Longest expected duration of a step. A prompt of any tier may arrive during any step, and waits for its end;
        if the next step is planned already, it waits for that one, too."""
        self._costs = costs
        self._most_samples = most_samples
        self._expected_pull = expected_pull
        self.waiting: FairQueue[PrefillRequest] = FairQueue(ageing_s=ageing_s)
        """Requests without blocks."""
        self.running: ChunkQueue[PrefillRequest] = ChunkQueue(ageing_s=ageing_s)
        """Requests with blocks and tokens to be computed."""
        self.on_hold: dict[PrefillRequest, float] = {}
        """Requests with blocks that wait for a prefix to be pulled → monotonic seconds by which it is expected."""
        self.holdings = TierHoldings(pool.num_blocks)
        self._deadlines: LazyHeap[PrefillRequest] = LazyHeap()
        self._backlog_waiting, self._backlog_running = Backlog(), Backlog()
        self._num_admitted = 0
        self.trials = Trials()
        self.num_prefix_queried = self.num_prefix_hit = 0
        """Tokens of admitted prompts; those of them that the prefix cache had."""

    # --- what others want to know --------------------------------------------------------------------------------

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed, of all requests."""
        return sum(self.queued_tokens)

    @property
    def queued_s(self) -> float:
        """Seconds that computing them is expected to take."""
        return sum(self._costs.prompt_s(*request.uncomputed) for request in self.requests())

    @property
    def queued_tokens(self) -> tuple[int, int, int]:
        """Tokens still to be computed, of the requests of each tier, the most urgent tier first."""
        backlogs = self._backlog_waiting, self._backlog_running
        queued = ((tier, backlog.of(tier)) for backlog in backlogs for tier in Tier)
        held = ((request.tier, request.num_uncomputed) for request in self.on_hold)
        return by_tier((*queued, *held))

    def full(self, num_expected: int = 0) -> bool:
        """Whether a new request must be refused because too many wait. `num_expected` are about to be added."""
        return len(self.waiting) + num_expected >= self._max_waiting

    def requests(self) -> list[PrefillRequest]:
        """Every request: running, on hold and waiting."""
        return [*self.running, *self.on_hold, *self.waiting]

    def blocks_for(self, request: PrefillRequest) -> int:
        """Number of blocks that the request's prompt needs."""
        return -(-len(request.token_ids) // self._block_size)

    # --- the way in ----------------------------------------------------------------------------------------------

    def add(self, request: PrefillRequest) -> None:
        """Enqueue a request, which must fit into the pool."""
        assert self.blocks_for(request) <= self._pool.num_blocks
        request.block_hashes = block_hashes(request.token_ids, self._block_size, request.work.cache_salt)
        request.enter(PromptEvent.ENQUEUE)
        self.trials.add(request.key, request.work.suspicion)
        self._deadlines.add(request, request.deadline)
        self._enqueue(request)

    def blocks_missing(self, now: float) -> int:
        """Number of blocks that must be released before the next waiting request fits; 0 if it fits, or if none waits
        for blocks. Looks up anew what waiting requests lack, as `admit` does."""
        for request, cached in self._in_turn(self._horizons(now), now):
            num_new = self.blocks_for(request) - len(cached)
            if self.holdings.has_room(request.tier, cached, num_new):
                coming = self._pool.num_free + self._pool.num_limbo  # limbo: free when the steps in flight end
                return max(0, num_new + self._pool.num_unreferenced(cached) - coming)
        return 0

    def admit(self, now: float) -> list[PrefillRequest]:
        """Give blocks to waiting requests that fit and that the next steps can compute. The caller pins the blocks of
        each returned request by a lease before the request is done, and reports the lease's end to `holdings`."""
        horizons = self._horizons(now)
        admitted: list[PrefillRequest] = []
        while newly := self._admit_some(horizons, now):
            admitted += newly
        return admitted

    def hold(self, request: PrefillRequest, num_coming: int, expected_by: float) -> None:
        """Compute nothing of `request`, which has just been admitted, until `resume`. A pull is expected to bring what
        lacks of tokens `[0, num_coming)` by `expected_by`. After that time others may be put on hold beside it."""
        assert request in self.running, request.key
        assert not self.running.in_flight(request), request.key
        self._stop(request)
        request.enter(PromptEvent.HOLD)
        request.num_coming = num_coming
        self.on_hold[request] = expected_by

    def resume(self, request: PrefillRequest, num_computed: int, now: float) -> None:
        """Continue a request on hold. Its blocks hold valid KV of tokens `[0, num_computed)`; `num_computed` is a
        multiple of the block size, and at least what it was before. With less to compute it may be due sooner; what a
        pull was expected to bring and has not brought makes it due later, by the time to compute that."""
        assert request.num_computed <= num_computed < len(request.token_ids), (request.key, num_computed)
        assert num_computed % self._block_size == 0, (request.key, num_computed)
        del self.on_hold[request]
        request.enter(PromptEvent.RESUME)
        self._name(request, request.num_computed, num_computed)
        request.num_computed = request.num_cached = num_computed
        rank, due_at_s, number = request.urgency
        end = max(num_computed, request.num_coming)
        due_at_s += self._costs.compute_s(num_computed, end)
        request.num_coming = 0
        request.urgency = min((rank, due_at_s, number), self._urgency(request, now))
        self._num_admitted += 1
        self._compute(request)

    def requeue(self, request: PrefillRequest) -> None:
        """Let a request on hold wait for other blocks, because a read may still write to those that it had."""
        del self.on_hold[request]
        request.enter(PromptEvent.REQUEUE)
        self._release(request)
        self.holdings.end(request.key)
        request.num_computed = 0
        self._enqueue(request)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Chunk[PrefillRequest]]:
        """The next step: chunks of running prompts, in order, within the token budget."""
        permitted = self.trials.permitted(self.running, lambda request: request.key, now)
        chunk_size = self._chunk_tokens()
        num_samples = 0

        def may_end(request: PrefillRequest) -> bool:
            nonlocal num_samples
            num = len(request.work.choices)
            if num_samples and num_samples + num > self._most_samples:
                return False
            num_samples += num
            return True

        chunks = self.running.schedule(self._step_tokens(chunk_size, now), chunk_size, now, permitted, may_end)
        for chunk in chunks:
            if chunk.prompt.started_at is None:
                chunk.prompt.started_at = now
        return chunks

    def _chunk_tokens(self) -> int:
        """Most tokens of a chunk: as many of the first prompt as are expected to take the longest time of a step,
        within the bounds."""
        depth, _ = self.running.next_span
        return self._costs.tokens_within(self._longest_step_s, LEAST_CHUNK_TOKENS, self._chunk_size, depth)

    def _step_tokens(self, chunk_size: int, now: float) -> int:
        """Most tokens of the next step: the first prompt's chunk, and chunks of others up to the end of a prompt with
        which there are enough tokens, or, if a prompt would be late, as long as the step is expected to be short."""
        if not self._costs.prefill_s_per_token:
            return self._token_budget
        start, end = self.running.next_span
        shared_s = min(SHARED_STEP_S, self._longest_step_s)
        shared = self.running.num_within(shared_s, self._costs, chunk_size, self._token_budget)
        if start < end and self._backlog_running.seconds(self._costs) <= self.running.due_at - now:
            shared = min(shared, self.running.num_up_to_end(self._costs.enough_tokens, chunk_size, now))
        return min(self._token_budget, max(shared, min(end - start, chunk_size)))

    def step_done(self, chunks: Sequence[Chunk[PrefillRequest]]) -> list[Chunk[PrefillRequest]]:
        """Account for a finished step; returns its chunks of requests that are still here.

        Blocks that have become full enter the prefix cache, and the tenants are charged. A request whose last chunk is
        done leaves, and drops its own references to its blocks; its lease has others.
        """
        live = self.running.step_done(chunks)
        for chunk in live:
            request = chunk.prompt
            self._backlog_running.change(request, chunk.end, chunk.start)
            self.waiting.charge(request.tier, request.tenant, chunk.end - chunk.start)
            self._name(request, chunk.start, chunk.end)
            if chunk.last:
                request.enter(PromptEvent.COMPUTE)
                self._forget(request)
        return live

    # --- the way out ---------------------------------------------------------------------------------------------

    def expired(self, now: float) -> list[PrefillRequest]:
        """Requests whose budget has ended. Each is returned once; the caller removes it."""
        expired = []
        while (request := self._deadlines.first()) is not None and request.deadline <= now:
            self._deadlines.discard(request)
            expired.append(request)
        return expired

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request that is given up, whatever its state: release its blocks and end its holding, even if its
        lease has not ended yet. Inert if it is not here."""
        self.holdings.end(request.key)
        self._forget(request)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _enqueue(self, request: PrefillRequest) -> None:
        self._look_up(request, request.arrived)
        deadline = self._expected_end(request, self._backlog_waiting, request.arrived)
        self._backlog_waiting.add(request)
        self.waiting.add(request, tier=request.tier, tenant=request.tenant, deadline=deadline, now=request.arrived)

    def _look_up(self, request: PrefillRequest, now: float) -> list[int]:
        """The cached blocks of a request without blocks. Sets what it lacks accordingly."""
        cached = request.cached(self._pool, self._block_size)
        request.num_cached = len(cached) * self._block_size
        request.num_coming = self._expected_pull(request, request.num_cached, now)
        request.length = request.num_uncomputed
        return cached

    def _expected_end(self, request: PrefillRequest, backlog: Backlog, now: float) -> float:
        """Monotonic seconds by which the first token is due: `now`, plus the tier's target, plus the expected seconds
        to compute this prompt and those of its tier that are not longer, after all of higher tiers.

        So a prompt comes before longer ones that could not be done by then. A prompt that shorter ones delay comes
        first in the end, after twice the time at most.
        """
        before_s = backlog.seconds_before(request.tier, request.num_uncomputed, self._costs)
        own_s = self._costs.compute_s(*request.uncomputed)
        return now + self._ttft_target_s(request.tier) + (before_s + own_s)

    def _compute(self, request: PrefillRequest) -> None:
        request.length = request.num_uncomputed
        self._backlog_running.add(request)
        self.running.add(request, request.arrived)

    def _stop(self, request: PrefillRequest) -> None:
        if request in self.running:
            self._backlog_running.remove(request)
            self.running.remove(request)

    def _forget(self, request: PrefillRequest) -> None:
        self.trials.discard(request.key)
        if request in self.waiting:
            self.waiting.discard(request)
            self._backlog_waiting.remove(request)
        self._stop(request)
        self.on_hold.pop(request, None)
        self._deadlines.discard(request)
        self._release(request)

    def _release(self, request: PrefillRequest) -> None:
        self._pool.release(request.block_table)
        request.block_table = []

    def _admit_some(self, horizons: _Horizons, now: float) -> list[PrefillRequest]:
        """Try the next few requests. A request that does not fit lets others pass. A request whose turn it is not yet
        does not count as passed."""
        admitted: list[PrefillRequest] = []
        passing = Passing()
        for request, cached in self._in_turn(horizons, now):
            if not passing.may_go(request.tier.rank):
                continue
            rival_rank = self._rival_rank(request, cached)
            if rival_rank is not None:
                passing.refuse(request, rival_rank)
                continue
            may_hold = request.num_coming > 0
            self._start(request, cached, now)
            admitted.append(request)
            passing.went(request.tier.rank)
            for running, on_hold in horizons.values():
                (on_hold if may_hold else running).add(request)
        return admitted

    def _in_turn(self, horizons: _Horizons, now: float) -> Iterator[tuple[PrefillRequest, list[int]]]:
        """The next waiting requests whose turn has come, with their cached blocks. Each may be admitted at once.

        Not those beyond the horizon of their tier. Nor those that other prompts keep waiting, which do not count as
        tried: they would be put on hold beyond the horizon of those, or a prompt computes blocks that they need.
        """
        num_left = LOOK_AHEAD
        for request in self._first_waiting(now):
            running, on_hold = horizons[request.tier]
            if running.reaches(self._urgency(request, now)):
                self._backlog_waiting.remove(request)
                cached = self._look_up(request, now)
                urgency = self._urgency(request, now)
                num_awaited = self._num_awaited(request, urgency, now)
                waits = num_awaited or (request.num_coming and not on_hold.reaches(urgency))
                request.num_coming = max(request.num_coming, num_awaited)
                request.length = request.num_uncomputed
                self._backlog_waiting.add(request)
                if waits:
                    continue
                yield request, cached
            num_left -= 1
            if not num_left:
                break

    def _first_waiting(self, now: float) -> Iterator[PrefillRequest]:
        """The first waiting requests, in order. Most of them are searched for only if asked for."""
        near = self.waiting.first(now, LOOK_AHEAD)
        yield from near
        yield from (request for request in self.waiting.first(now, LONGEST_LOOK) if request not in near)

    def _num_awaited(self, request: PrefillRequest, urgency: Urgency, now: float) -> int:
        """Leading tokens that are cached once `request` has waited for running prompts of its tier that compute them; 0
        if it waits for none. One that is about to be put on hold does not count. An aged request waits for aged ones
        only: others may have no share of the steps."""
        running = self.running.from_rank(urgency[0]) if self._pool.prefix_cache else ()
        aged_before = now - self._ageing_s
        awaited = (
            num_tokens
            for other, num_tokens in worth_waiting_for(request, urgency, running, self._block_size, self._costs)
            if not request.arrived < aged_before <= other.arrived
            and not self._expected_pull(other, other.num_computed, now)
        )
        return max(awaited, default=0)

    def _rival_rank(self, request: PrefillRequest, cached: Sequence[int]) -> int | None:
        """None if there is room for `request`. Else the lowest rank whose requests take what this one lacks: 0 if
        blocks of the pool are lacking; the request's own rank if its tier has its share, which higher tiers do not
        use."""
        num_new = self.blocks_for(request) - len(cached)
        if num_new > self._pool.num_free or num_new + self._pool.num_unreferenced(cached) > self._pool.num_free:
            return 0
        return None if self.holdings.has_room(request.tier, cached, num_new) else request.tier.rank

    def _start(self, request: PrefillRequest, cached: list[int], now: float) -> None:
        """Give `request` its blocks. There must be room."""
        self.waiting.take(request, now)
        request.enter(PromptEvent.ADMIT)
        self._backlog_waiting.remove(request)
        request.matched = []
        self._pool.share(cached)
        request.block_table = cached + self._pool.allocate(self.blocks_for(request) - len(cached))
        request.num_cached = request.num_computed = len(cached) * self._block_size
        request.urgency = self._urgency(request, now)
        request.num_coming = 0  # until `hold`
        self._num_admitted += 1
        self._compute(request)
        self.holdings.begin(request.key, request.tier, request.block_table)
        if not request.prefix_tried:  # else it was admitted before, and is counted
            self.num_prefix_queried += len(request.token_ids)
            self.num_prefix_hit += request.num_cached

    def _horizons(self, now: float) -> _Horizons:
        """The horizons of each tier that has waiting requests. An aged tier has its share of the steps, whatever higher
        tiers have; another tier has what the higher ones leave."""
        horizons = {}
        on_hold = sorted((each for each, until in self.on_hold.items() if now < until), key=lambda each: each.urgency)
        for tier in Tier:
            if self.waiting.num_in(tier):
                first_rank = tier.rank if self.waiting.aged(tier, now) else 0
                limits = first_rank, STEPS_AHEAD * self._token_budget, self._chunk_size
                horizons[tier] = Horizon(self.running.from_rank(first_rank), *limits), Horizon(on_hold, *limits)
        return horizons

    def _urgency(self, request: PrefillRequest, now: float) -> Urgency:
        """The request's urgency if it is admitted now. It is computed from `now`; time spent queueing gives no
        advantage."""
        return request.tier.rank, self._expected_end(request, self._backlog_running, now), self._num_admitted

    def _name(self, request: PrefillRequest, start: int, end: int) -> None:
        """Enter the blocks that tokens `[start, end)` have filled into the prefix cache."""
        full = slice(start // self._block_size, end // self._block_size)
        self._pool.name(request.block_table[full], request.block_hashes[full])

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.waiting.check_invariants()
        self.running.check_invariants()
        self._deadlines.check_invariants()
        places = self.requests()
        assert len(set(places)) == len(places), "in two places"
        assert self.queued_tokens == by_tier((request.tier, request.num_uncomputed) for request in places)
        self._backlog_waiting.check_invariants(self.waiting)
        self._backlog_running.check_invariants(self.running)
        assert set(self._deadlines) <= set(places)
        assert all(request.state is PromptState.WAITING for request in self.waiting)
        assert all(request.state is PromptState.RUNNING for request in self.running)
        assert all(request.state is PromptState.ON_HOLD for request in self.on_hold)
        for request in places:
            request.check_invariants(self._pool, self._block_size)
        self.holdings.check_invariants({r.key: r.block_table for r in (*self.running, *self.on_hold)})
