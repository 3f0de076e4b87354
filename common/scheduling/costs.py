"""What steps, prompts and swaps cost an engine: how many prompt tokens ride with decodes, and how a preempted sequence
comes back, is decided by it.

A step takes a fixed time, and more for each token. A token attends to those before it, so it takes longer the deeper it
is in its prompt. The price of a token that is learnt, and told to others, leaves out its depth: otherwise a long prompt
would make all others look dear. Tokens that are computed again ride in steps that run anyway, or fill them, so only the
time of the tokens is counted. For a single short prompt this leaves out the fixed time of one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIN_OBSERVED_TOKENS = 16
"""Fewest tokens of a prefill from which the cost per token is estimated. With fewer, the fixed costs outweigh it."""
_OBSERVATION_WEIGHT = 0.1
"""Weight of an observation of `_FULL_WEIGHT_TOKENS` tokens or more."""
_DECODE_WEIGHT = 0.25
"""Weight of an observation of a step with decodes: their number changes from step to step."""
_FULL_WEIGHT_TOKENS = 256
"""Shorter steps say more about their fixed costs than about their tokens, so their weight falls with the square of the
number of tokens."""
_ENOUGH_STEPS, _ENOUGH_TOKENS = 8, 64
DEEP_TOKENS = 4096
"""Depth at which the cost of depth is measured. An error at this depth is put down to depth and to the token itself
alike; at a smaller one more to the token, at a greater one more to depth."""
_MAX_RATIO = 4.0
"""Greatest ratio of one observation to the estimate, and of the estimate to it. Otherwise a process that was stopped
for a while would make prefill look expensive for minutes."""
_MOST_FALL = 16.0
"""Greatest factor by which a token may turn out cheaper than at first. Beyond it, a short step shows that the fixed
time was measured too long, as on a machine that was busy then; tokens would seem free."""


def sum_depths(start: int, end: int) -> int:
    """The sum of the depths of tokens `[start, end)` of a prompt; if `end` comes first, of `[end, start)`, negated."""
    return (end - start) * (start + end - 1) // 2


@dataclass(slots=True, kw_only=True)
class Costs:
    """Estimates for one engine, in seconds. The defaults stand for an engine that was not measured."""

    prefill_s_per_token: float = 1e-3
    """Time per token, in addition to the fixed time of its step: what a token costs that rides in a step."""
    depth_s: float = 0.0
    """Time that a token takes longer for each token before its chunk."""
    step_s: float = 0.0
    """Fixed time of a step: what full steps take beyond the time of their tokens."""
    least_step_s: float = 0.0
    """Time of a step of one decode, measured at start: about what it takes to read the weights once. Where tokens are
    computed more slowly than weights are read, a full step hides it."""
    step_tokens: int = 1
    """Most prompt tokens of a step."""
    decode_s: float = 0.0
    """Time of the last steps with decodes, and before them, beyond that of their prompt tokens."""
    swap_s_per_block: float = 1e-4
    """Time per block in one direction; infinite if there is no swap space."""
    _least_s_per_token: float = field(init=False, repr=False, compare=False)
    _last_s: float = field(init=False, repr=False, compare=False, default=math.inf)
    """What the step before took."""

    def __post_init__(self) -> None:
        self._least_s_per_token = self.prefill_s_per_token / _MOST_FALL

    @property
    def prompt_s_per_token(self) -> float:
        """Time per token of a prompt in full steps, with its part of their fixed time: what a worker tells others, and
        compares with the time to pull a token's KV."""
        return self.prefill_s_per_token + self.step_s / self.step_tokens

    @property
    def enough_tokens(self) -> float:
        """Prompt tokens of a step, at least 64, that take eight times its fixed time: what a further prompt would save
        by sharing it is less than the delay of those before it. Infinite if a token costs nothing."""
        if not self.prefill_s_per_token:
            return math.inf
        return max(_ENOUGH_TOKENS, _ENOUGH_STEPS * self.step_s / self.prefill_s_per_token)

    def token_s(self, depth: float) -> float:
        """Time per token of a chunk with `depth` tokens before it, in addition to the fixed time of its step."""
        return self.prefill_s_per_token + self.depth_s * depth

    def work_s(self, num_tokens: int, depth_sum: int) -> float:
        """Seconds to compute so many tokens whose depths add up to `depth_sum`, without the fixed time of steps."""
        return num_tokens * self.prefill_s_per_token + depth_sum * self.depth_s

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens `[start, end)` of a prompt, without the fixed time of steps. This is some per cent
        too much: the learnt price of a token contains what it takes for the tokens before it in its own chunk."""
        return self.work_s(end - start, sum_depths(start, end))

    def prompt_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens `[start, end)` of a prompt in full steps, with their part of the fixed time."""
        return self.compute_s(start, end) + (end - start) * self.step_s / self.step_tokens

    def tokens_within(self, seconds: float, least: int, most: int, depth: int = 0) -> int:
        """Prompt tokens, at most `most`, of a step that is expected to take at most `seconds` for a chunk with `depth`
        tokens before it; at least `least`, if `most` allows that."""
        token_s, left_s = self.token_s(depth), seconds - self.step_s
        if not token_s or left_s >= most * token_s:
            return most
        return min(most, max(least, int(left_s / token_s)))

    def _bound(self, seconds: float, depth_sum: int) -> float:
        """Lower the estimates that two steps in a row, now one of `seconds`, show to be too high, and return the longer
        one's time. One alone may only look short: on a GPU the next step ends meanwhile if the process hears late of
        the end of one."""
        longer_s, self._last_s = max(seconds, self._last_s), seconds
        self.least_step_s = min(self.least_step_s, longer_s)
        if depth_sum:
            self.depth_s = min(self.depth_s, longer_s / depth_sum)
        return longer_s

    def observe_prefill(self, num_tokens: int, seconds: float, depth_sum: int = 0) -> None:
        """Move the estimates towards an observation: a step that did little else computed `num_tokens` prompt tokens in
        `seconds`. `depth_sum` is the sum of the tokens before each one's chunk (`Chunk.depth_sum`)."""
        longer_s = self._bound(seconds, depth_sum)
        if num_tokens < MIN_OBSERVED_TOKENS:
            return
        old, least = self.prefill_s_per_token, self._least_s_per_token
        weight = _OBSERVATION_WEIGHT * min(1.0, num_tokens / _FULL_WEIGHT_TOKENS) ** 2
        fixed_s = max(0.0, longer_s - num_tokens * least)
        if fixed_s < self.step_s:
            self.step_s += weight * (fixed_s - self.step_s)
        # Normalised least mean squares, with the depth in units of `DEEP_TOKENS`.
        depth = depth_sum / num_tokens
        share, expected = depth / DEEP_TOKENS, self.token_s(depth)
        seen = min(max((seconds - self.step_s) / num_tokens, expected / _MAX_RATIO, least), expected * _MAX_RATIO)
        change = weight * (seen - expected) / (1 + share**2)
        self.prefill_s_per_token = max(least, old + change)
        self.depth_s = max(0.0, self.depth_s + share * change / DEEP_TOKENS)

    def observe_step(self, num_tokens: int, num_decodes: int, seconds: float, depth_sum: int = 0) -> None:
        """Move the estimates towards an observation: a step computed `num_tokens` prompt tokens, whose depths add up to
        `depth_sum`, and one token each of `num_decodes` sequences, and nothing else, in `seconds`.

        A step with decodes moves `decode_s` alone. What the tokens beside them took more than estimated counts as the
        decodes' time, so that `decode_s` and the tokens' estimate always add up to a step.
        """
        if not num_decodes:
            self.observe_prefill(num_tokens, seconds, depth_sum)
            return
        self._bound(seconds, depth_sum)
        seen = max(0.0, seconds - self.work_s(num_tokens, depth_sum))
        if self.decode_s:
            seen = min(seen, _MAX_RATIO * self.decode_s)
        self.decode_s += _DECODE_WEIGHT * (seen - self.decode_s)

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to swap `num_blocks` blocks out and in again."""
        return 2 * num_blocks * self.swap_s_per_block if num_blocks else 0.0
