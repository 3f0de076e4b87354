"""Continuous batching under memory pressure: decides which sequences run, which requests are admitted, and which
sequences give up their blocks.

Every step computes one token of every running sequence. Sequences that end leave at once; sequences whose KV is valid
join at the next step. A request is admitted by a forecast of the blocks that all sequences will need, not by the worst
case, so the cache is kept full. If the forecast was wrong, the newest sequence of the lowest tier gives up its blocks:
they are swapped to host memory, or dropped and computed again, whichever costs less time. It comes back before another
request of its tier is admitted. A reservation of which nothing was read yet is taken back in the same way.

Pure state: it takes requests, finished steps and a time, and returns decisions. A step's cost depends on what changed,
not on how many sequences run.

The life cycles of requests and of their choices are `REQUEST_TABLE` and `STAGE_TABLE` in `decode_worker.request`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.contract.block_hashes import BlockHash
from common.contract.messages import Decode, Tokens
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.engine.chunked_prefill import Chunk, ChunkQueue
from common.engine.costs import Costs
from common.engine.fair_queue import FairQueue
from common.engine.lazy_heap import LazyHeap
from common.engine.sequence import Sequence
from common.engine.trials import Trials
from decode_worker.admission import Admission, Newcomer, rank_of
from decode_worker.policy import Policy
from decode_worker.request import (
    DecodeRequest,
    Generation,
    LocalPrompt,
    RequestEvent,
    RequestState,
    Stage,
    StageEvent,
)
from decode_worker.running_batch import RunningBatch, Seniority, seniority
from decode_worker.step import Step

_LOOK_AHEAD = 4
"""Waiting requests that are tried if the first of them does not fit."""
_MAX_PASSED = 16
"""Number of later requests that may be admitted before a waiting request that does not fit. After that, none may. The
same holds for a preempted sequence that has waited beyond the ageing time, and requests of higher tiers."""
_OUTPUT_CHARGE = 2.0
"""Service of an output token; a computed prompt token counts 1 (VTC, section 3)."""


PLACES = (RequestState.WAITING, RequestState.RESERVED, RequestState.COMPUTING)
"""States in which the scheduler has a request that has not begun."""
Holder = Generation | LocalPrompt | DecodeRequest
"""A holder of blocks that can be taken: a sequence, a prompt computed here, a request whose pull has read nothing."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a pull: its blocks, of which the first `num_held` already hold the right KV."""

    request: DecodeRequest
    block_ids: list[int]
    num_held: int


