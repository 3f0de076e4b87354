"""Chunked prefill: which tokens of which prompts the next step computes, under one token budget.

A step computes chunks of several prompts, those of the most urgent prompt first. Prompts are ordered by tier, then by
deadline, which the worker's scheduler sets. In a decode worker it is arrival + the tier's target + the time that the
prompt's own uncached tokens take. A prefill worker counts from admission instead of arrival, and adds the time of the
backlog before the prompt. So a short prompt comes before a long one that arrived a little earlier, but later prompts
cannot pass a long one for ever. A lower tier whose oldest prompt has waited for more than `ageing_s` gets an eighth of
each step's budget.

Pure state: no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from common.contract.tiers import Tier
from common.scheduling.costs import Costs
from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import AGED_SHARE, aged

Urgency = tuple[int, float, int]
"""(rank of the tier, deadline, arrival number). The smallest is computed first."""


class Prompt(Protocol):
    """Tokens to be computed. Blocks for all of them are allocated already."""

    num_computed: int
    """Leading tokens whose KV is in the cache."""

    def __hash__(self) -> int:
        """Prompts are hashed, and compared, by identity."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens of the prompt."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed."""

    @property
    def urgency(self) -> Urgency:
        """Its place in the order: unique, and constant while the prompt is queued."""


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk(Generic[P]):
    """Tokens `[start, end)` of a prompt, computed in one step."""

    prompt: P
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.end == len(self.prompt.token_ids)

    @property
    def depth_sum(self) -> int:
        """The sum of its tokens' depths, all of which count as the number of tokens before the chunk."""
        return self.start * (self.end - self.start)


