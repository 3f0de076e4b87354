"""Refuse a request if its first token would come later than its tier allows. Pure.

An early refusal is better than a late answer: the client can go elsewhere or come back when told to, and accepted
requests are served in time. A long prompt is not refused for its own length: only waiting counts against it.

Expected times are inexact, and their error depends on the machine and on its other load. So each accepted request that
had to wait and was late reduces, by one step, the margin: the share of the allowed time that may be spent waiting. The
margin grows back with time. (Additive decrease and increase: lateness becomes rare, not impossible.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from common.contract.errors import Cause
from common.contract.tiers import Tier
from gateway.dispatch.router import Expected
from gateway.serving.generation import Fail

_LEAST_SHARE: Final = 0.5
"""Share of a tier's limit that any prompt may wait, however long the prompt itself takes."""
_LEAST_MARGIN: Final = 0.3
"""Least margin. A smaller one would leave workers idle between prompts and help nobody."""
_MOST_MARGIN: Final = 1.0
"""Initial and largest margin: expected times are trusted until a request is late."""
_STEP: Final = 0.1
_STEPS_PER_S: Final = 0.07
"""Steps of margin regained per second."""


class TtftLimits:
    """The limit of each tier, and the margin by which expected times are trusted."""

    def __init__(self, limits_s: Mapping[Tier, float]) -> None:
        """`limits_s` maps each tier to the most seconds that its first token may be expected to take; 0 means no
        limit."""
        self._limits_s = limits_s
        self._margins = dict.fromkeys(Tier, _MOST_MARGIN)
        self._stepped_at = dict.fromkeys(Tier, -math.inf)

    def margin(self, tier: Tier, now: float) -> float:
        """Fraction of the allowed time that a request of this tier may be expected to wait."""
        back = _STEP * _STEPS_PER_S * max(0.0, now - self._stepped_at[tier])
        return min(_MOST_MARGIN, self._margins[tier] + back)

    def refusal(self, tier: Tier, expected: Expected, now: float) -> Fail | None:
        """The refusal of a request of this tier, or None if it is accepted."""
        limit_s = self._limits_s[tier]
        wait_s = expected.wait_s
        allowed_s = self.margin(tier, now) * max(limit_s - expected.prompt_s, _LEAST_SHARE * limit_s)
        if not limit_s or wait_s <= allowed_s:
            return None
        what = "a prompt's turn" if expected.waits_for_turn else "room in a batch"
        return Fail(
            Cause.CAPACITY,
            f"the workers are busy: {wait_s:.1f} s to wait for {what}, {allowed_s:.1f} s allowed for service "
            f"tier {tier}",
            retry_after_s=math.ceil(wait_s - allowed_s),
        )

    def observe(self, tier: Tier, expected: Expected, ttft_s: float, now: float) -> None:
        """Record that an accepted request has its first token, or ended without one, `ttft_s` after it was opened.

        `expected` is what was expected when it was accepted. Requests accepted before the last step are ignored,
        because that step already covers them.
        """
        limit_s = self._limits_s[tier]
        if not limit_s or ttft_s <= limit_s or now - ttft_s < self._stepped_at[tier]:
            return
        if expected.queue_s <= 0 or expected.prompt_s > _LEAST_SHARE * limit_s:
            return  # waiting is not what made it late
        self._margins[tier] = max(_LEAST_MARGIN, self.margin(tier, now) - _STEP)
        self._stepped_at[tier] = now
