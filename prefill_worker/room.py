"""Inputs of the prefill scheduler's decisions.

`TierHoldings` bounds the blocks that each tier may hold; `Horizon` bounds how far ahead of the engine prompts are
admitted; `worth_waiting_for` names the prompts that compute what another one needs; `Backlog` counts the work that
stands before a prompt. Pure state, for one scheduler.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from common.contract.ids import RequestKey
from common.contract.messages.fields import MAX_TOKENS
from common.contract.tiers import Tier
from common.scheduling.chunked_prefill import Prompt, Urgency
from common.scheduling.costs import Costs, sum_depths
from prefill_worker.request import PrefillRequest

MOST_OF_POOL = {Tier.STANDARD: 7 / 8, Tier.BATCH: 3 / 4}
"""Largest share of the pool that a tier, together with those below it, may hold, in prompts that are computed and in
offers that wait for decode workers. So an interactive prompt finds room even if offers of lower tiers, which nobody
reads, fill the rest."""


class TierHoldings:
    """The blocks that the requests of each tier hold, from admission until the request is given up, or, if it was
    computed, until its lease ends.

    A block counts once in a tier and in those above it, however many requests share it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = {tier: int(num_blocks * share) for tier, share in MOST_OF_POOL.items()}
        self._holders = {tier: [0] * num_blocks for tier in MOST_OF_POOL}
        """Tier → for each block, the number of requests of this or a lower tier that hold it."""
        self._num_blocks = dict.fromkeys(MOST_OF_POOL, 0)
        self._num_requests = dict.fromkeys(Tier, 0)
        self._holdings: dict[RequestKey, tuple[Tier, tuple[int, ...]]] = {}

    def has_room(self, tier: Tier, cached: Sequence[int], num_new: int) -> bool:
        """Whether a request of `tier` may hold the blocks `cached` and `num_new` more.

        A request without others of its tier always may: whatever fits into the pool is served in the end.
        """
        if self._num_requests[tier] == 0:
            return True
        for limited in _counted_in(tier):
            holders = self._holders[limited]
            num_left = self._most[limited] - self._num_blocks[limited] - num_new
            if num_left < len(cached) and num_left < sum(holders[block] == 0 for block in cached):
                return False
        return True

    def begin(self, key: RequestKey, tier: Tier, blocks: Iterable[int]) -> None:
        """A request was admitted with these blocks."""
        held = tuple(blocks)
        self._holdings[key] = tier, held
        self._num_requests[tier] += 1
        for limited in _counted_in(tier):
            holders = self._holders[limited]
            for block in held:
                self._num_blocks[limited] += holders[block] == 0
                holders[block] += 1

    def end(self, key: RequestKey) -> None:
        """The request was given up, or its lease has ended. A lease ends only after its request was computed or given
        up. Does nothing if the request holds nothing."""
        if key not in self._holdings:
            return
        tier, blocks = self._holdings.pop(key)
        self._num_requests[tier] -= 1
        for limited in _counted_in(tier):
            holders = self._holders[limited]
            for block in blocks:
                holders[block] -= 1
                self._num_blocks[limited] -= holders[block] == 0

    def keys(self) -> Collection[RequestKey]:
        """The requests that hold blocks."""
        return self._holdings.keys()

    def check_invariants(self, tables: Mapping[RequestKey, Sequence[int]]) -> None:
        """Assert that the counts are right, and that each request of `tables` holds the blocks of its table."""
        for tier, holders in self._holders.items():
            held = Counter(b for by, blocks in self._holdings.values() if by.rank >= tier.rank for b in blocks)
            assert all(num == held[block] for block, num in enumerate(holders))
            assert self._num_blocks[tier] == len(held)
        assert self._num_requests == {tier: sum(by is tier for by, _ in self._holdings.values()) for tier in Tier}
        assert all(self._holdings[key][1] == tuple(table) for key, table in tables.items())


def _counted_in(tier: Tier) -> list[Tier]:
    return [limited for limited in MOST_OF_POOL if limited.rank <= tier.rank]


