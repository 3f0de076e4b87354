"""Admission: decides whether a sequence has room, in blocks and in places, now and until all present sequences have
ended.

A forecast is used, not the worst case: a sequence is expected to be as long as recent ones of its tier. A sequence that
outlives its expected end gets a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.contract.messages.gateway import Decode
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from decode_worker.batch_bound import BatchBound
from decode_worker.calendar import Calendar
from decode_worker.forecast import Forecast
from decode_worker.output_profile import OutputProfile
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, DecodeRequest

_GOLDEN = 0.6180339887498949
"""Golden ratio less 1. Its multiples, modulo 1, are spread evenly, however many there are."""
Newcomer = tuple[int, int]
"""(steps that a sequence is expected to take, blocks that only it will hold)."""
Key = tuple[DecodeRequest, int]
"""(request, choice): a sequence that holds blocks."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """The room that a request, or a preempted sequence, asks for."""

    rank: int
    """That of its tier. Lower tiers must make room for it."""
    num_new: int
    """Blocks that it lacks."""
    held: Sequence[int]
    """Cached blocks that it uses."""
    headroom: int
    """Blocks that are left for the present sequences."""
    newcomers: Sequence[Newcomer]


def quantile_of(order: int) -> float:
    """Place of the `order`-th sequence in the distribution of output lengths, in [0, 1)."""
    return (order + 1) * _GOLDEN % 1.0


class Admission:
    """The sequences that hold blocks, and when each is expected to end."""

    def __init__(self, pool: BlockPool, policy: Policy, bound: BatchBound) -> None:
        self._pool = pool
        self._policy = policy
        self._limit = int(pool.num_blocks * (1 - policy.memory_reserve))
        self._bound = bound
        self._forecast: Forecast[Key] = Forecast(policy.block_size)
        self._profile = OutputProfile()
        self._expected_ends: Calendar[DecodeChoice] = Calendar()
        """Growing sequences by the step by which they are expected to have ended."""
        self._num_admitted = [0] * len(Tier)
        """Sequences that hold blocks, by the rank of their tier."""

    def keys(self) -> list[Key]:
        """Every sequence that holds blocks."""
        return list(self._forecast)

    def num_expected(self, step: int) -> int:
        """Forecast of the most blocks in use from now on."""
        return self._forecast.peak(step, self._pool.num_used)

    def num_places(self, step: int) -> int:
        """Estimated number of sequences like the present ones that would have room at once; at least 1."""
        num, expected = len(self._forecast), self.num_expected(step)
        if not num or not expected:
            return self._bound.num
        return max(1, min(self._bound.num, num * self._limit // expected))

    def any_below(self, rank: int) -> bool:
        """Whether sequences of a lower tier hold blocks."""
        return any(self._num_admitted[rank + 1 :])

    def has_places(self, rank: int, num: int) -> bool:
        """Whether `num` more sequences of this tier may hold blocks. Sequences of lower tiers do not count."""
        admitted = sum(self._num_admitted[: rank + 1])
        return admitted == 0 or admitted + num <= self._bound.num_holding

    def has_places_at_once(self, rank: int, num: int) -> bool:
        """Whether `num` more sequences of this tier would have places in the batch, even if all that hold blocks ran.
        Sequences of lower tiers do not count."""
        return sum(self._num_admitted[: rank + 1]) + num <= self._bound.num

    def num_lacking(self, step: int, asked: Pressure, *, freed: int = 0, ending: int = 0) -> int:
        """Number of blocks that are lacking, now or later, before there is the room `asked` for; at most 0 if there is.

        If there are no present sequences, the blocks need only be free now. `freed` blocks, which were released, and
        `ending`, which will be, are free once the steps in flight have ended.
        """
        pool = self._pool
        lacking = asked.num_new + pool.num_unreferenced(asked.held) - pool.num_free - freed - ending
        if not len(self._forecast) or lacking + asked.headroom > 0:
            return lacking + (asked.headroom if len(self._forecast) else 0)
        # Held blocks without a reference will be in use, too, even those that a step in flight keeps from being free.
        used = pool.num_used + asked.num_new + sum(pool.ref_count(block) == 0 for block in asked.held)
        if self._forecast.most(step, used, asked.newcomers) <= self._limit:
            return 0
        return self._forecast.peak(step, used, asked.newcomers) - self._limit - ending

    def enter(self, key: Key, newcomer: Newcomer) -> None:
        """A sequence for which there was room holds blocks."""
        num_steps, num_private = newcomer
        self._forecast.hold(key, num_steps=num_steps, num_private=num_private)
        self._num_admitted[key[0].work.tier.rank] += 1

    def found(self, request: DecodeRequest, num_blocks: int) -> None:
        """A request that has not begun, and holds blocks, got `num_blocks` cached ones in place of its own."""
        held = {(request, index): self._forecast.held((request, index)) for index in request.work.choices}
        key, (num_steps, num_private) = max(held.items(), key=lambda item: item[1][1])  # it has the prompt's blocks
        self._forecast.remove(key)
        self._forecast.hold(key, num_steps=num_steps, num_private=num_private - num_blocks)

    def leave(self, key: Key) -> None:
        """A sequence that has not begun holds no blocks any more, or gets none; for one that has, see `leave_begun`."""
        self._forecast.remove(key)
        self._num_admitted[key[0].work.tier.rank] -= 1

    def leave_begun(self, choice: DecodeChoice) -> None:
        """A sequence that has begun holds no blocks any more."""
        self._expected_ends.discard(choice)
        self.leave(choice.key)

    def joined(self, choice: DecodeChoice, step: int) -> None:
        """A sequence that holds blocks joins the batch: from now on it grows, and its end is expected by its
        progress."""
        _, num_private = self._forecast.held(choice.key)
        end_step = step + self.num_left(choice)
        self._forecast.put(choice.key, step=step, end_step=end_step, num_private=num_private)
        self._expected_ends.put(end_step, (choice,))

    def advanced(self, choice: DecodeChoice, num_tokens: int, step: int) -> None:
        """A running sequence got `num_tokens` more than one in `step`, the last one: it is expected to end sooner."""
        end_step = max(self._expected_ends[choice] - num_tokens, step + 1)
        self._expected_ends.discard(choice)
        self._expected_ends.put(end_step, (choice,))
        self._forecast.move(choice.key, end_step, num_tokens)

    def paused(self, choice: DecodeChoice, step: int, num_private: int) -> None:
        """A running sequence waits for a place again, and does not grow."""
        self._expected_ends.discard(choice)
        self._forecast.stop(choice.key, step=step, num_private=num_private)

    def ended(self, choice: DecodeChoice) -> None:
        """A sequence has ended as its client wanted: add its length to the lengths that predict others."""
        self._profile.observe(choice.request.work.tier, choice.sequence.num_output)

    def look_again(self, step: int) -> None:
        """Give a new expected end to sequences that were expected to have ended before `step`, and have not."""
        for choice in self._expected_ends.take(step):
            # With its old quantile, a sequence would be expected to end just above its present length again and again.
            choice.quantile = (choice.quantile + _GOLDEN) % 1.0
            # Less than a block's worth of steps would not change the forecast.
            end_step = step + max(self.num_left(choice), self._policy.block_size)
            self._forecast.move(choice.key, end_step)
            self._expected_ends.put(end_step, (choice,))

    def steps_left(self, work: Decode, num_tokens: int, quantile: float) -> int:
        """Number of further steps that a sequence of `num_tokens` tokens is expected to take; at least 1."""
        num_output = num_tokens - work.prompt_len
        most = min(work.sampling.max_tokens, self._policy.max_sequence_tokens - work.prompt_len)
        return max(1, self._profile.predict(work.tier, num_output, quantile, most) - num_output)

    def num_left(self, choice: DecodeChoice) -> int:
        """Number of tokens that a sequence is expected to get still; at least 1."""
        return self.steps_left(choice.request.work, choice.sequence.num_tokens, choice.quantile)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        by_rank = [0] * len(Tier)
        for request, _ in self.keys():
            by_rank[request.work.tier.rank] += 1
        self._expected_ends.check_invariants()
        assert by_rank == self._num_admitted, (by_rank, self._num_admitted)
