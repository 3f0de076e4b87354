"""Whether there is room for one more: blocks and places, now and until everybody who is here has ended.

Room is judged by a forecast, not by the worst case: sequences are expected to be as long as those of their tier lately
were. A sequence that outlives what was expected of it is judged anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from common.contract.messages import Decode
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from decode_worker.forecast import Forecast
from decode_worker.output_profile import OutputProfile
from decode_worker.policy import Policy
from decode_worker.request import DecodeRequest, Generation

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly, whatever their number."""
Newcomer = tuple[int, int]
"""(steps that a sequence is expected to take, blocks that it alone will hold)."""
Key = tuple[DecodeRequest, int]
"""A request and one of its choices: what there is room for."""


def rank_of(order: int) -> float:
    """The place of the `order`-th sequence in the distribution of output lengths, in [0, 1)."""
    return (order + 1) * _GOLDEN % 1.0


class Admission:
    """Who has been let in, and what is expected of them."""

    def __init__(self, pool: BlockPool, policy: Policy) -> None:
        self._pool = pool
        self._policy = policy
        self._limit = int(pool.num_blocks * (1 - policy.memory_reserve))
        self._places = policy.max_num_seqs + max(2, policy.max_num_seqs // 4)
        """Sequences that may hold blocks: a full batch, and some that are ready when places fall free."""
        self._forecast: Forecast[Key] = Forecast(policy.block_size)
        self._profile = OutputProfile()
        self._outlived: defaultdict[int, dict[Generation, None]] = defaultdict(dict)
        """Step → sequences that grow and are expected to have ended by then."""
        self._num_admitted = [0] * len(Tier)
        """By the rank of their tier."""

    def __len__(self) -> int:
        return len(self._forecast)

    def keys(self) -> list[Key]:
        """Everyone who holds blocks."""
        return list(self._forecast)

    def num_expected(self, step: int) -> int:
        """The most blocks in use from now on, as forecast."""
        return self._forecast.peak(step, self._pool.num_used)

    def num_places(self, step: int) -> int:
        """Sequences like those that are here for which there would be room at once; at least one."""
        num, expected = len(self._forecast), self.num_expected(step)
        if not num or not expected:
            return self._policy.max_num_seqs
        return max(1, min(self._policy.max_num_seqs, num * self._limit // expected))

    def any_below(self, rank: int) -> bool:
        """Whether sequences of a lower tier hold blocks."""
        return any(self._num_admitted[rank + 1 :])

    def has_places(self, rank: int, num: int) -> bool:
        """Whether `num` sequences more of this tier may hold blocks; those of lower tiers are not in their way."""
        admitted = sum(self._num_admitted[: rank + 1])
        return admitted == 0 or admitted + num <= self._places

    def num_lacking(
        self, step: int, *, num_new: int, held: Sequence[int], headroom: int, newcomers: Sequence[Newcomer]
    ) -> int:
        """How many blocks are lacking, now or later, before `newcomers` can have `num_new` of them beside the cached
        ones that they use, `held`; at most 0 if there is room.

        `headroom` blocks are left for those who are here. Whoever would be alone has room if the blocks are free.
        """
        pool = self._pool
        lacking = num_new + pool.num_unreferenced(held) - pool.num_free
        if not len(self._forecast) or lacking + headroom > 0:
            return lacking + (headroom if len(self._forecast) else 0)
        # Those of the cached blocks that nobody uses now will be in use; a step in flight may hold some back from both.
        used = pool.num_used + num_new + sum(pool.ref_count(block) == 0 for block in held)
        if self._forecast.most(step, used, newcomers) <= self._limit:
            return 0
        return self._forecast.peak(step, used, newcomers) - self._limit

    def enter(self, key: Key, newcomer: Newcomer) -> None:
        """Somebody for whom there was room holds blocks."""
        num_steps, num_private = newcomer
        self._forecast.hold(key, num_steps=num_steps, num_private=num_private)
        self._num_admitted[key[0].work.tier.rank] += 1

    def leave(self, key: Key) -> None:
        """It has given its blocks back; one that has generated is to be `left`."""
        self._forecast.remove(key)
        self._num_admitted[key[0].work.tier.rank] -= 1

    def left(self, generation: Generation) -> None:
        """One that generates, or has, has given its blocks back."""
        self._expect_nothing(generation)
        self.leave(generation.key)

    def joined(self, generation: Generation, step: int) -> None:
        """One that holds blocks runs: from now on it grows, and is judged by what it does."""
        _, num_private = self._forecast.held(generation.key)
        end_step = step + self._steps_left(generation)
        self._forecast.put(generation.key, step=step, end_step=end_step, num_private=num_private)
        self._expect_end(generation, end_step)

    def paused(self, generation: Generation, step: int, num_private: int) -> None:
        """One that runs waits for a place again, and does not grow."""
        self._expect_nothing(generation)
        self._forecast.stop(generation.key, step=step, num_private=num_private)

    def ended(self, generation: Generation) -> None:
        """It has come to the end that its client wanted: others will be expected to be as long."""
        self._profile.observe(generation.request.work.tier, generation.sequence.num_output)

    def look_again(self, step: int) -> None:
        """Judge those anew who were expected to have ended before `step`, and have not."""
        for generation in self._outlived.pop(step, ()):
            # Another place among the lengths that are left: the old one is just above it, again and again.
            generation.rank = (generation.rank + _GOLDEN) % 1.0
            # Finer than a block would change nothing.
            end_step = step + max(self._steps_left(generation), self._policy.block_size)
            self._forecast.postpone(generation.key, end_step)
            self._expect_end(generation, end_step)

    def steps_left(self, work: Decode, num_tokens: int, rank: float) -> int:
        """Steps that a sequence of `num_tokens` is expected to take still; at least one."""
        num_output = num_tokens - work.prompt_len
        most = min(work.sampling.max_tokens, self._policy.max_sequence_tokens - work.prompt_len)
        return max(1, self._profile.predict(work.tier, num_output, rank, most) - num_output)

    def _steps_left(self, generation: Generation) -> int:
        return self.steps_left(generation.request.work, generation.sequence.num_tokens, generation.rank)

    def _expect_end(self, generation: Generation, end_step: int) -> None:
        generation.end_step = end_step
        self._outlived[end_step][generation] = None

    def _expect_nothing(self, generation: Generation) -> None:
        awaited = self._outlived.get(generation.end_step, {})
        awaited.pop(generation, None)
        if not awaited:
            self._outlived.pop(generation.end_step, None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        by_rank = [0] * len(Tier)
        for request, _ in self.keys():
            by_rank[request.work.tier.rank] += 1
        assert by_rank == self._num_admitted, (by_rank, self._num_admitted)