class Horizon:
    """The most urgent ones of some prompts with blocks, as many as the next steps can give a chunk.

    A less urgent prompt would hold blocks without being computed. If it is admitted later, more of its prefix may be
    cached, and another tenant's prompt may come first. Prompts on hold count with all that they lack now, though a pull
    brings most of it: they hold blocks for all of it.
    """

    def __init__(self, prompts: Iterable[Prompt], first_rank: int, num_tokens: int, chunk_size: int) -> None:
        """`prompts` are in order of urgency; tiers of a rank below `first_rank` are ignored."""
        self._first_rank = first_rank
        self._num_tokens = num_tokens
        self._chunk_size = chunk_size
        self._heap: list[tuple[float, float, float, int]] = []
        """Negated urgency of each prompt and tokens of its next chunk; the least urgent prompt comes first."""
        self._num_within = 0
        for prompt in prompts:
            if self._num_within >= num_tokens:
                break
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Add an admitted prompt."""
        rank, deadline, order = prompt.urgency
        if rank < self._first_rank:
            return
        size = min(len(prompt.token_ids) - prompt.num_computed, self._chunk_size)
        heapq.heappush(self._heap, (-rank, -deadline, -order, size))
        self._num_within += size
        while self._num_within - self._heap[0][3] >= self._num_tokens:
            self._num_within -= heapq.heappop(self._heap)[3]

    def reaches(self, urgency: Urgency) -> bool:
        """Whether a prompt of this urgency, if admitted now, would be among them."""
        rank, deadline, order = urgency
        return self._num_within < self._num_tokens or (-rank, -deadline, -order) > self._heap[0][:3]


def worth_waiting_for(
    request: PrefillRequest, urgency: Urgency, running: Iterable[PrefillRequest], block_size: int, costs: Costs
) -> Iterator[tuple[PrefillRequest, int]]:
    """The prompts of `running` that are about to compute blocks which `request` needs after those that are cached, each
    with the number of leading tokens of `request` that are in full blocks then.

    These blocks must save the fixed time of a step. And the other prompt must come soon: before `request`, which would
    have `urgency`, or due later by no more than the time that is saved; so no prompt of a lower tier is one.
    """
    num_cached = request.num_cached // block_size
    num_useful = (len(request.token_ids) - 1) // block_size
    if num_cached >= num_useful or request.work.prompt_logprobs is not None:
        return
    rank, deadline, number = urgency
    for other in running:
        if other.num_computed < (num_cached + 1) * block_size:
            num_alike = request.num_alike(other, num_cached)
            saved_s = costs.prompt_s(num_cached * block_size, (num_cached + num_alike) * block_size)
            if num_alike and saved_s >= costs.step_s and other.urgency <= (rank, deadline + saved_s, number):
                yield other, min(num_cached + num_alike, num_useful) * block_size


class Backlog:
    """Tokens to be computed, by tier and by the length of their prompts, in powers of two."""

    def __init__(self) -> None:
        self._num_tokens, self._depth_sums = ([[0] * (MAX_TOKENS.bit_length() + 1) for _ in Tier] for _ in range(2))

    def add(self, request: PrefillRequest) -> None:
        """Add what is left of a prompt, which had `request.length` tokens to compute when it was enqueued."""
        self.change(request, *request.uncomputed)

    def remove(self, request: PrefillRequest) -> None:
        """Subtract what is left of a prompt."""
        start, end = request.uncomputed
        self.change(request, end, start)

    def change(self, request: PrefillRequest, start: int, end: int) -> None:
        """Add tokens `[start, end)` of a prompt; if `end` comes first, subtract `[end, start)`."""
        rank, bits = request.tier.rank, request.length.bit_length()
        self._num_tokens[rank][bits] += end - start
        self._depth_sums[rank][bits] += sum_depths(start, end)

    def seconds_before(self, tier: Tier, length: int, costs: Costs) -> float:
        """Seconds to compute what comes before a new prompt of this length: all of higher tiers, and prompts of its
        tier that are not longer (in powers of two)."""
        rank, end = tier.rank, length.bit_length() + 1
        num_tokens, depth_sum = (
            sum(map(sum, table[:rank])) + sum(table[rank][:end]) for table in (self._num_tokens, self._depth_sums)
        )
        return costs.work_s(num_tokens, depth_sum)

    def seconds(self, costs: Costs) -> float:
        """Seconds to compute all of them, without the fixed time of steps."""
        return costs.work_s(self.num_tokens, sum(map(sum, self._depth_sums)))

    def of(self, tier: Tier) -> int:
        """Tokens of the prompts of a tier."""
        return sum(self._num_tokens[tier.rank])

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(sum, self._num_tokens))

    def check_invariants(self, requests: Iterable[PrefillRequest]) -> None:
        """Assert that what is left of these, and nothing else, is counted."""
        counted = Backlog()
        for request in requests:
            counted.add(request)
        assert self._num_tokens == counted._num_tokens
        assert self._depth_sums == counted._depth_sums
