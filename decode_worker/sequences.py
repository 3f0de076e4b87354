"""Sequences that have begun: how they begin and end, and the blocks and the service that they have meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.contract.block_hashes import BlockHash
from common.contract.messages.worker import Tokens
from common.engine.block_pool import BlockPool
from common.engine.sequence import TokenSequence
from common.engine.token_counts import token_counts
from decode_worker.admission import Admission, quantile_of
from decode_worker.entrance import Entrance
from decode_worker.local_prompts import LocalPrompts
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, RequestEvent, StageEvent
from decode_worker.running_batch import RunningBatch
from decode_worker.swap_space import SwapSpace

_OUTPUT_CHARGE = 2.0
"""Service of an output token; a computed prompt token counts 1 (VTC, section 3)."""


@dataclass(eq=False)
class Sequences:
    """The sequences of one worker, from their first token to their end. Pure state."""

    _pool: BlockPool
    _policy: Policy
    _admission: Admission
    _batch: RunningBatch
    _prompts: LocalPrompts
    _entrance: Entrance
    _swap: SwapSpace
    _copies: list[tuple[int, int]] = field(init=False, default_factory=list)
    """(block, its copy) of forks: copied by the next step, and referenced until then."""

    # --- beginning -----------------------------------------------------------------------------------------------

    def begin(
        self, request: DecodeRequest, block_ids: Sequence[int], first_tokens: Sequence[Tokens], now: float
    ) -> None:
        """The KV of the request's tokens is here and valid: its choices begin, and share the full blocks. A sequence
        that moved here has more tokens than the request; only the last of them has no KV yet."""
        work = request.work
        token_ids = [*work.token_ids, *first_tokens[0].token_ids[:-1]]
        num_tokens = len(token_ids)
        full = num_tokens // self._policy.block_size
        request.enter(RequestEvent.BEGIN)
        request.begun_at = now
        request.chain.extend(token_ids, num_tokens)
        self._pool.name(block_ids[:full], request.chain.hashes)
        counts = token_counts(work.sampling, token_ids, work.prompt_len) if len(first_tokens) > 1 else None
        for index, first in enumerate(first_tokens):
            table = block_ids if index == 0 else self._fork(request, block_ids, full)
            num_computed = num_tokens if table else 0
            sequence = TokenSequence(
                request.key, first.choice, list(token_ids), work.prompt_len, work.sampling, num_computed, table, counts
            )
            if index == 0 and request.pull is not None and request.grammar_state is not None:
                sequence.grammar_state = request.grammar_state
            choice = DecodeChoice(
                request,
                sequence,
                request.chain if len(first_tokens) == 1 else request.chain.fork(),
                request.order + index,
                quantile_of(request.order + index),
                work.handles[index],
                num_named=full if table else 0,
                first_position=len(work.token_ids),
                began=now,
            )
            logprobs = first.logprobs or (None,)
            choice.logprobs += [each for each in logprobs[:-1] if each is not None]
            choice.append(first.token_ids[-1], logprobs[-1], first.finish_reason)
            request.choices.append(choice)
            if table:
                self._batch.add(choice, now)
            else:
                self._admission.leave(choice.key)
                self._entrance.stand_by(choice, now)
        assert not request.fork_blocks, request.work
        for choice in request.choices:
            if choice.finish_reason is not None:
                self.remove(choice)

    def _fork(self, request: DecodeRequest, block_ids: Sequence[int], full: int) -> list[int]:
        """Blocks of one more choice: the first `full` are shared, the last one is copied by the next step. Empty if
        there is no block for the copy."""
        rest = block_ids[full:]
        if len(request.fork_blocks) < len(rest):
            return []
        copies = [request.fork_blocks.pop() for _ in rest]
        self._copies += zip(rest, copies, strict=True)
        self._pool.share([*block_ids, *copies])
        return [*block_ids[:full], *copies]

    def take_copies(self) -> list[tuple[int, int]]:
        """Block copies, for forks, that the next step must make first. The step keeps their references."""
        copies, self._copies = self._copies, []
        for copy in copies:
            self._pool.release(copy)
        return copies

    def recomputed(self, choice: DecodeChoice, now: float) -> None:
        """The last chunk of a preempted sequence is done: it continues as before."""
        prompt = self._prompts.take(choice)
        assert prompt is not None, choice.sequence
        choice.sequence.num_computed = len(prompt.token_ids)
        self._batch.add(choice, now)

    # --- a step --------------------------------------------------------------------------------------------------

    def next_step(self, now: float, ahead: Collection[DecodeChoice]) -> list[DecodeChoice]:
        """Begin a step: fill the batch, and give a new expected end to sequences that have outlived theirs. Returns the
        sequences that have joined."""
        joined, aside = self._batch.next_step(now, ahead)
        for choice in joined:
            self._flow(choice, _OUTPUT_CHARGE)
            self._admission.joined(choice, self._batch.step)
        for choice in aside:
            self._flow(choice, -_OUTPUT_CHARGE)
            num_private = self._pool.num_private(choice.sequence.block_table)
            self._admission.paused(choice, self._batch.step, num_private)
        self._entrance.waiting.advance(self._batch.step)
        self._admission.look_again(self._batch.step)
        return joined

    def drafted(self, choice: DecodeChoice, num_more: int) -> None:
        """A draft of the sequence was verified by the last step, which gave it `num_more` tokens more than one. Its
        tenant pays for them, too: the flow covers one. Blocks that only wrong tokens needed are given back."""
        work, sequence = choice.request.work, choice.sequence
        self._entrance.waiting.charge(work.tier, work.tenant, _OUTPUT_CHARGE * num_more)
        if choice not in self._batch:
            return
        num_kept = self._policy.blocks_for(sequence.num_tokens)
        if num_kept < len(sequence.block_table):
            self._pool.release(sequence.block_table[num_kept:])
            sequence.block_table = sequence.block_table[:num_kept]
        self._batch.drafted(choice)
        if num_more:
            self._admission.advanced(choice, num_more, self._batch.step)

    def name_running(self) -> None:
        """Enter the full blocks of running sequences into the prefix cache."""
        for choice in self._batch.running():
            self.name(choice)

    def name_again(self, block_hashes: Sequence[BlockHash]) -> None:
        """Give the leading ones of these names to blocks of running sequences that begin so, if no block in use has
        them.

        Two requests with one prompt may have got their KV at once, each in blocks of its own. Those of one request are
        named. When it has ended, its blocks lose the names by eviction, or are copies that nobody uses; these give up
        their names here, and become plain free blocks.
        """
        for choice in self._batch.running():
            if self._swap.holds(choice):
                continue  # its blocks may not have been swapped in yet
            num_full = choice.sequence.num_computed // self._policy.block_size
            names = block_hashes[: _num_equal(block_hashes, choice.chain.hashes[:num_full])]
            copies = [block for block in self._pool.match(names) if self._pool.ref_count(block) == 0]
            self._pool.share(copies)  # what has a reference can be forgotten; without one it is not spoiled any more
            self._pool.forget(copies)
            self._pool.release(copies)
            self._pool.name(choice.sequence.block_table[: len(names)], names)

    # --- the end -------------------------------------------------------------------------------------------------

    def remove(self, choice: DecodeChoice, *, by_client: bool = False) -> None:
        """A sequence has ended or is given up: release its blocks. `by_client`: its client asked for its end."""
        if choice.stage is ChoiceStage.ENDED:
            return
        if by_client or choice.finish_reason is not None:
            self._admission.ended(choice)
        if choice in self._batch:  # charge its last step: the flow covers those before
            work = choice.request.work
            self._entrance.waiting.charge(work.tier, work.tenant, _OUTPUT_CHARGE)
        if choice.stage is ChoiceStage.PREEMPTED:
            self._entrance.preempted.discard(choice)
        else:
            self.take_blocks(choice)
        self._swap.give_back(choice)
        self._ended(choice)

    def leave(self, choice: DecodeChoice) -> list[int]:
        """A running sequence moves to another worker and ends here. Returns the blocks with its KV; the caller owns the
        references. No step may be in flight."""
        assert choice.stage is ChoiceStage.RUNNING, choice.sequence
        sequence = choice.sequence
        blocks = list(sequence.block_table[: self._policy.blocks_for(sequence.num_computed)])
        self._pool.share(blocks)
        self.take_blocks(choice)
        self._ended(choice)
        return blocks

    def _ended(self, choice: DecodeChoice) -> None:
        choice.lookup = None
        choice.enter(StageEvent.END)
        self._entrance.mask_known(choice)
        self._entrance.look_again()

    def take_blocks(self, choice: DecodeChoice) -> None:
        """Take the blocks of a sequence, whatever its state. Its full blocks stay in the prefix cache."""
        sequence = choice.sequence
        self.name(choice)
        if choice in self._batch:
            self._flow(choice, -_OUTPUT_CHARGE)
        self._batch.discard(choice)
        self._prompts.take(choice)
        if choice.draft is not None:
            choice.draft.release()
            choice.draft = None
        self._pool.release(sequence.block_table)
        sequence.block_table = array("q")
        choice.num_named = 0
        self._admission.leave_begun(choice)

    def name(self, choice: DecodeChoice) -> None:
        """Enter the sequence's blocks that have become full into the prefix cache."""
        if self._swap.holds(choice):
            return  # its blocks may not have been swapped in yet
        sequence, chain = choice.sequence, choice.chain
        chain.extend(sequence.token_ids, sequence.num_computed)
        full = slice(choice.num_named, sequence.num_computed // self._policy.block_size)
        self._pool.name(sequence.block_table[full], chain.hashes[full])
        choice.num_named = max(full.start, full.stop)

    def _flow(self, choice: DecodeChoice, change: float) -> None:
        """Change the service that the sequence's tenant receives per step. A tenant pays for places in the batch, also
        for steps that a sequence misses because its mask is late: no other sequence can have the place."""
        work = choice.request.work
        self._entrance.waiting.flow(work.tier, work.tenant, change, self._batch.step)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        holders = [*self._batch.running(), *self._batch.ready(), *self._prompts.of_sequences]
        for choice in holders:
            assert choice.finish_reason is None, choice.sequence
            table = choice.sequence.block_table
            assert all(self._pool.ref_count(block) > 0 for block in table), choice.sequence
            assert len(table) >= self._policy.blocks_for(choice.sequence.num_computed), choice.sequence
        for choice in self._entrance.preempted:
            assert choice.stage is ChoiceStage.PREEMPTED, choice.sequence
            assert not choice.sequence.block_table, choice.sequence
        self._swap.check_invariants((*holders, *self._entrance.preempted))


def _num_equal(names: Sequence[BlockHash], others: Sequence[BlockHash]) -> int:
    """Leading names that both have."""
    pairs = enumerate(zip(names, others, strict=False))
    return next((index for index, (name, other) in pairs if name != other), min(len(names), len(others)))
