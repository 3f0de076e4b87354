"""Whether a request is let in: not if its first token would come later than its tier allows. Pure.

Refusing early is kinder than being late: the client can go elsewhere, or come back when it is told to, and what was
let in is served in time. A prompt that takes long by itself is not refused for that: only waiting counts against it.

What is expected is not exact, and how far it is off depends on the machine and on what else runs there. So whoever was
let in, had to wait and was late makes the share of the time allowed that may be waited for smaller, by a step; and the
share comes back with time. (Additive decrease and increase, so that being late becomes rare, and not impossible.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from common.contract.tiers import Tier
from gateway.routing.router import Expected
from gateway.serving.generation import Refusal

_LEAST_SHARE: Final = 0.5
"""Of its tier's limit: so long any prompt may wait, however long it takes by itself."""
_LEAST_MARGIN: Final = 0.3
"""Less leaves workers without work between two prompts, and would help nobody."""
_MOST_MARGIN: Final = 1.0
"""What is expected is believed until somebody is late."""
_STEP: Final = 0.1
_STEPS_PER_S: Final = 0.07
"""So fast the margin comes back."""


class Admission:
    """The limits of each tier, and how far what is expected may be believed."""

    def __init__(self, limits_s: Mapping[Tier, float]) -> None:
        """`limits_s` is the time within which a tier's first tokens must be expected; 0 for any time."""
        self._limits_s = limits_s
        self._margins = dict.fromkeys(Tier, _MOST_MARGIN)
        self._stepped_at = dict.fromkeys(Tier, -math.inf)

    def margin(self, tier: Tier, now: float) -> float:
        """Of the time allowed: so much may be expected to be waited for."""
        back = _STEP * _STEPS_PER_S * max(0.0, now - self._stepped_at[tier])
        return min(_MOST_MARGIN, self._margins[tier] + back)

    def refusal(self, tier: Tier, expected: Expected, now: float) -> Refusal | None:
        """Why a request of this tier is not let in, if it is not."""
        limit_s = self._limits_s[tier]
        wait_s = expected.wait_s
        allowed_s = self.margin(tier, now) * max(limit_s - expected.prompt_s, _LEAST_SHARE * limit_s)
        if not limit_s or wait_s <= allowed_s:
            return None
        what = "a prompt's turn" if expected.waits_for_turn else "room in a batch"
        return Refusal(
            message=f"the workers are busy: {wait_s:.1f} s to wait for {what}, {allowed_s:.1f} s allowed for service "
            f"tier {tier}",
            retry_after_s=math.ceil(wait_s - allowed_s),
        )

    def observe(self, tier: Tier, expected: Expected, ttft_s: float, now: float) -> None:
        """One that was let in has its first token, or has left without, `ttft_s` after it came; it was expected to take
        what `expected` says. Those who were let in before the last step say nothing new."""
        limit_s = self._limits_s[tier]
        if not limit_s or ttft_s <= limit_s or now - ttft_s < self._stepped_at[tier]:
            return
        if expected.queue_s <= 0 or expected.prompt_s > _LEAST_SHARE * limit_s:
            return  # it was not for waiting that it was late
        self._margins[tier] = max(_LEAST_MARGIN, self.margin(tier, now) - _STEP)
        self._stepped_at[tier] = now
