"""Distribution of recent output lengths, by tier, and the length that it predicts for a running sequence.

The estimate is that of "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025), section 3: the
length of a running sequence is drawn from the recent lengths that exceed what it has already produced. The draw is
fixed for each sequence (its *quantile*), so a forecast changes only on events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from common.contract.tiers import Tier

WINDOW = 512
"""Number of lengths remembered for each tier."""
_ENOUGH = 32
"""Number of lengths from which the uniform prior has no weight any more."""


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

    def predict(self, tier: Tier, num_output: int, quantile: float, max_output: int) -> int:
        """Predicted total number of output tokens of a sequence that has produced `num_output`.

        `quantile`, in [0, 1), is the sequence's place among the lengths that are still possible. Without observed
        lengths, each up to `max_output` counts as equally likely. The result is greater than `num_output`, unless
        `num_output` has reached `max_output`.
        """
        if num_output >= max_output:
            return max_output
        ordered = self._sorted[tier]
        blind = num_output + 1 + int(quantile * (max_output - num_output))
        if not ordered:
            return min(blind, max_output)
        above = bisect_right(ordered, num_output)
        possible = len(ordered) - above
        # A sequence longer than all recent ones is expected to double its length.
        known = ordered[above + int(quantile * possible)] if possible else 2 * num_output + 1
        weight = max(0.0, 1 - len(ordered) / _ENOUGH)
        return min(max_output, max(num_output + 1, round(weight * blind + (1 - weight) * known)))
