"""Preemption: whose blocks are taken when others lack them, and what becomes of what they hold.

The newest holder of the lowest tier gives way. A sequence's blocks are swapped to host memory, or dropped and computed
again, whichever costs less time. A request that has no token yet waits again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from common.engine.block_pool import BlockPool
from decode_worker.entrance import Entrance
from decode_worker.local_prompts import LocalPrompts
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, LocalPrompt
from decode_worker.running_batch import RunningBatch, Seniority, seniority
from decode_worker.sequences import Sequences
from decode_worker.step import Step
from decode_worker.swap_space import SwapSpace

Holder = DecodeChoice | LocalPrompt | DecodeRequest
"""A holder of blocks that can be taken: a sequence, a prompt computed here, a request whose pull has read nothing."""


@dataclass(eq=False)
class Preemption:
    """Takes blocks from their holders. Pure state."""

    _pool: BlockPool
    _policy: Policy
    _batch: RunningBatch
    _prompts: LocalPrompts
    _entrance: Entrance
    _swap: SwapSpace
    _sequences: Sequences
    num_recomputed: int = field(init=False, default=0)
    """Preemptions by recompute."""
    num_revoked: int = field(init=False, default=0)
    """Reservations that were taken back before the first read."""

    def relieve(self, step: Step, now: float) -> None:
        """Take from lower tiers the blocks that a waiting request of a higher tier lacks, or is expected to lack later:
        who gives way does not grow either. No holder gives way twice."""
        pressure = self._entrance.take_pressure()
        if pressure is None:
            return
        ending, num_ending = self._batch.ending, self._num_ending
        running = [each for each in self._batch.running() if each not in ending]
        holders = (*running, *self._batch.ready(), *self._prompts, *self._entrance.unread())
        victims = [each for each in holders if _seniority(each)[0] > pressure.rank and not each.gave_way]
        victims.sort(key=_seniority, reverse=True)
        num_freed = 0
        for victim in victims:
            if self._entrance.num_lacking(pressure, num_freed, num_ending) <= 0:
                break
            victim.gave_way = True
            num_freed += self.preempt(victim, step, now)

    def make_room(self, lacking: Collection[DecodeChoice], step: Step, now: float) -> set[DecodeChoice]:
        """Preempt until there will be a block, when this step has ended, for each of `lacking`. Returns those of
        `lacking` that were not preempted themselves."""
        # Blocks that steps in flight, this one included, release, and those of sequences that end.
        num_freed = self._pool.num_limbo + self._num_ending
        while num_freed < sum(choice in self._batch for choice in lacking):
            newest = self._newest()
            assert newest is not None, "those that lack a block are candidates themselves"
            num_freed += self.preempt(newest, step, now)
        return {choice for choice in lacking if choice in self._batch}

    @property
    def _num_ending(self) -> int:
        """Blocks that sequences give back which end with the step before."""
        return sum(self._pool.num_private(each.sequence.block_table) for each in self._batch.ending)

    def _newest(self) -> Holder | None:
        """The newest holder of blocks of the lowest tier, without pulls that have begun to read and sequences that
        end."""
        newest = (self._batch.newest(), self._prompts.newest(), self._entrance.newest_unread())
        return max((each for each in newest if each is not None), key=_seniority, default=None)

    def preempt(self, victim: Holder, step: Step, now: float) -> int:
        """Take the victim's blocks; returns how many are free when this step has ended."""
        if isinstance(victim, DecodeRequest):
            return self._revoke(victim)
        if isinstance(victim, LocalPrompt):
            if victim.choice is None:
                return self._send_back(victim)
            victim = victim.choice
        table = victim.sequence.block_table
        num_freed = self._pool.num_private(table)
        # If it still has host slots, they were not swapped in yet and stay valid. A half recomputed one is dropped.
        if victim.stage is not ChoiceStage.RECOMPUTING and not victim.host_slots:
            num_content = self._policy.blocks_for(victim.sequence.num_computed)
            # With a prefix cache, blocks that others hold, too, will still be cached when it comes back.
            num_shared = len(table) - num_freed if self._pool.prefix_cache else 0
            if self._swap.takes(num_content, num_shared * self._policy.block_size, victim.sequence.num_tokens):
                self._sequences.name(victim)  # their contents are here until the swap, and may be shared
                step.swap_outs += self._swap.swap_out(victim, table[:num_content])
        if victim.host_slots:
            self._swap.num_swapped += 1
        else:
            self.num_recomputed += 1
        self._sequences.take_blocks(victim)
        if not victim.host_slots:
            victim.sequence.num_computed = 0
        self._entrance.stand_by(victim, now)
        return num_freed

    def _send_back(self, prompt: LocalPrompt) -> int:
        """A request whose prompt is computed here, and that has no token yet, waits again. Returns the number of freed
        blocks."""
        request = prompt.request
        num_freed = self._pool.num_private(prompt.block_table) + len(request.fork_blocks)
        self._entrance.forget(request)
        request.started_at = None
        self._entrance.want_again(request)
        self.num_recomputed += 1
        return num_freed

    def _revoke(self, request: DecodeRequest) -> int:
        """A request whose pull has reserved blocks, and read nothing, waits again. Returns the number of freed
        blocks."""
        assert request.pull is not None, request.work
        num_freed = self._pool.num_private(self._entrance.reserved[request]) + len(request.fork_blocks)
        self._pool.release(self._entrance.forget(request))
        request.pull.revoke()
        self._entrance.want_again(request)
        self.num_revoked += 1
        return num_freed


def _seniority(holder: Holder) -> Seniority:
    if isinstance(holder, DecodeRequest):
        return holder.work.tier.rank, holder.order
    if isinstance(holder, LocalPrompt):
        return holder.urgency[0], holder.urgency[2]
    return seniority(holder)
