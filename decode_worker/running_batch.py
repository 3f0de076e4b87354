"""Decides which sequences decode in the next step, and finds those that need a block before it.

Every running sequence advances by one token a step. So, when a sequence gets a block, the step before which it needs
another one is known. A calendar maps each step to the sequences that need a block before it; the others cost nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import AGED_SHARE, aged
from decode_worker.request import Generation, Stage, StageEvent

Seniority = tuple[int, int]


def seniority(generation: Generation) -> Seniority:
    """(rank of the tier, order of admission). The smallest is preempted last and comes back first."""
    return generation.request.work.tier.rank, generation.order


class RunningBatch:
    """At most `max_num_seqs` running sequences, and those that are ready to join."""

    def __init__(self, max_num_seqs: int, block_size: int, ageing_s: float = math.inf) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._ageing_s = ageing_s
        self._most_aged = max(1, max_num_seqs // AGED_SHARE)
        self._running: dict[Generation, Seniority] = {}
        self._ready: LazyHeap[Generation] = LazyHeap()
        self._ready_since: LazyHeap[Generation] = LazyHeap()
        """Ready sequences, the one that has waited longest first."""
        self._aged: set[Generation] = set()
        """Running sequences that got their place because they had waited long. They do not give it up to higher
        tiers."""
        self._newest: LazyHeap[Generation] = LazyHeap()
        """Running sequences, the newest of the lowest tier first."""
        self._due: defaultdict[int, dict[Generation, None]] = defaultdict(dict)
        """Step → running sequences that need a block before it."""
        self._stepped_aside: list[Generation] = []
        self._ahead: Collection[Generation] = ()
        """Sequences whose next token is computed by the step before this one."""
        self.step = 0
        """Number of the step that is being prepared, or was last."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Sequences that wait for a place in the batch."""
        return len(self._ready)

    @property
    def can_join(self) -> bool:
        """Whether a ready sequence would get a place in the next step."""
        first = self._ready.first()
        return first is not None and (len(self._running) < self._max_num_seqs or self._junior_to(first) is not None)

    @property
    def num_due_next(self) -> int:
        """Running sequences that need a block before the next step."""
        return len(self._due.get(self.step + 1, ()))

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._running

    def running(self) -> list[Generation]:
        """The batch, in the order of joining."""
        return list(self._running)

    def ready(self) -> list[Generation]:
        """Sequences that wait for a place."""
        return list(self._ready)

    def add(self, generation: Generation, now: float) -> None:
        """The sequence's blocks are here: it joins as soon as there is a place."""
        generation.enter(StageEvent.READY)
        self._wait(generation, now)

    def _wait(self, generation: Generation, now: float) -> None:
        self._ready.add(generation, seniority(generation))
        self._ready_since.add(generation, now)

    def next_step(self, now: float, ahead: Collection[Generation] = ()) -> list[Generation]:
        """Begin the next step and fill the batch; returns the sequences that have joined. Sequences in `ahead` have one
        more token than is known yet.

        Senior sequences join first, and take the places of sequences of lower tiers. A sequence that has waited beyond
        the ageing time joins before them, as long as at most one place in `AGED_SHARE` was given so.
        """
        self.step += 1
        self._ahead = ahead
        joined = []
        while (generation := self._ready.first()) is not None:
            oldest = aged(self._ready_since, now - self._ageing_s)
            if oldest is not None and len(self._aged) < self._most_aged:
                if len(self._running) < self._max_num_seqs or self._make_place(generation, now):
                    self._aged.add(oldest)
                    generation = oldest
                else:
                    break
            elif len(self._running) >= self._max_num_seqs and not self._make_place(generation, now):
                break
            self._join(generation, now)
            joined.append(generation)
        return joined

    def _join(self, generation: Generation, now: float) -> None:
        self._ready.discard(generation)
        self._ready_since.discard(generation)
        generation.enter(StageEvent.JOIN)
        generation.joined(now)
        self._running[generation] = rank, order = seniority(generation)
        self._newest.add(generation, (-rank, -order))
        self.fed(generation)

    def left(self) -> list[Generation]:
        """Sequences that `next_step` has sent back to wait, in favour of a higher tier."""
        aside, self._stepped_aside = self._stepped_aside, []
        return aside

    def due(self) -> list[Generation]:
        """Running sequences that need another block to take part in this step, senior ones first."""
        due = self._due.pop(self.step, {})
        self.fed(*(each for each in due if not self._lacks(each)))  # it has sat out a step, so it has a slot left
        return sorted((each for each in due if self._lacks(each)), key=self._running.__getitem__)

    def fed(self, *generations: Generation) -> None:
        """The sequences run from this step on with the blocks that they have: enter the steps before which they need
        more."""
        for generation in generations:
            generation.due_step = due_step = self.step + max(0, self._num_slots_left(generation) + 1)
            self._due[due_step][generation] = None

    def sit_out(self, generation: Generation) -> None:
        """A sequence is due and has got no block: it does not take part in this step."""
        generation.due_step = self.step + 1
        self._due[self.step + 1][generation] = None

    def newest(self, ending: Collection[Generation] = ()) -> Generation | None:
        """The newest sequence of the lowest tier among the running and the ready ones, without those in `ending`."""
        running = next((each for each in self._newest.smallest(len(ending) + 1) if each not in ending), None)
        ready = self._newest_ready()
        if running is None or ready is None:
            return running or ready
        return max(running, ready, key=seniority)

    def discard(self, generation: Generation) -> None:
        """A sequence has ended or lost its blocks. Does nothing if it is not here."""
        self._ready.discard(generation)
        self._ready_since.discard(generation)
        self._aged.discard(generation)
        if generation in self._running:
            del self._running[generation]
            self._newest.discard(generation)
            self._due.get(generation.due_step, {}).pop(generation, None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert len(self._running) <= self._max_num_seqs
        assert set(self._newest) == set(self._running)
        assert not set(self._ready) & set(self._running)
        assert set(self._ready) == set(self._ready_since)
        assert self._aged <= set(self._running)
        assert len(self._aged) <= self._most_aged
        for generation in self._running:
            assert generation.stage is Stage.RUNNING, generation.sequence
            assert generation.due_step > self.step, generation.sequence
            assert generation in self._due[generation.due_step], "a sequence has dropped out of the calendar"
        assert sum(map(len, self._due.values())) == len(self._running), "the calendar names one twice, or who is gone"
        assert all(generation.stage is Stage.READY for generation in self._ready)

    def _num_slots_left(self, generation: Generation) -> int:
        """Free token slots beyond its tokens; negative if it lacks a block."""
        sequence = generation.sequence
        num_tokens = len(sequence.token_ids) + (generation in self._ahead)
        return len(sequence.block_table) * self._block_size - num_tokens

    def _lacks(self, generation: Generation) -> bool:
        return self._num_slots_left(generation) < 0

    def _newest_ready(self) -> Generation | None:
        return max(self._ready, key=seniority, default=None)

    def _make_place(self, generation: Generation, now: float) -> bool:
        """Send a running sequence of a lower tier back to wait, with its blocks. Returns whether there was one."""
        newest = self._junior_to(generation)
        if newest is None:
            return False
        self.discard(newest)
        newest.paused(now)
        newest.enter(StageEvent.STEP_ASIDE)
        self._wait(newest, now)
        self._stepped_aside.append(newest)
        return True

    def _junior_to(self, generation: Generation) -> Generation | None:
        """The running sequence that would give its place to `generation`; None if there is none."""
        newest = next((g for g in self._newest.smallest(len(self._aged) + 1) if g not in self._aged), None)
        return None if newest is None or seniority(newest)[0] <= seniority(generation)[0] else newest
