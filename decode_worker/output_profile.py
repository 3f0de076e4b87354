"""How long answers are: lengths seen lately, by tier, and what they say of a sequence that is still going.

The estimate is that of "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025), section 3: the
length of a running sequence is drawn from the recent lengths that exceed what it has already produced. The draw is
fixed for each sequence (its *rank*), so that a forecast does not change unless something happened.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from common.contract.tiers import Tier

WINDOW = 512
"""Lengths remembered for each tier."""
_ENOUGH = 32
"""Lengths after which the guess that knows nothing has no weight any more."""


class OutputProfile:
    """The distribution of output lengths, in tokens, of each tier."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._recent: dict[Tier, deque[int]] = {tier: deque() for tier in Tier}
        self._sorted: dict[Tier, list[int]] = {tier: [] for tier in Tier}

    def observe(self, tier: Tier, num_output: int) -> None:
        """A sequence has ended with `num_output` tokens of output."""
        recent, ordered = self._recent[tier], self._sorted[tier]
        if len(recent) == self._window:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(num_output)
        insort(ordered, num_output)

    def predict(self, tier: Tier, num_output: int, rank: float, max_output: int) -> int:
        """Tokens of output at which a sequence that has produced `num_output` will end.

        `rank`, in [0, 1), is its place among the lengths that are still possible. Without lengths every one up to
        `max_output` counts as equally likely. The answer is above `num_output` unless `max_output` is not.
        """
        if num_output >= max_output:
            return max_output
        ordered = self._sorted[tier]
        blind = num_output + 1 + int(rank * (max_output - num_output))
        if not ordered:
            return min(blind, max_output)
        above = bisect_right(ordered, num_output)
        possible = len(ordered) - above
        # Longer than anything lately: as long again as it already is.
        known = ordered[above + int(rank * possible)] if possible else 2 * num_output + 1
        weight = max(0.0, 1 - len(ordered) / _ENOUGH)
        return min(max_output, max(num_output + 1, round(weight * blind + (1 - weight) * known)))
