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
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from common.contract.block_hashes import BlockHash
from common.contract.messages import Decode, Tokens
from common.engine.block_pool import BlockPool
from common.engine.sequence import Sequence
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from common.scheduling.trials import Trials
from decode_worker.admission import Admission, rank_of
from decode_worker.entrance import Entrance, Reservation
from decode_worker.local_prompts import LocalPrompts
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
from decode_worker.swap_space import SwapSpace

_OUTPUT_CHARGE = 2.0
"""Service of an output token; a computed prompt token counts 1 (VTC, section 3)."""


PLACES = (RequestState.WAITING, RequestState.RESERVED, RequestState.COMPUTING)
"""States in which the scheduler has a request that has not begun."""
Holder = Generation | LocalPrompt | DecodeRequest
"""A holder of blocks that can be taken: a sequence, a prompt computed here, a request whose pull has read nothing."""


class DecodeScheduler:
    """Admits requests, plans steps and preempts, for one decode worker."""

    def __init__(self, pool: BlockPool, policy: Policy, costs: Costs) -> None:
        self._pool = pool
        self._policy = policy
        self._costs = costs
        self._block_size = policy.block_size
        self._batch = RunningBatch(policy.max_num_seqs, policy.block_size, policy.ageing_s)
        self._admission = Admission(pool, policy)
        self._prompts = LocalPrompts(policy, costs)
        self._entrance = Entrance(pool, policy, costs, self._admission, self._batch, self._prompts)
        self._swap = SwapSpace(policy, costs)
        self.trials = Trials()
        self._copies: list[tuple[int, int]] = []
        """Block copies, for forks, that the next step must make first."""
        self.num_recomputed = 0
        """Preemptions by recompute."""
        self.num_revoked = 0
        """Reservations that were taken back before the first read."""

    # --- what others want to know --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._batch.num_running

    @property
    def num_idle(self) -> int:
        """Sequences in the batch that wait for their next mask."""
        return sum(generation in self._batch for generation in self._entrance.awaited)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for room, and sequences waiting for a place in the batch."""
        return len(self._entrance.waiting) + self._batch.num_ready

    @property
    def num_pulling(self) -> int:
        """Requests with a reservation whose pull has not settled."""
        return len(self._entrance.reserved)

    @property
    def num_computing(self) -> int:
        """Prompts and preempted sequences that are being computed here."""
        return len(self._prompts)

    @property
    def num_preempted(self) -> int:
        """Sequences without blocks."""
        return len(self._entrance.preempted)

    def num_uncomputed_of(self, request: DecodeRequest) -> int:
        """Tokens of the request's prompt still to be computed here; 0 if it is pulled."""
        if request.pull is not None or request.generations:
            return 0
        prompt = self._prompts.of_requests.get(request)
        return len(request.work.token_ids) if prompt is None else prompt.num_uncomputed

    @property
    def num_places(self) -> int:
        """Estimated number of sequences like the present ones that would have room at once."""
        return self._admission.num_places(self._batch.step)

    @property
    def has_work(self) -> bool:
        """Whether the next step would have something new to do: a sequence that joins, a prompt to compute, or a
        reservation to take back for a waiting request."""
        return self._batch.can_join or len(self._prompts) > 0 or self._entrance.can_relieve

    @property
    def num_host_used(self) -> int:
        """Blocks of host memory in use."""
        return self._swap.num_used

    @property
    def num_swapped(self) -> int:
        """Preemptions by swap."""
        return self._swap.num_swapped

    @property
    def num_prefix_queried(self) -> int:
        """Prompt tokens that were looked up in the prefix cache."""
        return self._entrance.num_prefix_queried

    @property
    def num_prefix_hit(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self._entrance.num_prefix_hit

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
        return self._policy.blocks_for(max(stored, len(work.token_ids)))

    def fits(self, work: Decode) -> bool:
        """Whether the request could run if it were alone, if need be one choice after another."""
        return self.blocks_needed(work) <= self._pool.num_blocks

    def place_of(self, request: DecodeRequest) -> RequestState | None:
        """The state, one of `PLACES`, in which the scheduler has the request; None if it does not have it."""
        if request in self._entrance.waiting:
            return RequestState.WAITING
        if request in self._entrance.reserved:
            return RequestState.RESERVED
        return RequestState.COMPUTING if request in self._prompts.of_requests else None

    def is_running(self, generation: Generation) -> bool:
        """Whether the sequence is (still) in the batch."""
        return generation in self._batch

    # --- the way in ----------------------------------------------------------------------------------------------

    def want(self, request: DecodeRequest, now: float) -> None:
        """The request waits for room: its offer is open, or its prompt is to be computed here."""
        self._entrance.want(request, now)
        self.trials.add(request.key, request.work.suspicion)

    def reserve(self, now: float) -> list[Reservation]:
        """Admit what fits: preempted sequences first, then waiting requests. Returns reservations of requests that may
        pull."""
        return self._entrance.reserve(now)

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
        self._entrance.settled(request)
        self._begin(request, block_ids, first_tokens, now)

    def computed(self, request: DecodeRequest, first_tokens: Seq[Tokens], now: float) -> None:
        """The last chunk of the request's prompt is done: its choices continue after their first tokens."""
        prompt = self._prompts.take(request)
        assert prompt is not None, request.story
        self._begin(request, prompt.block_table, first_tokens, now)

    def mask_awaited(self, generation: Generation) -> None:
        """The sequence's next mask is not known yet: until it is, the sequence is in no step, and is not resumed."""
        self._entrance.awaited.add(generation)

    def mask_known(self, generation: Generation) -> None:
        """The sequence's next mask is known. Does nothing if the sequence has ended."""
        self._entrance.awaited.discard(generation)
        self._entrance.look_again()

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float, before: Step | None = None) -> Step:
        """The next step. Call it after the pool's `step_started`: blocks that this step still reads, for copies and
        swaps, are not used again before it has finished.

        `before` is the step that still runs, or None. `may_run_ahead` must have allowed it.
        """
        step = Step(copies=self._copies)
        self._copies = []
        self._swap.next_step()
        for copy in step.copies:
            self._pool.release(copy)
        if self._policy.prefill_priority and len(self._prompts):
            budget = self._policy.token_budget
            step.chunks = self._prompts.plan(budget, now, self._permitted((), now))
            return step
        ahead: frozenset[Generation] = frozenset() if before is None else frozenset(before.decodes)
        joined = self._join(now, ahead)
        ending = {generation for generation in ahead if generation in self._batch and self._ends(generation)}
        self._relieve(step, now)
        idle = ending | {generation for generation in self._entrance.awaited if generation in self._batch}
        sitting_out = self._grow(step, now, ending, idle) | idle
        step.decodes = (
            [g for g in self._batch.running() if g not in sitting_out] if sitting_out else self._batch.running()
        )
        permitted = self._permitted(step.decodes, now)
        if permitted is not None:
            step.decodes = [generation for generation in step.decodes if permitted(generation)]
        self._swap_in(step, joined)
        if len(self._prompts):
            left = max(0, self._policy.token_budget - len(step.decodes))
            budget = min(left, self._policy.prefill_tokens) if step.decodes else left
            step.chunks = self._prompts.plan(budget, now, permitted)
        return step

    def may_run_ahead(self, step: Step) -> bool:
        """Whether the next step may be scheduled while `step`, the last one, runs: it consists of decodes only, and no
        mask depends on the tokens that it samples."""
        plain = not (step.chunks or step.copies or step.swap_outs or step.swap_ins)
        return plain and not self.trials and not any(each.sequence.sampling.grammar for each in step.decodes)

    def chunks_done(self, chunks: Seq[Chunk[LocalPrompt]]) -> list[Chunk[LocalPrompt]]:
        """Account for the chunks of a finished step; returns those of prompts that are still computed here."""
        live = self._prompts.step_done(chunks)
        for chunk in live:
            work = chunk.prompt.request.work
            if chunk.prompt.generation is None:  # a tenant does not pay for recomputation
                request = chunk.prompt.request
                self._entrance.waiting.charge(
                    work.tier, work.tenant, max(0, chunk.end - max(chunk.start, request.num_charged))
                )
                request.num_charged = max(chunk.end, request.num_charged)
                full = slice(chunk.start // self._block_size, chunk.end // self._block_size)
                self._pool.name(chunk.prompt.block_table[full], request.chain.hashes[full])
        return live

    def recomputed(self, generation: Generation, now: float) -> None:
        """The last chunk of a preempted sequence is done: it continues as before."""
        prompt = self._prompts.take(generation)
        assert prompt is not None, generation.sequence
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
            self._entrance.waiting.charge(work.tier, work.tenant, _OUTPUT_CHARGE)
        if generation.stage is Stage.PREEMPTED:
            self._entrance.preempted.discard(generation)
        else:
            self._take_blocks(generation)
        self._swap.give_back(generation)
        self._ended(generation)

    def leave(self, generation: Generation) -> list[int]:
        """A running sequence moves to another worker and ends here. Returns the blocks with its KV; the caller owns the
        references. No step may be in flight."""
        assert generation.stage is Stage.RUNNING, generation.sequence
        sequence = generation.sequence
        blocks = list(sequence.block_table[: self._policy.blocks_for(sequence.num_computed)])
        self._pool.share(blocks)
        self._take_blocks(generation)
        self._ended(generation)
        return blocks

    def _ended(self, generation: Generation) -> None:
        generation.enter(StageEvent.END)
        self._entrance.awaited.discard(generation)
        self._entrance.look_again()

    def name_running(self) -> None:
        """Enter the full blocks of running sequences into the prefix cache."""
        for generation in self._batch.running():
            self._name(generation)

    def forget(self, request: DecodeRequest, *, wanted: bool = False) -> None:
        """Remove the request, whatever its state. The blocks of a pull are released by the pull's owner.

        `wanted`: its client asked for its end (a stop string, say). Then its present length is added to the observed
        lengths.
        """
        self.trials.discard(request.key)
        reserved = self._entrance.forget(request)
        prompt = self._prompts.take(request)
        if prompt is not None:
            self._pool.release(prompt.block_table)
        if reserved or prompt is not None:
            self._entrance.unbook(request)
        for generation in request.generations:
            self.remove(generation, wanted=wanted)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._batch.check_invariants()
        self._entrance.check_invariants()
        self._prompts.check_invariants()
        self._admission.check_invariants()
        entrance, prompts = self._entrance, self._prompts
        assert all(request.state is RequestState.COMPUTING for request in prompts.of_requests)
        begin = (*entrance.reserved, *prompts.of_requests)
        booked = {(request, choice) for request in begin for choice in request.work.choices}
        holders = [*self._batch.running(), *self._batch.ready(), *prompts.of_sequences]
        assert booked | {generation.key for generation in holders} == set(self._admission.keys())
        for generation in holders:
            assert generation.finish_reason is None, generation.sequence
            table = generation.sequence.block_table
            assert all(self._pool.ref_count(block) > 0 for block in table), generation.sequence
            assert len(table) >= self._policy.blocks_for(generation.sequence.num_computed), generation.sequence
        living = {*self._batch.running(), *self._batch.ready(), *entrance.preempted}
        assert entrance.awaited <= living, "nobody asks while it is computed again, or has ended"
        for generation in entrance.preempted:
            assert generation.stage is Stage.PREEMPTED, generation.sequence
            assert not generation.sequence.block_table, generation.sequence
        self._swap.check_invariants((*holders, *entrance.preempted))

    # --- beginning -----------------------------------------------------------------------------------------------

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
                self._entrance.stand_by(generation, now)
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
        self._entrance.waiting.advance(self._batch.step)
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
        chosen = self.trials.choose({each.request.key for each in (*decodes, *self._prompts)}, now)
        return lambda each: each.request.key in chosen

    def _swap_in(self, step: Step, joined: Seq[Generation]) -> None:
        """Swap in the blocks of sequences that have joined, except those that were preempted in the same step."""
        for generation in joined:
            if generation in self._batch and generation.host_slots:
                step.swap_ins += self._swap.swap_in(generation)

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
        pressure = self._entrance.take_pressure()
        if pressure is None:
            return
        rank, lacking = pressure
        holders = (*self._batch.running(), *self._batch.ready(), *self._prompts, *self._entrance.unread())
        victims = [each for each in holders if _seniority(each)[0] > rank and not each.gave_way]
        victims.sort(key=_seniority, reverse=True)
        for victim in victims:
            if lacking <= 0:
                break
            victim.gave_way = True
            lacking -= self._preempt(victim, step, now)

    def _newest(self, ending: Collection[Generation]) -> Holder | None:
        """The newest holder of blocks of the lowest tier, without pulls that have begun to read and sequences in
        `ending`."""
        newest = (self._batch.newest(ending), self._prompts.newest(), self._entrance.newest_unread())
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
            num_content = self._policy.blocks_for(victim.sequence.num_computed)
            # Blocks that others hold, too, will still be cached when it comes back.
            num_shared = len(table) - num_freed
            if self._swap.takes(num_content, victim.sequence.num_tokens - num_shared * self._block_size):
                step.swap_outs += self._swap.swap_out(victim, table[:num_content])
        if not victim.host_slots:
            self.num_recomputed += 1
        self._take_blocks(victim)
        if not victim.host_slots:
            victim.sequence.num_computed = 0
        self._entrance.stand_by(victim, now)
        return num_freed

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
        blocks = self._entrance.reserved[request]
        num_freed = self._num_private(blocks) + len(request.fork_blocks)
        self.forget(request)
        self._pool.release(blocks)
        request.sent_back = True
        step.revoked.append(request)
        self.want(request, request.arrived)
        self.num_revoked += 1
        return num_freed

    def _take_blocks(self, generation: Generation) -> None:
        """Take the blocks of a sequence, whatever its state. Its full blocks stay in the prefix cache."""
        sequence = generation.sequence
        self._name(generation)
        if generation in self._batch:
            self._flow(generation, -_OUTPUT_CHARGE)
        self._batch.discard(generation)
        self._prompts.take(generation)
        self._pool.release(sequence.block_table)
        sequence.block_table = array("q")
        generation.num_named = 0
        self._admission.left(generation)

    def _name(self, generation: Generation) -> None:
        """Enter the blocks that have become full into the prefix cache."""
        if self._swap.holds(generation):
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
        self._entrance.waiting.flow(work.tier, work.tenant, change, self._batch.step)


def _seniority(holder: Holder) -> Seniority:
    if isinstance(holder, DecodeRequest):
        return holder.work.tier.rank, holder.order
    if isinstance(holder, LocalPrompt):
        return holder.urgency[0], holder.urgency[2]
    return seniority(holder)
