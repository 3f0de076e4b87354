"""What it costs to bring a preempted sequence back: computing its KV again, or swapping it out and in.

A step takes a time of its own, and more for each token. What is computed rides in steps that there are anyway, or fills
them, so that the tokens alone are counted; of a single short prompt this leaves out the one step.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_OBSERVED_TOKENS = 16
"""Fewest tokens of a prefill that tell its cost for each: below, the costs of any step outweigh it."""
_OBSERVATION_WEIGHT = 0.1
"""Of an observation of as many tokens as this, or more."""
_FULL_WEIGHT_TOKENS = 256
"""Shorter steps say more of their fixed costs than of their tokens', and weigh less by the square."""
_MAX_RATIO = 4.0
"""Most that one observation counts as, relative to the estimate, either way: a process that was stopped for a while
must not make prefill look dear for minutes."""


@dataclass(slots=True, kw_only=True)
class Costs:
    """Estimates of one engine, in seconds. The defaults stand for an engine that was not measured."""

    prefill_s_per_token: float = 1e-3
    """Beside what the step takes."""
    step_s: float = 0.0
    """What a step takes beside its tokens."""
    swap_s_per_block: float = 1e-4
    """In one direction; infinite when there is no swap space."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that did little else computed `num_tokens` prompt tokens: move the estimate towards it."""
        if num_tokens < MIN_OBSERVED_TOKENS:
            return
        old = self.prefill_s_per_token
        seen = min(max((seconds - self.step_s) / num_tokens, old / _MAX_RATIO), old * _MAX_RATIO)
        weight = _OBSERVATION_WEIGHT * min(1.0, num_tokens / _FULL_WEIGHT_TOKENS) ** 2
        self.prefill_s_per_token = old + weight * (seen - old)

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute the KV of `num_tokens` tokens again."""
        return num_tokens * self.prefill_s_per_token

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to swap `num_blocks` blocks out and in again."""
        return 2 * num_blocks * self.swap_s_per_block if num_blocks else 0.0