class DecodeScheduler:
    """Admits requests, plans steps and preempts, for one decode worker."""

    def __init__(self, pool: BlockPool, policy: Policy, costs: Costs) -> None:
        self._pool = pool
        self._policy = policy
        self._costs = costs
        self._block_size = policy.block_size
        self._waiting: FairQueue[DecodeRequest] = FairQueue(ageing_s=policy.ageing_s)
        self._reserved: dict[DecodeRequest, list[int]] = {}
        """Requests whose pull has not settled → blocks of the pull."""
        self._newest_unread: LazyHeap[DecodeRequest] = LazyHeap()
        """Requests of `_reserved` whose pull may not have read yet, the newest of the lowest tier first."""
        self._prompts: dict[DecodeRequest, LocalPrompt] = {}
        """Requests whose prompt is being computed here."""
        self._recomputing: dict[Generation, LocalPrompt] = {}
        self._chunks: ChunkQueue[LocalPrompt] = ChunkQueue(ageing_s=policy.ageing_s)
        self._batch = RunningBatch(policy.max_num_seqs, policy.block_size, policy.ageing_s)
        self.trials = Trials()
        self._preempted: LazyHeap[Generation] = LazyHeap()
        self._newest_prompts: LazyHeap[LocalPrompt] = LazyHeap()
        """Prompts and preempted sequences that are being computed here, the newest of the lowest tier first."""
        self._admission = Admission(pool, policy)
        self._num_orders = 0
        self._copies: list[tuple[int, int]] = []
        """Block copies, for forks, that the next step must make first."""
        self._awaited: set[Generation] = set()
        """Sequences whose next mask is not known yet. They are in no step."""
        self._arriving: set[Generation] = set()
        """Sequences whose blocks are being swapped in by the last step that was scheduled."""
        self._host_free = list(range(policy.num_host_blocks))
        self._pressure: tuple[int, int] | None = None
        """(rank, blocks): blocks that a request of this rank lacks, and that lower tiers must give up."""
        self._look_again = True
        self._free_when_refused = 0
        self.num_swapped = 0
        """Preemptions by swap."""
        self.num_recomputed = 0
        """Preemptions by recompute."""
        self.num_revoked = 0
        """Reservations that were taken back before the first read."""
        self.num_prefix_queried = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.num_prefix_hit = 0
        """Prompt tokens that were found in the prefix cache."""

    # --- what others want to know --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._batch.num_running

    @property
    def num_idle(self) -> int:
        """Sequences in the batch that wait for their next mask."""
        return sum(generation in self._batch for generation in self._awaited)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for room, and sequences waiting for a place in the batch."""
        return len(self._waiting) + self._batch.num_ready

    @property
    def num_pulling(self) -> int:
        """Requests with a reservation whose pull has not settled."""
        return len(self._reserved)

    @property
    def num_computing(self) -> int:
        """Prompts and preempted sequences that are being computed here."""
        return len(self._chunks)

    @property
    def num_preempted(self) -> int:
        """Sequences without blocks."""
        return len(self._preempted)

    def num_uncomputed_of(self, request: DecodeRequest) -> int:
        """Tokens of the request's prompt still to be computed here; 0 if it is pulled."""
        if request.pull is not None or request.generations:
            return 0
        prompt = self._prompts.get(request)
        return len(request.work.token_ids) if prompt is None else prompt.num_uncomputed

    @property
    def num_places(self) -> int:
        """Estimated number of sequences like the present ones that would have room at once."""
        return self._admission.num_places(self._batch.step)

    @property
    def has_work(self) -> bool:
        """Whether the next step would have something new to do: a sequence that joins, a prompt to compute, or a
        reservation to take back for a waiting request."""
        return self._batch.can_join or len(self._chunks) > 0 or self._can_relieve

    @property
    def num_host_used(self) -> int:
        """Blocks of host memory in use."""
        return self._policy.num_host_blocks - len(self._host_free)

    @property
    def num_expected(self) -> int:
        """Forecast of the most blocks in use from now on."""
        return self._admission.num_expected(self._batch.step)

    def blocks_needed(self, work: Decode) -> int:
        """Most blocks that one choice of the request can ever hold. While it does, the other choices may be
        preempted."""
        remaining = work.sampling.max_tokens - (len(work.token_ids) - work.prompt_len)
        # The KV of the last token is never computed, so it needs no slot.
        stored = min(len(work.token_ids) + remaining, self._policy.max_sequence_tokens) - 1
        return self._blocks_for(max(stored, len(work.token_ids)))

    def fits(self, work: Decode) -> bool:
        """Whether the request could run if it were alone, if need be one choice after another."""
        return self.blocks_needed(work) <= self._pool.num_blocks

    def place_of(self, request: DecodeRequest) -> RequestState | None:
        """The state, one of `PLACES`, in which the scheduler has the request; None if it does not have it."""
        if request in self._waiting:
            return RequestState.WAITING
        if request in self._reserved:
            return RequestState.RESERVED
        return RequestState.COMPUTING if request in self._prompts else None

    def is_running(self, generation: Generation) -> bool:
        """Whether the sequence is (still) in the batch."""
        return generation in self._batch

    # --- the way in ----------------------------------------------------------------------------------------------

    def want(self, request: DecodeRequest, now: float) -> None:
        """The request waits for room: its offer is open, or its prompt is to be computed here."""
        work = request.work
        request.enter(RequestEvent.WANT)
        request.chain.extend(work.token_ids, len(work.token_ids))
        allowance_s = 0.0 if request.pull is not None else len(work.token_ids) * self._costs.prefill_s_per_token
        deadline = request.arrived + self._policy.ttft_target_s(work.tier) + allowance_s
        self._waiting.add(request, tier=work.tier, tenant=work.tenant, deadline=deadline, now=now)
        self.trials.add(request.key, work.suspicion)
        self._look_again = True

    def reserve(self, now: float) -> list[Reservation]:
        """Admit what fits: preempted sequences first, then waiting requests. Returns reservations of requests that may
        pull."""
        unchanged = not self._look_again and self._pool.num_free <= self._free_when_refused
        if unchanged and not self._waited_long(self._next_preempted(), now):
            self._free_when_refused = self._pool.num_free
            return []
        self._pressure = None
        granted: list[Reservation] = []
        while self._let_one_in(now, granted):
            pass
        self._look_again = False
        self._free_when_refused = self._pool.num_free
        return granted

    def lend(self, block_hashes: Seq[BlockHash]) -> list[int]:
        """The leading blocks of `block_hashes` that are cached, each with a reference for the borrower. Empty if
        running sequences might then lack free blocks."""
        blocks = self._pool.match(block_hashes)
        headroom = self._batch.num_due_next + self._batch.num_ready
        if self._pool.num_unreferenced(blocks) + headroom > self._pool.num_free:
            return []
        self._pool.share(blocks)
        return blocks

    def settled(self, request: DecodeRequest, block_ids: Seq[int], first_tokens: Seq[Tokens], now: float) -> None:
        """The pulled blocks are valid: the request's choices continue after their first tokens."""
        del self._reserved[request]
        self._newest_unread.discard(request)
        self._begin(request, block_ids, first_tokens, now)

    def computed(self, request: DecodeRequest, first_tokens: Seq[Tokens], now: float) -> None:
        """The last chunk of the request's prompt is done: its choices continue after their first tokens."""
        prompt = self._prompts.pop(request)
        self._newest_prompts.discard(prompt)
        self._begin(request, prompt.block_table, first_tokens, now)

    def mask_awaited(self, generation: Generation) -> None:
        """The sequence's next mask is not known yet: until it is, the sequence is in no step, and is not resumed."""
        self._awaited.add(generation)

    def mask_known(self, generation: Generation) -> None:
        """The sequence's next mask is known. Does nothing if the sequence has ended."""
        self._awaited.discard(generation)
        self._look_again = True

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float, before: Step | None = None) -> Step:
        """The next step. Call it after the pool's `step_started`: blocks that this step still reads, for copies and
        swaps, are not used again before it has finished.

        `before` is the step that still runs, or None. `may_run_ahead` must have allowed it.
        """
        step = Step(copies=self._copies)
        self._copies = []
        self._arriving.clear()
        for copy in step.copies:
            self._pool.release(copy)
        if self._policy.prefill_priority and len(self._chunks):
            budget = self._policy.token_budget
            step.chunks = self._plan_chunks(budget, now, self._permitted((), now))
            return step
        ahead: frozenset[Generation] = frozenset() if before is None else frozenset(before.decodes)
        joined = self._join(now, ahead)
        ending = {generation for generation in ahead if generation in self._batch and self._ends(generation)}
        self._relieve(step, now)
        idle = ending | {generation for generation in self._awaited if generation in self._batch}
        sitting_out = self._grow(step, now, ending, idle) | idle
        step.decodes = (
            [g for g in self._batch.running() if g not in sitting_out] if sitting_out else self._batch.running()
        )
        permitted = self._permitted(step.decodes, now)
        if permitted is not None:
            step.decodes = [generation for generation in step.decodes if permitted(generation)]
        self._swap_in(step, joined)
        if len(self._chunks):
            left = max(0, self._policy.token_budget - len(step.decodes))
            budget = min(left, self._policy.prefill_tokens) if step.decodes else left
            step.chunks = self._plan_chunks(budget, now, permitted)
        return step

    def _plan_chunks(
        self, budget: int, now: float, permitted: Callable[[LocalPrompt], bool] | None
    ) -> list[Chunk[LocalPrompt]]:
        chunks = self._chunks.schedule(budget, budget, now, permitted)
        for chunk in chunks:
            request = chunk.prompt.request
            if chunk.prompt.generation is None and request.started_at is None:
                request.started_at = now
        return chunks

    def may_run_ahead(self, step: Step) -> bool:
        """Whether the next step may be scheduled while `step`, the last one, runs: it consists of decodes only, and no
        mask depends on the tokens that it samples."""
        plain = not (step.chunks or step.copies or step.swap_outs or step.swap_ins)
        return plain and not self.trials and not any(each.sequence.sampling.grammar for each in step.decodes)

    def chunks_done(self, chunks: Seq[Chunk[LocalPrompt]]) -> list[Chunk[LocalPrompt]]:
        """Account for the chunks of a finished step; returns those of prompts that are still computed here."""
        live = self._chunks.step_done(chunks)
        for chunk in live:
            work = chunk.prompt.request.work
            if chunk.prompt.generation is None:  # a tenant does not pay for recomputation
                request = chunk.prompt.request
                self._waiting.charge(work.tier, work.tenant, max(0, chunk.end - max(chunk.start, request.num_charged)))
                request.num_charged = max(chunk.end, request.num_charged)
                full = slice(chunk.start // self._block_size, chunk.end // self._block_size)
                self._pool.name(chunk.prompt.block_table[full], request.chain.hashes[full])
        return live

    def recomputed(self, generation: Generation, now: float) -> None:
        """The last chunk of a preempted sequence is done: it continues as before."""
        prompt = self._recomputing.pop(generation)
        self._newest_prompts.discard(prompt)
        generation.sequence.num_computed = len(prompt.token_ids)
        self._batch.add(generation, now)

    def remove(self, generation: Generation, *, wanted: bool = False) -> None:
        """A sequence has ended or is given up: release its blocks. `wanted`: its client asked for its end."""
        if generation.stage is Stage.ENDED:
            return
        if wanted or generation.finish_reason is not None:
            self._admission.ended(generation)
        if generation in self._batch:  # charge its last step: the flow covers those before
            work = generation.request.work
            self._waiting.charge(work.tier, work.tenant, _OUTPUT_CHARGE)
        if generation.stage is Stage.PREEMPTED:
            self._preempted.discard(generation)
        else:
            self._take_blocks(generation)
        self._host_free += generation.host_slots
        generation.host_slots = []
        generation.enter(StageEvent.END)
        self._awaited.discard(generation)
        self._look_again = True

    def leave(self, generation: Generation) -> list[int]:
        """A running sequence moves to another worker and ends here. Returns the blocks with its KV; the caller owns the
        references. No step may be in flight."""
        assert generation.stage is Stage.RUNNING, generation.sequence
        sequence = generation.sequence
        blocks = list(sequence.block_table[: self._blocks_for(sequence.num_computed)])
        self._pool.share(blocks)
        self._take_blocks(generation)
        generation.enter(StageEvent.END)
        self._awaited.discard(generation)
        self._look_again = True
        return blocks

    def name_running(self) -> None:
        """Enter the full blocks of running sequences into the prefix cache."""
        for generation in self._batch.running():
            self._name(generation)

    def forget(self, request: DecodeRequest, *, wanted: bool = False) -> None:
        """Remove the request, whatever its state. The blocks of a pull are released by the pull's owner.

        `wanted`: its client asked for its end (a stop string, say). Then its present length is added to the observed
        lengths.
        """
        self._waiting.discard(request)
        self.trials.discard(request.key)
        if request in self._reserved or request in self._prompts:
            self._reserved.pop(request, None)
            self._newest_unread.discard(request)
            prompt = self._prompts.pop(request, None)
            if prompt is not None:
                self._chunks.remove(prompt)
                self._newest_prompts.discard(prompt)
                self._pool.release(prompt.block_table)
            self._unbook(request)
        for generation in request.generations:
            self.remove(generation, wanted=wanted)
        self._look_again = True

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._batch.check_invariants()
        self._waiting.check_invariants()
        self._chunks.check_invariants()
        booked = {(request, choice) for request in (*self._reserved, *self._prompts) for choice in request.work.choices}
        holders = [*self._batch.running(), *self._batch.ready(), *self._recomputing]
        self._admission.check_invariants()
        assert booked | {generation.key for generation in holders} == set(self._admission.keys())
        assert all(request.state is RequestState.WAITING for request in self._waiting)
        assert all(request.state is RequestState.RESERVED for request in self._reserved)
        assert all(request.state is RequestState.COMPUTING for request in self._prompts)
        unread = {request for request in self._reserved if _unread(request) and not request.work.moving}
        assert unread <= set(self._newest_unread) <= self._reserved.keys()
        assert len(set(self._newest_prompts)) == len(self._chunks) == len(self._prompts) + len(self._recomputing)
        for generation in holders:
            assert generation.finish_reason is None, generation.sequence
            table = generation.sequence.block_table
            assert all(self._pool.ref_count(block) > 0 for block in table), generation.sequence
            assert len(table) >= self._blocks_for(generation.sequence.num_computed), generation.sequence
        living = {*self._batch.running(), *self._batch.ready(), *self._preempted}
        assert self._awaited <= living, "nobody asks while it is computed again, or has ended"
        for generation in self._preempted:
            assert generation.stage is Stage.PREEMPTED, generation.sequence
            assert not generation.sequence.block_table, generation.sequence
        owned = [slot for g in (*holders, *self._preempted) for slot in g.host_slots]
        assert sorted([*owned, *self._host_free]) == list(range(self._policy.num_host_blocks)), "a host slot is lost"

    # --- letting in ----------------------------------------------------------------------------------------------

    def _let_one_in(self, now: float, granted: list[Reservation]) -> bool:
        """Admit or resume the next request or sequence that may; returns whether there was one."""
        back = self._next_preempted()
        waited_long = self._waited_long(back, now)
        if back is not None and waited_long and back.num_passed >= _MAX_PASSED:
            return self._resume(back, now)
        refused: list[DecodeRequest] = []
        for request in self._candidates(now, len(Tier) if back is None else back.request.work.tier.rank):
            if self._admit(request, now, granted):
                for passed in refused:
                    passed.num_passed += 1
                if back is not None and waited_long:
                    back.num_passed += 1
                return True
            refused.append(request)
            if request.num_passed >= _MAX_PASSED:
                break
        # Blocks that a request of a higher tier waits for go to a lower tier only if that has waited long.
        return back is not None and (waited_long or not refused) and self._resume(back, now)

    def _waited_long(self, preempted: Generation | None, now: float) -> bool:
        return preempted is not None and now - preempted.preempted_at > self._policy.ageing_s

    def _candidates(self, now: float, least_rank: int) -> Iterator[DecodeRequest]:
        """Waiting requests of a rank below `least_rank`: the first one, and some more in case it does not fit."""
        first = self._waiting.first(now)
        yield from (request for request in first if request.work.tier.rank < least_rank)
        if len(self._waiting) < 2:
            return
        for request in self._waiting.first(now, _LOOK_AHEAD):
            if request not in first and request.work.tier.rank < least_rank:
                yield request

    def _admit(self, request: DecodeRequest, now: float, granted: list[Reservation]) -> bool:
        work = request.work
        num_tokens, size = len(work.token_ids), self._block_size
        # A prompt that is computed here always computes its last token, for its logits; and every token if all are to
        # be scored.
        usable = (num_tokens if request.pull is not None else num_tokens - 1) // size
        if work.prompt_logprobs is not None:
            usable = 0
        held = self._pool.match(request.chain.hashes[:usable])
        # If even an empty pool has too few blocks for all forks, those without a block begin preempted.
        num_spare = self._pool.num_blocks - self._blocks_for(num_tokens)
        num_forks = min(len(work.choices) - 1, num_spare) if num_tokens % size else 0
        num_new = self._blocks_for(num_tokens) - len(held) + num_forks
        order = self._num_orders
        # The first choice holds what is allocated now; each fork holds one block, if the prompt's last one is not full.
        private = [num_new - num_forks, *(int(index < num_forks) for index in range(len(work.choices) - 1))]
        newcomers = [
            (self._admission.steps_left(work, num_tokens + 1, rank_of(order + index)), num_private)
            for index, num_private in enumerate(private)
        ]
        if not self._has_room(work.tier.rank, num_new, held, newcomers):
            return False
        self._waiting.take(request, now)
        self._num_orders += len(work.choices)
        request.order = order
        self._pool.share(held)
        blocks = held + self._pool.allocate(num_new - num_forks)
        request.fork_blocks = self._pool.allocate(num_forks)
        for choice, newcomer in zip(work.choices, newcomers, strict=True):
            self._admission.enter((request, choice), newcomer)
        if not request.sent_back:
            self.num_prefix_queried += num_tokens
            self.num_prefix_hit += len(held) * size
        if request.pull is not None:
            request.enter(RequestEvent.RESERVE)
            self._reserved[request] = blocks
            if not work.moving:
                self._newest_unread.add(request, (-work.tier.rank, -order))
            granted.append(Reservation(request, blocks, len(held)))
        else:
            request.enter(RequestEvent.COMPUTE)
            request.num_cached = len(held) * size
            self._prompts[request] = self._compute(request, None, work.token_ids, request.num_cached, blocks, now)
        return True

    def _next_preempted(self) -> Generation | None:
        """The preempted sequence that comes back first. Its mask must be known, because the last chunk may sample a
        token."""
        first = self._preempted.smallest(1 + len(self._awaited))
        return next((generation for generation in first if generation not in self._awaited), None)

    def _resume(self, generation: Generation, now: float) -> bool:
        """Give a preempted sequence blocks again."""
        sequence, work = generation.sequence, generation.request.work
        swapped = bool(generation.host_slots)
        usable = sequence.num_computed if swapped else sequence.num_tokens - 1
        held = self._pool.match(generation.chain.hashes[: usable // self._block_size])
        num_new = self._blocks_for(sequence.num_tokens) - len(held)
        newcomer = self._admission.steps_left(work, sequence.num_tokens, generation.rank), num_new
        if not self._has_room(work.tier.rank, num_new, held, [newcomer]):
            return False
        self._preempted.discard(generation)
        self._pool.share(held)
        sequence.block_table = array("q", held + self._pool.allocate(num_new))
        self._admission.enter(generation.key, newcomer)
        if swapped:
            generation.num_kept = len(held)
            self._batch.add(generation, now)
        else:
            sequence.num_computed = len(held) * self._block_size
            generation.enter(StageEvent.RECOMPUTE)
            self._recomputing[generation] = self._compute(
                generation.request,
                generation,
                list(sequence.token_ids),
                sequence.num_computed,
                sequence.block_table,
                generation.request.arrived,
            )
        return True

    def _has_room(self, rank: int, num_new: int, held: Seq[int], newcomers: Seq[Newcomer]) -> bool:
        """Whether `num_new` blocks, beside the cached blocks `held`, can be given away now without any sequence lacking
        blocks later. If lower tiers hold what is lacking, it is noted that they must give it up."""
        if not self._admission.has_places(rank, len(newcomers)):
            return False
        lacking = self._admission.num_lacking(
            self._batch.step,
            num_new=num_new,
            held=held,
            headroom=self._batch.num_due_next + self._batch.num_ready,
            newcomers=newcomers,
        )
        if lacking > 0 and self._admission.any_below(rank) and (self._pressure is None or rank < self._pressure[0]):
            self._pressure = rank, lacking
        return lacking <= 0

    def _compute(
        self,
        request: DecodeRequest,
        generation: Generation | None,
        token_ids: list[int] | tuple[int, ...],
        num_computed: int,
        block_table: Seq[int],
        now: float,
    ) -> LocalPrompt:
        tier = request.work.tier
        order = request.order if generation is None else generation.order
        cost_s = (len(token_ids) - num_computed) * self._costs.prefill_s_per_token
        urgency = (tier.rank, request.arrived + self._policy.ttft_target_s(tier) + cost_s, order)
        prompt = LocalPrompt(request, generation, token_ids, num_computed, block_table, urgency)
        self._chunks.add(prompt, now)
        self._newest_prompts.add(prompt, (-tier.rank, -order))
        return prompt

    def _begin(self, request: DecodeRequest, block_ids: Seq[int], first_tokens: Seq[Tokens], now: float) -> None:
        """The KV of the request's tokens is here and valid: its choices begin, and share the full blocks. A sequence
        that moved here has more tokens than the request; only the last of them has no KV yet."""
        work = request.work
        token_ids = [*work.token_ids, *first_tokens[0].token_ids[:-1]]
        num_tokens = len(token_ids)
        full = num_tokens // self._block_size
        request.enter(RequestEvent.BEGIN)
        request.begun_at = now
        request.chain.extend(token_ids, num_tokens)
        self._pool.name(block_ids[:full], request.chain.hashes)
        for index, first in enumerate(first_tokens):
            table = block_ids if index == 0 else self._fork(request, block_ids, full)
            num_computed = num_tokens if table else 0
            sequence = Sequence(
                request.key, first.choice, list(token_ids), work.prompt_len, work.sampling, num_computed, table
            )
            generation = Generation(
                request,
                sequence,
                request.chain if len(first_tokens) == 1 else request.chain.fork(),
                request.order + index,
                rank_of(request.order + index),
                work.handles[index],
                num_named=full if table else 0,
                first_position=len(work.token_ids),
                began=now,
            )
            logprobs = first.logprobs or (None,)
            generation.logprobs += [each for each in logprobs[:-1] if each is not None]
            generation.append(first.token_ids[-1], logprobs[-1], first.finish_reason)
            request.generations.append(generation)
            if table:
                self._batch.add(generation, now)
            else:
                self._admission.leave(generation.key)
                self._stand_by(generation, now)
        assert not request.fork_blocks, request.work
        for generation in request.generations:
            if generation.finish_reason is not None:
                self.remove(generation)

    def _fork(self, request: DecodeRequest, block_ids: Seq[int], full: int) -> list[int]:
        """Blocks of one more choice: the first `full` are shared, the last one is copied by the next step. Empty if
        there is no block for the copy."""
        rest = block_ids[full:]
        if len(request.fork_blocks) < len(rest):
            return []
        copies = [request.fork_blocks.pop() for _ in rest]
        self._copies += zip(rest, copies, strict=True)
        self._pool.share([*block_ids, *copies])
        return [*block_ids[:full], *copies]

    # --- a step's parts ------------------------------------------------------------------------------------------

    def _join(self, now: float, ahead: Collection[Generation]) -> list[Generation]:
        """Begin a step: fill the batch, and give a new expected end to sequences that have outlived theirs."""
        joined = self._batch.next_step(now, ahead)
        for generation in joined:
            self._flow(generation, _OUTPUT_CHARGE)
            self._admission.joined(generation, self._batch.step)
        for generation in self._batch.left():
            self._flow(generation, -_OUTPUT_CHARGE)
            num_private = self._num_private(generation.sequence.block_table)
            self._admission.paused(generation, self._batch.step, num_private)
        self._waiting.advance(self._batch.step)
        self._admission.look_again(self._batch.step)
        return joined

    def _ends(self, generation: Generation) -> bool:
        """Whether the sequence's next token is certainly its last, by its length."""
        sequence = generation.sequence
        full = sequence.num_tokens + 1 >= self._policy.max_sequence_tokens
        return full or sequence.num_output + 1 >= sequence.sampling.max_tokens

    def _permitted(self, decodes: Seq[Generation], now: float) -> Callable[[Generation | LocalPrompt], bool] | None:
        """Predicate of what the step may compute; None if there are no suspects. What is left out stays as it is."""
        if not self.trials:
            return None
        chosen = self.trials.choose({each.request.key for each in (*decodes, *self._chunks)}, now)
        return lambda each: each.request.key in chosen

    def _swap_in(self, step: Step, joined: Seq[Generation]) -> None:
        """Swap in the blocks of sequences that have joined, except those that were preempted in the same step."""
        for generation in joined:
            if generation in self._batch and generation.host_slots:
                kept, slots = generation.num_kept, generation.host_slots
                step.swap_ins += zip(slots[kept:], generation.sequence.block_table[kept : len(slots)], strict=True)
                self._host_free += slots
                generation.host_slots = []
                self._arriving.add(generation)

    def _grow(self, step: Step, now: float, ending: set[Generation], idle: set[Generation]) -> set[Generation]:
        """Give each sequence that is due, and not `idle`, its next block. Sequences for which there is no block sit
        this step out; newer ones of lower tiers are preempted, so that there will be blocks."""
        due = self._batch.due()
        if idle:
            for generation in idle.intersection(due):
                self._batch.sit_out(generation)
            due = [generation for generation in due if generation not in idle]
        blocks = self._pool.allocate(min(len(due), self._pool.num_free))
        fed, lacking = due[: len(blocks)], due[len(blocks) :]
        for generation, block in zip(fed, blocks, strict=True):
            generation.sequence.block_table.append(block)
        self._batch.fed(*fed)
        # Blocks that steps in flight, this one included, release, and those of sequences that end with the step before.
        num_freed = self._pool.num_limbo + sum(self._num_private(each.sequence.block_table) for each in ending)
        while num_freed < sum(generation in self._batch for generation in lacking):
            newest = self._newest(ending)
            assert newest is not None, "those that lack a block are candidates themselves"
            num_freed += self._preempt(newest, step, now)
        sitting_out = {generation for generation in lacking if generation in self._batch}
        for generation in sitting_out:
            self._batch.sit_out(generation)
        return sitting_out

    def _relieve(self, step: Step, now: float) -> None:
        """Take from lower tiers the blocks that a waiting request of a higher tier lacks. No holder gives way twice."""
        if self._pressure is None:
            return
        (rank, lacking), self._pressure = self._pressure, None
        unread = [request for request in self._newest_unread if _unread(request)]
        holders = (*self._batch.running(), *self._batch.ready(), *self._newest_prompts, *unread)
        victims = [each for each in holders if _seniority(each)[0] > rank and not each.gave_way]
        victims.sort(key=_seniority, reverse=True)
        for victim in victims:
            if lacking <= 0:
                break
            victim.gave_way = True
            lacking -= self._preempt(victim, step, now)

    @property
    def _can_relieve(self) -> bool:
        """Whether reservations of lower tiers can give, without a step, blocks that a waiting request lacks."""
        if self._pressure is None:
            return False
        rank, _ = self._pressure
        unread = (each for each in self._newest_unread if _unread(each) and not each.gave_way)
        return any(request.work.tier.rank > rank for request in unread)

    def _newest(self, ending: Collection[Generation]) -> Holder | None:
        """The newest holder of blocks of the lowest tier, without pulls that have begun to read and sequences in
        `ending`."""
        while (unread := self._newest_unread.first()) is not None and not _unread(unread):
            self._newest_unread.discard(unread)
        newest = (self._batch.newest(ending), self._newest_prompts.first(), unread)
        return max((each for each in newest if each is not None), key=_seniority, default=None)

    def _preempt(self, victim: Holder, step: Step, now: float) -> int:
        """Take the victim's blocks; returns how many are free when this step has ended."""
        if isinstance(victim, DecodeRequest):
            return self._revoke(victim, step)
        if isinstance(victim, LocalPrompt):
            if victim.generation is None:
                return self._send_back(victim)
            victim = victim.generation
        table = victim.sequence.block_table
        num_freed = self._num_private(table)
        # If it still has host slots, they were not swapped in yet and stay valid. A half recomputed one is dropped.
        if victim.stage is not Stage.RECOMPUTING and not victim.host_slots:
            num_content = self._blocks_for(victim.sequence.num_computed)
            if self._swaps(victim, num_content):
                victim.host_slots = [self._host_free.pop() for _ in range(num_content)]
                step.swap_outs += zip(table[:num_content], victim.host_slots, strict=True)
                self.num_swapped += 1
        if not victim.host_slots:
            self.num_recomputed += 1
        self._take_blocks(victim)
        if not victim.host_slots:
            victim.sequence.num_computed = 0
        self._stand_by(victim, now)
        return num_freed

    def _stand_by(self, generation: Generation, now: float) -> None:
        """A sequence without blocks waits for some."""
        generation.enter(StageEvent.PREEMPT)
        generation.preempted_at, generation.num_passed = now, 0
        generation.paused(now)
        self._preempted.add(generation, seniority(generation))
        self._look_again = True

    def _send_back(self, prompt: LocalPrompt) -> int:
        """A request whose prompt is computed here, and that has no token yet, waits again. Returns the number of freed
        blocks."""
        num_freed = self._num_private(prompt.block_table) + len(prompt.request.fork_blocks)
        self.forget(prompt.request)
        prompt.request.sent_back = True
        prompt.request.started_at = None
        self.want(prompt.request, prompt.request.arrived)
        self.num_recomputed += 1
        return num_freed

    def _revoke(self, request: DecodeRequest, step: Step) -> int:
        """A request whose pull has reserved blocks, and read nothing, waits again. Returns the number of freed
        blocks."""
        blocks = self._reserved[request]
        num_freed = self._num_private(blocks) + len(request.fork_blocks)
        self.forget(request)
        self._pool.release(blocks)
        request.sent_back = True
        step.revoked.append(request)
        self.want(request, request.arrived)
        self.num_revoked += 1
        return num_freed

    def _swaps(self, generation: Generation, num_content: int) -> bool:
        """Whether a sequence is swapped to host memory rather than computed again."""
        if self._policy.preempt_by == "recompute" or num_content > len(self._host_free) or num_content == 0:
            return False
        if self._policy.preempt_by == "swap":
            return True
        # Blocks that others hold, too, will still be cached when it comes back.
        table = generation.sequence.block_table
        num_shared = len(table) - self._num_private(table)
        recompute_s = self._costs.recompute_s(generation.sequence.num_tokens - num_shared * self._block_size)
        return self._costs.swap_s(num_content) <= recompute_s

    def _take_blocks(self, generation: Generation) -> None:
        """Take the blocks of a sequence, whatever its state. Its full blocks stay in the prefix cache."""
        sequence = generation.sequence
        self._name(generation)
        if generation in self._batch:
            self._flow(generation, -_OUTPUT_CHARGE)
        self._batch.discard(generation)
        prompt = self._recomputing.pop(generation, None)
        if prompt is not None:
            self._chunks.remove(prompt)
            self._newest_prompts.discard(prompt)
        self._pool.release(sequence.block_table)
        sequence.block_table = array("q")
        generation.num_named = 0
        self._admission.left(generation)

    def _unbook(self, request: DecodeRequest) -> None:
        """Release the fork blocks and the forecast entries of a request that had room and has no choices yet."""
        self._pool.release(request.fork_blocks)
        request.fork_blocks = []
        for choice in request.work.choices:
            self._admission.leave((request, choice))

    def _name(self, generation: Generation) -> None:
        """Enter the blocks that have become full into the prefix cache."""
        if generation.host_slots or generation in self._arriving:
            return  # its blocks may not have been swapped in yet
        sequence, chain = generation.sequence, generation.chain
        chain.extend(sequence.token_ids, sequence.num_computed)
        full = slice(generation.num_named, sequence.num_computed // self._block_size)
        self._pool.name(sequence.block_table[full], chain.hashes[full])
        generation.num_named = max(full.start, full.stop)

    def _num_private(self, blocks: Seq[int]) -> int:
        """Number of `blocks`, held by one sequence, that no other sequence holds."""
        return sum(self._pool.ref_count(block) == 1 for block in blocks)

    def _flow(self, generation: Generation, change: float) -> None:
        """Change the service that the sequence's tenant receives per step. A tenant pays for places in the batch, also
        for steps that a sequence misses because its mask is late: no other sequence can have the place."""
        work = generation.request.work
        self._waiting.flow(work.tier, work.tenant, change, self._batch.step)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _unread(request: DecodeRequest) -> bool:
    return request.pull is not None and request.pull.revocable


def _seniority(holder: Holder) -> Seniority:
    if isinstance(holder, DecodeRequest):
        return holder.work.tier.rank, holder.order
    if isinstance(holder, LocalPrompt):
        return holder.urgency[0], holder.urgency[2]
    return seniority(holder)
