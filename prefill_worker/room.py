"""Who may have blocks now: what each tier may hold of the pool, and how far ahead of the engine prompts are let in.
What a prompt's turn depends on: how much work stands before it.

Pure state, for one scheduler.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.contract.ids import RequestKey
from common.contract.messages import MAX_TOKENS
from common.contract.tiers import Tier
from common.engine.chunked_prefill import Prompt, Urgency

MOST_OF_POOL = {Tier.STANDARD: 7 / 8, Tier.BATCH: 3 / 4}
"""The share of the pool that a tier, with those below it, may hold: prompts that are computed, and offers that wait for
decode workers. So there is room for an interactive prompt on a worker full of offers of lower tiers that nobody
fetches."""


@dataclass(slots=True)
class _Holding:
    tier: Tier
    blocks: tuple[int, ...]
    done: bool = False
    pinned: bool = True


class TierHoldings:
    """Which blocks the requests of each tier hold, from their admission until they are given up, or, when they have
    been computed, until their leases end.

    A block counts once in a tier, and in those above it, however many of its requests share it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = {tier: int(num_blocks * share) for tier, share in MOST_OF_POOL.items()}
        self._holders = {tier: [0] * num_blocks for tier in MOST_OF_POOL}
        """Tier → how many requests of it, or of those below it, hold each block."""
        self._num_blocks = dict.fromkeys(MOST_OF_POOL, 0)
        self._num_requests = dict.fromkeys(Tier, 0)
        self._holdings: dict[RequestKey, _Holding] = {}

    def has_room(self, tier: Tier, cached: Sequence[int], num_new: int) -> bool:
        """Whether a request of `tier` may hold the blocks `cached` and `num_new` more.

        One that would be the only one of its tier always may: what fits into the pool is served in the end.
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
        """A request is admitted: these are its blocks."""
        holding = self._holdings[key] = _Holding(tier, tuple(blocks))
        self._num_requests[tier] += 1
        for limited in _counted_in(tier):
            holders = self._holders[limited]
            for block in holding.blocks:
                self._num_blocks[limited] += holders[block] == 0
                holders[block] += 1

    def computed(self, key: RequestKey) -> None:
        """The request is done; only its lease keeps its blocks now."""
        holding = self._holdings[key]
        holding.done = True
        if not holding.pinned:
            self.end(key)

    def unpinned(self, key: RequestKey) -> None:
        """The request's lease has ended; inert when it holds nothing."""
        holding = self._holdings.get(key)
        if holding is not None:
            holding.pinned = False
            if holding.done:
                self.end(key)

    def end(self, key: RequestKey) -> None:
        """The request is given up."""
        holding = self._holdings.pop(key)
        self._num_requests[holding.tier] -= 1
        for limited in _counted_in(holding.tier):
            holders = self._holders[limited]
            for block in holding.blocks:
                holders[block] -= 1
                self._num_blocks[limited] -= holders[block] == 0

    def check_invariants(self, tables: Mapping[RequestKey, Sequence[int]]) -> None:
        """Assert that the counts are right, and that the requests with these block tables are those not done."""
        for tier, holders in self._holders.items():
            held = Counter(b for h in self._holdings.values() if h.tier.rank >= tier.rank for b in h.blocks)
            assert all(num == held[block] for block, num in enumerate(holders))
            assert self._num_blocks[tier] == len(held)
        assert self._num_requests == {tier: sum(h.tier is tier for h in self._holdings.values()) for tier in Tier}
        assert all(holding.pinned or not holding.done for holding in self._holdings.values())
        here = {key: holding.blocks for key, holding in self._holdings.items() if not holding.done}
        assert here == {key: tuple(table) for key, table in tables.items()}


def _counted_in(tier: Tier) -> list[Tier]:
    return [limited for limited in MOST_OF_POOL if limited.rank <= tier.rank]


class Horizon:
    """The most urgent prompts of some tiers, as many as the next steps can give a chunk.

    Whoever is less urgent would get blocks now and only sit on them. Later it may find more of its prefix cached, and
    its tenant's turn may have passed to another.
    """

    def __init__(self, prompts: Iterable[Prompt], first_rank: int, num_tokens: int, chunk_size: int) -> None:
        """`prompts` come in order of urgency; the tiers are those from `first_rank` on."""
        self._first_rank = first_rank
        self._num_tokens = num_tokens
        self._chunk_size = chunk_size
        self._heap: list[tuple[float, float, float, int]] = []
        """The prompts' urgencies, negated, and the sizes of their next chunks: the least urgent first."""
        self._num_within = 0
        for prompt in prompts:
            if self._num_within >= num_tokens:
                break
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """One more is let in."""
        rank, deadline, order = prompt.urgency
        if rank < self._first_rank:
            return
        size = min(prompt.num_uncomputed, self._chunk_size)
        heapq.heappush(self._heap, (-rank, -deadline, -order, size))
        self._num_within += size
        while self._num_within - self._heap[0][3] >= self._num_tokens:
            self._num_within -= heapq.heappop(self._heap)[3]

    def reaches(self, urgency: Urgency) -> bool:
        """Whether a prompt of this urgency, let in now, would be among them."""
        rank, deadline, order = urgency
        return self._num_within < self._num_tokens or (-rank, -deadline, -order) > self._heap[0][:3]


class Backlog:
    """Tokens to be computed, by tier and by the length of their prompts, in powers of two."""

    def __init__(self) -> None:
        self._num_tokens = [[0] * (MAX_TOKENS.bit_length() + 1) for _ in Tier]

    def change(self, tier: Tier, length: int, num_tokens: int) -> None:
        """So many more, or fewer, of a prompt that had `length` tokens to compute when it came."""
        self._num_tokens[tier.rank][length.bit_length()] += num_tokens

    def before(self, tier: Tier, length: int) -> int:
        """What stands before a prompt that comes now: all of higher tiers, and of its own what is no longer than it."""
        higher = sum(sum(lengths) for lengths in self._num_tokens[: tier.rank])
        return higher + sum(self._num_tokens[tier.rank][: length.bit_length() + 1])

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return sum(sum(lengths) for lengths in self._num_tokens)

    def check_invariants(self) -> None:
        """Assert that there is nothing less than none."""
        assert all(num >= 0 for lengths in self._num_tokens for num in lengths)
