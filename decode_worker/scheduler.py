"""Continuous batching under memory pressure: decides which sequences run, which requests are admitted, and which
sequences give up their blocks.

Every step computes one token of every running sequence, and verifies drafted tokens of some. Sequences that end leave
at once; sequences whose KV is valid join at the next step. A request is admitted by a forecast of the blocks that all
sequences will need, not by the worst case, so the cache is kept full. If the forecast was wrong, the newest sequence
of the lowest tier gives up its blocks: they are swapped to host memory, or dropped and computed again, whichever
costs less time. It comes back before another request of its tier is admitted. A reservation of which nothing was read
yet is taken back in the same way.

Pure state: it takes requests, finished steps and a time, and returns decisions. Without drafts, a step's cost depends
on what changed, not on how many sequences run.

The life cycles of requests and of their choices are `REQUEST_TABLE` and `STAGE_TABLE` in `decode_worker.request`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from common.contract.block_hashes import BlockHash
from common.contract.ids import RequestKey
from common.contract.messages.gateway import Decode
from common.contract.messages.worker import Tokens
from common.engine.block_pool import BlockPool
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from common.scheduling.row_times import RowTimes
from common.scheduling.trials import Trials
from decode_worker.admission import Admission
from decode_worker.batch_bound import BatchBound
from decode_worker.entrance import Entrance, Reservation
from decode_worker.local_prompts import LocalPrompts
from decode_worker.policy import Policy
from decode_worker.preemption import Preemption
from decode_worker.request import DecodeChoice, DecodeRequest, LocalPrompt, RequestState
from decode_worker.running_batch import RunningBatch, seniority
from decode_worker.sequences import Sequences
from decode_worker.speculation import Speculation
from decode_worker.step import Step
from decode_worker.swap_space import SwapSpace


class DecodeScheduler:
    """Admits requests, plans steps and preempts, for one decode worker."""

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        costs: Costs,
        speculation: Speculation | None = None,
        row_times: RowTimes | None = None,
    ) -> None:
        """Without `speculation`, nothing is drafted. `row_times` is what steps take, if the policy has a target for
        them."""
        self._pool = pool
        self._policy = policy
        self._block_size = policy.block_size
        self.bound = BatchBound(policy, row_times)
        self.batch = RunningBatch(policy, self.bound)
        self._admission = Admission(pool, policy, self.bound)
        self.prompts = LocalPrompts(policy, costs)
        self.entrance = Entrance(pool, policy, self._admission, self.batch, self.prompts)
        self.swap = SwapSpace(policy, costs)
        self.sequences = Sequences(pool, policy, self._admission, self.batch, self.prompts, self.entrance, self.swap)
        self.preemption = Preemption(pool, policy, self.batch, self.prompts, self.entrance, self.swap, self.sequences)
        self.trials = Trials()
        self.speculation = speculation

    # --- what others want to know --------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Sequences in the batch that wait for their next mask."""
        return sum(choice in self.batch for choice in self.entrance.unmasked)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for room, and sequences waiting for a place in the batch."""
        return len(self.entrance.waiting) + self.batch.num_ready

    def num_uncomputed_of(self, request: DecodeRequest) -> int:
        """Tokens of the request's prompt still to be computed here; 0 if it is pulled. Before it has blocks, those that
        were cached when it was last looked up do not count."""
        if request.pull is not None or request.choices:
            return 0
        prompt = self.prompts.of_requests.get(request)
        return len(request.work.token_ids) - request.num_cached if prompt is None else prompt.num_uncomputed

    @property
    def num_places(self) -> int:
        """Estimated number of sequences like the present ones that would have room at once."""
        return self._admission.num_places(self.batch.step)

    @property
    def has_work(self) -> bool:
        """Whether the next step would have something new to do: a sequence that joins, a prompt to compute, or a
        reservation to take back for a waiting request."""
        return self.batch.can_join or len(self.prompts) > 0 or self.entrance.can_relieve

    @property
    def num_expected(self) -> int:
        """Forecast of the most blocks in use from now on."""
        return self._admission.num_expected(self.batch.step)

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

    # --- the way in ----------------------------------------------------------------------------------------------

    def want(self, request: DecodeRequest, now: float) -> None:
        """The request waits for room: its offer is open, or its prompt is to be computed here."""
        self.entrance.want(request, now)
        self.trials.add(request.key, request.work.suspicion)

    def reserve(self, now: float) -> list[Reservation]:
        """Admit what fits, by tier; of a tier, preempted sequences before waiting requests. Returns reservations of
        requests that may pull."""
        return self.entrance.reserve(now)

    def lend(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """The leading blocks of `block_hashes` that are cached, or that a running sequence has filled, each with a
        reference for the borrower. Empty if that took free blocks that running sequences may need; blocks that are in
        use anyway are always lent."""
        blocks = self._pool.match(block_hashes)
        if len(blocks) < len(block_hashes) or not self._can_spare(blocks):
            self.sequences.name_again(block_hashes)
            blocks = self._pool.match(block_hashes)
            if not self._can_spare(blocks):
                return []
        self._pool.share(blocks)
        return blocks

    def settled(
        self, request: DecodeRequest, block_ids: Sequence[int], first_tokens: Sequence[Tokens], now: float
    ) -> None:
        """The pulled blocks are valid: the request's choices continue after their first tokens."""
        self.entrance.settled(request)
        self.sequences.begin(request, block_ids, first_tokens, now)

    def computed(self, request: DecodeRequest, first_tokens: Sequence[Tokens], now: float) -> None:
        """The last chunk of the request's prompt is done: its choices continue after their first tokens."""
        prompt = self.prompts.take(request)
        assert prompt is not None, request.story
        self.sequences.begin(request, prompt.block_table, first_tokens, now)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float, before: Step | None = None, *, may_draft: bool = True) -> Step:
        """The next step. Call it after the pool's `step_started`: blocks that this step still reads, for copies and
        swaps, are not used again before it has finished.

        `before` is the step that still runs, or None. `may_run_ahead` must have allowed it. Without `may_draft`
        nothing is drafted, nor while a suspect is on trial.
        """
        step = Step(copies=self.sequences.take_copies())
        self.swap.next_step()
        if self._policy.prefill_priority and self.prompts.any_left:
            prompts_only = self.trials.permitted(self.prompts, _key_of, now)
            most = self.prompts.budget((), self._policy.token_budget, now)  # whoever decodes waits, however long it is
            step.chunks = self.prompts.plan(most, now, prompts_only)
            return step
        ahead: frozenset[DecodeChoice] = frozenset() if before is None else frozenset(before.decodes)
        if not self.bound.fixed:
            most = self.bound.num
            self.bound.update([*self.batch.running(), *self.batch.ready()])
            if self.bound.num > most:
                self.entrance.look_again()
        joined = self.sequences.next_step(now, ahead)
        if joined:  # those that are ready to join count as about to grow
            self.entrance.look_again()
        self.preemption.relieve(step, now)
        idle = self.batch.ending | {choice for choice in self.entrance.unmasked if choice in self.batch}
        sitting_out = self._grow(step, now, idle) | idle
        step.decodes = self.batch.running()
        if sitting_out:
            step.decodes = [choice for choice in step.decodes if choice not in sitting_out]
        parts: Iterable[DecodeChoice | LocalPrompt] = chain(step.decodes, self.prompts)
        permitted = self.trials.permitted(parts, _key_of, now)
        if permitted is not None:
            step.decodes = list(filter(permitted, step.decodes))
        self._swap_in(step, joined)
        left = max(0, self._policy.token_budget - len(step.decodes))
        if self.prompts.any_left:
            # Who waits for a mask or a block is to be in the next step, so this one must not be long for it either.
            decoding = [each for each in self.batch.running() if each not in self.batch.ending]
            if permitted is not None:
                decoding = list(filter(permitted, decoding))
            step.chunks = self.prompts.plan(self.prompts.budget(decoding, left, now), now, permitted)
            left -= sum(chunk.end - chunk.start for chunk in step.chunks)
        if self.speculation is not None and may_draft and before is None and not self.trials:
            plan = self.speculation.plan(step.decodes, left)
            step.drafts = self._with_room(plan.tokens)
            step.draft_work = self.speculation.draft_work(step, plan, self._admission.num_left)
        return step

    def may_run_ahead(self, step: Step) -> bool:
        """Whether the next step may be scheduled while `step`, the last one, runs: it moves no blocks, and no mask
        depends on the tokens that it samples, nor a draft that is likely to pay.

        If `step` has chunks, no prompt may have tokens left after them. Otherwise the next step would have chunks, too,
        and a request that arrives meanwhile would wait for two long steps. Nor may blocks be lacking: these prompts
        could lose theirs, and what is being computed with them. Sequences that begin with `step` join the step after
        the next one.
        """
        drafts = step.drafts or step.draft_work is not None
        plain = not (drafts or step.copies or step.swap_outs or step.swap_ins)
        masked = self.batch.masked
        if not plain or self.trials or (masked and masked.intersection(step.decodes)):
            return False
        has_room = self._num_spare > 0
        if step.chunks and (self.prompts.any_left or self.entrance.has_pressure or not has_room):
            return False
        if self.speculation is None or not has_room:
            return True
        running = [choice for choice in step.decodes if choice in self.batch]  # the others have ended meanwhile
        return not self.speculation.would_draft(running, self._admission.num_left)

    def chunks_done(self, chunks: Sequence[Chunk[LocalPrompt]]) -> list[Chunk[LocalPrompt]]:
        """Account for the chunks of a finished step; returns those of prompts that are still computed here."""
        live = self.prompts.step_done(chunks)
        for chunk in live:
            work = chunk.prompt.request.work
            if chunk.prompt.choice is None:  # a tenant does not pay for recomputation
                request = chunk.prompt.request
                self.entrance.waiting.charge(
                    work.tier, work.tenant, max(0, chunk.end - max(chunk.start, request.num_charged))
                )
                request.num_charged = max(chunk.end, request.num_charged)
                full = slice(chunk.start // self._block_size, chunk.end // self._block_size)
                self._pool.name(chunk.prompt.block_table[full], request.chain.hashes[full])
        return live

    def forget(self, request: DecodeRequest, *, by_client: bool = False) -> None:
        """Remove the request, whatever its state. The blocks of a pull are released by the pull's owner.

        `by_client`: its client asked for its end (a stop string, say). Then its present length is added to the observed
        lengths.
        """
        self.trials.discard(request.key)
        self.entrance.forget(request)
        for choice in request.choices:
            self.sequences.remove(choice, by_client=by_client)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.batch.check_invariants()
        self.entrance.check_invariants()
        self.prompts.check_invariants()
        self._admission.check_invariants()
        self.sequences.check_invariants()
        entrance, prompts = self.entrance, self.prompts
        assert all(request.state is RequestState.COMPUTING for request in prompts.of_requests)
        begin = (*entrance.reserved, *prompts.of_requests)
        booked = {(request, index) for request in begin for index in request.work.choices}
        holders = [*self.batch.running(), *self.batch.ready(), *prompts.of_sequences]
        assert booked | {choice.key for choice in holders} == set(self._admission.keys())
        living = {*self.batch.running(), *self.batch.ready(), *entrance.preempted}
        assert entrance.unmasked <= living, "nobody asks while it is computed again, or has ended"

    # --- a step's parts ------------------------------------------------------------------------------------------

    def _swap_in(self, step: Step, joined: Sequence[DecodeChoice]) -> None:
        """Swap in the blocks of sequences that have joined, except those that were preempted in the same step."""
        for choice in joined:
            if choice in self.batch and choice.host_slots:
                step.swap_ins += self.swap.swap_in(choice)

    @property
    def _num_spare(self) -> int:
        """Free blocks beyond those that the next tokens of all need."""
        return self._pool.num_free - self.batch.num_due_next - self.batch.num_ready

    def _can_spare(self, blocks: Sequence[int]) -> bool:
        """Whether these cached blocks can be lent without taking free blocks that running sequences may need."""
        return self._pool.num_unreferenced(blocks) <= max(0, self._num_spare)

    def _with_room(self, drafts: dict[DecodeChoice, list[int]]) -> dict[DecodeChoice, list[int]]:
        """The drafts, as far as there are blocks for them: those that the sequences have, and free ones beyond what the
        next tokens of all need."""
        if not drafts:
            return drafts
        num_free = self._num_spare
        for choice, draft in drafts.items():
            num_tokens, table = choice.sequence.num_tokens, choice.sequence.block_table
            num_lacking = self._policy.blocks_for(num_tokens + len(draft)) - len(table)
            given = self._pool.allocate(max(0, min(num_lacking, num_free)))
            table.extend(given)
            num_free -= len(given)
            del draft[len(table) * self._block_size - num_tokens :]
        return {choice: draft for choice, draft in drafts.items() if draft}

    def _grow(self, step: Step, now: float, idle: set[DecodeChoice]) -> set[DecodeChoice]:
        """Give each sequence that is due, and not `idle`, its next block. Sequences for which there is no block sit
        this step out; newer ones of lower tiers are preempted, so that there will be blocks."""
        due = self.batch.due()
        if idle:
            self.batch.sit_out(idle.intersection(due))
            due = [choice for choice in due if choice not in idle]
        num_blocks = min(len(due), self._pool.num_free)
        if num_blocks < len(due):
            due.sort(key=seniority)
        fed, lacking = due[:num_blocks], due[num_blocks:]
        for choice, block in zip(fed, self._pool.allocate(num_blocks), strict=True):
            choice.sequence.block_table.append(block)
        self.batch.fed(fed)
        sitting_out = self.preemption.make_room(lacking, step, now) if lacking else set()
        self.batch.sit_out(sitting_out)
        return sitting_out


def _key_of(part: DecodeChoice | LocalPrompt) -> RequestKey:
    return part.request.key
