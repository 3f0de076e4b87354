"""Decides which sequences decode in the next step, and finds those that need a block before it.

Every running sequence advances by one token a step, unless drafted tokens of it are right. So, when a sequence gets a
block, the step before which it needs another one is known; and when it joins, the step that computes its last token,
if nothing ends it before. Calendars map these steps to the sequences; the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import AGED_SHARE, aged
from decode_worker.batch_bound import BatchBound
from decode_worker.calendar import Calendar
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, StageEvent

Seniority = tuple[int, int]


def seniority(choice: DecodeChoice) -> Seniority:
    """(rank of the tier, order of admission). The smallest is preempted last and comes back first."""
    return choice.request.work.tier.rank, choice.order


class RunningBatch:
    """The running sequences, at most as many as the bound says when they join, and those that are ready to join."""

    def __init__(self, policy: Policy, bound: BatchBound) -> None:
        self._bound = bound
        self._max_sequence_tokens = policy.max_sequence_tokens
        self._block_size = policy.block_size
        self._ageing_s = policy.ageing_s
        self._running: dict[DecodeChoice, Seniority] = {}
        self._ready: LazyHeap[DecodeChoice] = LazyHeap()
        self._ready_since: LazyHeap[DecodeChoice] = LazyHeap()
        """Ready sequences, the one that has waited longest first."""
        self._aged: set[DecodeChoice] = set()
        """Running sequences that got their place because they had waited long. They do not give it up to higher
        tiers."""
        self._newest: LazyHeap[DecodeChoice] = LazyHeap()
        """Running sequences, the newest of the lowest tier first."""
        self._due: Calendar[DecodeChoice] = Calendar()
        """Running sequences by the step before which they need a block."""
        self._ends: Calendar[DecodeChoice] = Calendar()
        """Running sequences by the step after the one that computes their last token, if it is their length that ends
        them."""
        self.masked: set[DecodeChoice] = set()
        """Running sequences with a grammar: each token decides which ones may follow."""
        self._ahead: Collection[DecodeChoice] = ()
        """Sequences whose next token is computed by the step before this one."""
        self.ending: set[DecodeChoice] = set()
        """Running sequences whose last token is computed by the step before, which still runs. They are in no further
        step, and give way to nobody: their places and blocks come back anyway."""
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
        return first is not None and (len(self._running) < self._bound.num or self._junior_to(first) is not None)

    @property
    def num_due_next(self) -> int:
        """Running sequences that need a block before the next step."""
        return self._due.num_at(self.step + 1)

    def num_kept_from(self, rank: int) -> int:
        """Places of lower tiers that are not given up to a sequence of this one."""
        return sum(seniority(choice)[0] > rank for choice in self._aged)

    def __contains__(self, choice: DecodeChoice) -> bool:
        return choice in self._running

    def running(self) -> list[DecodeChoice]:
        """The batch, in the order of joining."""
        return list(self._running)

    def ready(self) -> list[DecodeChoice]:
        """Sequences that wait for a place."""
        return list(self._ready)

    def add(self, choice: DecodeChoice, now: float) -> None:
        """The sequence's blocks are here: it joins as soon as there is a place."""
        choice.enter(StageEvent.READY)
        self._wait(choice, now)

    def _wait(self, choice: DecodeChoice, now: float) -> None:
        self._ready.add(choice, seniority(choice))
        self._ready_since.add(choice, now)

    def next_step(
        self, now: float, ahead: Collection[DecodeChoice] = ()
    ) -> tuple[list[DecodeChoice], list[DecodeChoice]]:
        """Begin the next step and fill the batch; returns the sequences that have joined, and those that were sent back
        to wait, in favour of a higher tier. Sequences in `ahead` have one more token than is known yet.

        Senior sequences join first, and take the places of sequences of lower tiers. A sequence that has waited beyond
        the ageing time joins before them, as long as at most one place in `AGED_SHARE` was given so.
        """
        self.step += 1
        self._ahead = ahead
        self.ending = self._find_ending()
        joined: list[DecodeChoice] = []
        aside: list[DecodeChoice] = []
        while (choice := self._ready.first()) is not None:
            oldest = aged(self._ready_since, now - self._ageing_s)
            if oldest is not None and len(self._aged) < max(1, self._bound.num // AGED_SHARE):
                if len(self._running) < self._bound.num or self._make_place(choice, aside, now):
                    self._aged.add(oldest)
                    choice = oldest
                else:
                    break
            elif len(self._running) >= self._bound.num and not self._make_place(choice, aside, now):
                break
            self._join(choice, now)
            joined.append(choice)
        return joined, aside

    def _join(self, choice: DecodeChoice, now: float) -> None:
        self._ready.discard(choice)
        self._ready_since.discard(choice)
        choice.enter(StageEvent.JOIN)
        choice.joined(now)
        self._running[choice] = rank, order = seniority(choice)
        self._newest.add(choice, (-rank, -order))
        self._await_block(choice)
        self._ends.put(self.step + max(1, self._num_left(choice)), (choice,))
        if choice.sequence.sampling.grammar is not None:
            self.masked.add(choice)

    def due(self) -> list[DecodeChoice]:
        """Running sequences that need another block to take part in this step. Each must then be `fed` or `sit_out`."""
        due, lacking = self._due.take(self.step), []
        size, ahead = self._block_size, self._ahead
        for choice in due:
            sequence = choice.sequence
            if len(sequence.block_table) * size < len(sequence.token_ids) + (choice in ahead):
                lacking.append(choice)
            else:  # it has sat out a step, so it has a slot left
                self._await_block(choice)
        return lacking

    def fed(self, choices: Collection[DecodeChoice]) -> None:
        """These were due, and each has got the block that it lacked for this step."""
        self._due.put(self.step + self._block_size, choices)

    def sit_out(self, choices: Collection[DecodeChoice]) -> None:
        """These were due, and have got no block: they do not take part in this step."""
        self._due.put(self.step + 1, choices)

    def drafted(self, choice: DecodeChoice) -> None:
        """A draft of a running sequence was verified by the last step: when it needs a block, and ends, has changed."""
        self._due.discard(choice)
        self._ends.discard(choice)
        num_left = len(choice.sequence.block_table) * self._block_size - self._num_tokens(choice)
        self._due.put(self.step + 1 + max(0, num_left + 1), (choice,))
        self._ends.put(self.step + 1 + self._num_left(choice), (choice,))

    def _find_ending(self) -> set[DecodeChoice]:
        ending = set()
        for choice in self._ends.take(self.step):
            num_left = self._num_left(choice)
            if num_left <= 0 and choice in self._ahead:
                ending.add(choice)
            self._ends.put(self.step + max(1, num_left), (choice,))  # one that has sat out steps ends later
        return ending

    def newest(self) -> DecodeChoice | None:
        """The newest sequence of the lowest tier among the running and the ready ones, without those that end."""
        running = self._newest_but(self.ending)
        ready = self._newest_ready()
        if running is None or ready is None:
            return running or ready
        return max(running, ready, key=seniority)

    def discard(self, choice: DecodeChoice) -> None:
        """A sequence has ended or lost its blocks. Does nothing if it is not here."""
        self._ready.discard(choice)
        self._ready_since.discard(choice)
        self._aged.discard(choice)
        self.ending.discard(choice)
        if choice in self._running:
            del self._running[choice]
            self._newest.discard(choice)
            self._due.discard(choice)
            self._ends.discard(choice)
            self.masked.discard(choice)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert len(self._running) <= self._bound.most
        assert set(self._newest) == set(self._running)
        assert not set(self._ready) & set(self._running)
        assert set(self._ready) == set(self._ready_since)
        assert self._aged <= set(self._running)
        assert self.ending <= set(self._running)
        assert len(self._aged) <= max(1, self._bound.most // AGED_SHARE)
        for choice in self._running:
            assert choice.stage is ChoiceStage.RUNNING, choice.sequence
            assert self._due[choice] > self.step, choice.sequence
        for calendar in (self._due, self._ends):
            calendar.check_invariants()
            assert set(calendar) == set(self._running), "a sequence has dropped out of the calendar, or is gone"
        assert all(choice.stage is ChoiceStage.READY for choice in self._ready)

    def _num_tokens(self, choice: DecodeChoice) -> int:
        """The sequence's tokens, with that of the step before."""
        return len(choice.sequence.token_ids) + (choice in self._ahead)

    def _await_block(self, choice: DecodeChoice) -> None:
        """Enter the step before which the sequence needs a block, if it takes part in this step and all that follow."""
        num_left = len(choice.sequence.block_table) * self._block_size - self._num_tokens(choice)
        self._due.put(self.step + max(0, num_left + 1), (choice,))

    def _num_left(self, choice: DecodeChoice) -> int:
        """Number of tokens that the sequence may still get."""
        return choice.sequence.most_tokens(self._max_sequence_tokens) - self._num_tokens(choice)

    def _newest_but(self, spared: Collection[DecodeChoice]) -> DecodeChoice | None:
        """The newest running sequence of the lowest tier that is not `spared`."""
        return next((each for each in self._newest.smallest(len(spared) + 1) if each not in spared), None)

    def _newest_ready(self) -> DecodeChoice | None:
        return max(self._ready, key=seniority, default=None)

    def _make_place(self, choice: DecodeChoice, aside: list[DecodeChoice], now: float) -> bool:
        """Send a running sequence of a lower tier back to wait, with its blocks, and add it to `aside`. Returns whether
        there was one."""
        newest = self._junior_to(choice)
        if newest is None:
            return False
        self.discard(newest)
        newest.paused(now)
        newest.enter(StageEvent.STEP_ASIDE)
        self._wait(newest, now)
        aside.append(newest)
        return True

    def _junior_to(self, choice: DecodeChoice) -> DecodeChoice | None:
        """The running sequence that would give its place to `choice`; None if there is none."""
        newest = self._newest_but(self._aged | self.ending)
        return None if newest is None or seniority(newest)[0] <= seniority(choice)[0] else newest