class ChunkQueue(Generic[P]):
    """Prompts that have blocks and uncomputed tokens. They are told apart by identity.

    A step may be scheduled while earlier ones run. The chunks of a prompt are contiguous, and must finish in the order
    in which they were scheduled.
    """

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._order: list[Urgency] = []
        """The urgencies of all prompts, sorted."""
        self._prompts: dict[Urgency, P] = {}
        self._added: tuple[LazyHeap[P], ...] = tuple(LazyHeap() for _ in Tier)
        """Prompts of each rank, the oldest first."""
        self._in_flight: dict[P, list[Chunk[P]]] = {}
        """Prompt → its chunks in unfinished steps, in order."""
        self._owed = [0] * len(Tier)
        """By rank: the part of an aged tier's shares that it has not received yet, in eighths of a token."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, prompt: P) -> bool:
        return self._prompts.get(prompt.urgency) is prompt

    def __iter__(self) -> Iterator[P]:
        """Prompts, the most urgent first."""
        return (self._prompts[urgency] for urgency in self._order)

    def in_flight(self, prompt: P) -> bool:
        """Whether an unfinished step computes a chunk of `prompt`."""
        return prompt in self._in_flight

    def num_unscheduled(self, prompt: P) -> int:
        """Tokens of `prompt` that are neither computed nor in an unfinished step."""
        return len(prompt.token_ids) - self._num_scheduled(prompt)

    @property
    def due_at(self) -> float:
        """The earliest deadline of all prompts; there must be one."""
        firsts = (bisect_left(self._order, (rank,)) for rank in range(len(Tier)))
        return min(self._order[index][1] for index in firsts if index < len(self._order))

    @property
    def next_span(self) -> tuple[int, int]:
        """The tokens `[start, end)` of the most urgent prompt that has some which are neither computed nor in an
        unfinished step; (0, 0) if none has."""
        spans = ((self._num_scheduled(prompt), len(prompt.token_ids)) for prompt in self)
        return next((span for span in spans if span[0] < span[1]), (0, 0))

    def num_within(self, seconds: float, costs: Costs, chunk_size: int, most: int) -> int:
        """Tokens, at most `most`, of the next chunks, of at most `chunk_size`, of the most urgent prompts that are
        expected to take at most `seconds`, without the fixed time of their step."""
        total, depth_sum, seconds = 0, 0, max(0.0, seconds)
        for prompt in self:
            depth = self._num_scheduled(prompt)
            num = min(self.num_unscheduled(prompt), chunk_size, most - total)
            if costs.work_s(total + num, depth_sum + num * depth) > seconds:
                # All at the price of the last ones: a sum of rounded parts could cost a token.
                dearer_s = (total * depth - depth_sum) * costs.depth_s
                return max(total, int((seconds + dearer_s) / costs.token_s(depth)))
            total, depth_sum = total + num, depth_sum + num * depth
            if total == most:
                break
        return total

    def num_up_to_end(self, least: float, chunk_size: int, now: float) -> int:
        """Tokens of the next chunks, of at most `chunk_size`, of the most urgent prompts, up to the first end of a
        prompt at which they are at least `least`. Those of all prompts if there is none, or if an aged tier has a share
        of the step, with which they would not end there."""
        total, shared = 0, self._any_aged(now)
        for prompt in self:
            num_left = self.num_unscheduled(prompt)
            total += min(num_left, chunk_size)
            if 0 < num_left <= chunk_size and total >= least and not shared:
                break
        return total

    def add(self, prompt: P, now: float) -> None:
        """Queue `prompt`, which must have uncomputed tokens and must not be queued. It ages from `now` on."""
        assert prompt.num_uncomputed > 0, prompt
        assert prompt.urgency not in self._prompts, prompt
        insort(self._order, prompt.urgency)
        self._prompts[prompt.urgency] = prompt
        self._added[prompt.urgency[0]].add(prompt, now)

    def remove(self, prompt: P) -> None:
        """Remove `prompt`, even while a step computes it: `step_done` then ignores its chunks. Inert if it is not
        queued."""
        if prompt not in self:
            return
        del self._order[bisect_left(self._order, prompt.urgency)]
        del self._prompts[prompt.urgency]
        self._added[prompt.urgency[0]].discard(prompt)
        self._in_flight.pop(prompt, None)

    def from_rank(self, rank: int) -> Iterator[P]:
        """Prompts of the tier of `rank` and of lower tiers, the most urgent first."""
        return (self._prompts[self._order[index]] for index in range(bisect_left(self._order, (rank,)), len(self)))

    def schedule(
        self,
        token_budget: int,
        chunk_size: int,
        now: float,
        only: Callable[[P], bool] | None = None,
        may_end: Callable[[P], bool] = lambda _: True,
    ) -> list[Chunk[P]]:
        """Schedule the next step: chunks of at most `chunk_size` tokens each and `token_budget` tokens in all, by
        urgency.

        With `only`, chunks are taken only from prompts for which it returns true, and aged tiers get no share. The last
        token of a prompt that would end in the step is left to a later one unless `may_end`.
        """
        sizes: dict[P, int] = {}
        if only is None:
            left = self._fill_shares(sizes, token_budget, chunk_size, now)
            self._fill(sizes, self, left, chunk_size)
        else:
            self._fill(sizes, filter(only, self), token_budget, chunk_size)
        chunks = []
        for prompt in sorted(sizes, key=lambda prompt: prompt.urgency):
            start = self._num_scheduled(prompt)
            end = start + sizes[prompt]
            if end == len(prompt.token_ids) and not may_end(prompt):
                end -= 1
            if end > start:
                chunk = Chunk(prompt, start, end)
                self._in_flight.setdefault(prompt, []).append(chunk)
                chunks.append(chunk)
        return chunks

    def step_done(self, chunks: Sequence[Chunk[P]]) -> list[Chunk[P]]:
        """Record that a step has finished. Removes prompts whose last chunk is done. Returns the step's chunks except
        those of prompts that were removed since the step was scheduled."""
        live = [chunk for chunk in chunks if chunk in self._in_flight.get(chunk.prompt, ())]
        for chunk in live:
            in_flight = self._in_flight[chunk.prompt]
            first = in_flight.pop(0)
            assert first is chunk, "an earlier step is not done"
            if not in_flight:
                del self._in_flight[chunk.prompt]
            if chunk.last:
                self.remove(chunk.prompt)
            chunk.prompt.num_computed = chunk.end
        return live

    def _num_scheduled(self, prompt: P) -> int:
        """Leading tokens of `prompt` that are computed or in an unfinished step."""
        in_flight = self._in_flight.get(prompt)
        return in_flight[-1].end if in_flight else prompt.num_computed

    def _tier(self, rank: int) -> Iterator[P]:
        return takewhile(lambda prompt: prompt.urgency[0] == rank, self.from_rank(rank))

    def _any_aged(self, now: float) -> bool:
        """Whether a tier below the most urgent one gets a share."""
        lower = self._added[self._order[0][0] + 1 :] if self._order else ()
        return any(aged(waiting, now - self._ageing_s) is not None for waiting in lower)

    def _fill_shares(self, sizes: dict[P, int], token_budget: int, chunk_size: int, now: float) -> int:
        """Give each aged tier below the most urgent one its share of the budget. Returns the rest of the budget."""
        left = token_budget
        for rank in range(self._order[0][0] + 1 if self._order else len(Tier), len(Tier)):
            if aged(self._added[rank], now - self._ageing_s) is None:
                self._owed[rank] = 0
                continue
            owed = self._owed[rank] + token_budget
            share = min(owed // AGED_SHARE, left)
            unused = self._fill(sizes, self._tier(rank), share, chunk_size)
            left -= share - unused
            # A fraction of a token, and a share that exceeds the budget, carry over to a later step. An unused share
            # does not.
            self._owed[rank] = 0 if unused else owed - AGED_SHARE * share
        return left

    def _fill(self, sizes: dict[P, int], prompts: Iterable[P], budget: int, most: int) -> int:
        """Distribute `budget` tokens to `prompts`, in order, up to `most` tokens per prompt. Returns the rest of the
        budget."""
        for prompt in prompts:
            if budget == 0:
                break
            size = sizes.get(prompt, 0)
            more = min(self.num_unscheduled(prompt) - size, most - size, budget)
            if more:
                sizes[prompt] = size + more
                budget -= more
        return budget

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._order == sorted(self._prompts), "out of order"
        assert [prompt.urgency for prompt in self] == self._order, "an urgency has changed"
        assert set(self) == {prompt for heap in self._added for prompt in heap}
        assert all(prompt.num_uncomputed > 0 for prompt in self), "a computed prompt stays"
        for prompt, chunks in self._in_flight.items():
            assert prompt in self, "a chunk in flight of a prompt that has left"
            ends = [prompt.num_computed, *(chunk.end for chunk in chunks)]
            assert [chunk.start for chunk in chunks] == ends[:-1], "a prompt has moved under its chunks"
