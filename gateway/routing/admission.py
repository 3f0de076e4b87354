"""Whether a request is let in: not if its first token would come later than its tier allows. Pure.

Refusing early is kinder than being late: the client can go elsewhere, or come back when it is told to, and what was
let in is served in time. A prompt that takes long by itself is not refused for that: only waiting counts against it.

What is expected is not exact, and how far it is off depends on the machine and on what else runs there. So what came of
those who were let in moves the share of the time allowed that may be waited for: down by a large step for one that was
late, up by a small one for each that was not, until few are late.
(Robbins and Monro, "A Stochastic Approximation Method", 1951, for a quantile.)
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
_FIRST_MARGIN: Final = 0.7
_MARGINS: Final = (0.3, 0.9)
"""Of the time allowed, that may be expected to be waited for: to begin with, the least and the most. Less than that
leaves workers without work between two prompts, and would help nobody."""
_STEP: Final = 0.1
_LATE: Final = 0.025
"""Of those who are let in: so many may be late where everybody has to wait."""


class Admission:
    """The limits of each tier, and how far what is expected may be believed."""

    def __init__(self, limits_s: Mapping[Tier, float]) -> None:
        """`limits_s` is the time within which a tier's first tokens must be expected; 0 for any time."""
        self._limits_s = limits_s
        self._margins = dict.fromkeys(Tier, _FIRST_MARGIN)

    def refusal(self, tier: Tier, expected: Expected) -> Refusal | None:
        """Why a request of this tier is not let in, if it is not."""
        limit_s = self._limits_s[tier]
        wait_s = expected.wait_s
        allowed_s = self._margins[tier] * max(limit_s - expected.prompt_s, _LEAST_SHARE * limit_s)
        if not limit_s or wait_s <= allowed_s:
            return None
        what = "a prompt's turn" if expected.waits_for_turn else "room in a batch"
        return Refusal(
            message=f"the workers are busy: {wait_s:.1f} s to wait for {what}, {allowed_s:.1f} s allowed for service "
            f"tier {tier}",
            retry_after_s=math.ceil(wait_s - allowed_s),
        )

    def observe(self, tier: Tier, expected: Expected, ttft_s: float) -> None:
        """When the first token came of one that was let in, and for whose first attempt this was expected."""
        limit_s = self._limits_s[tier]
        if not limit_s or expected.prompt_s > _LEAST_SHARE * limit_s:
            return  # how long it may wait is not what is left of the limit
        late = ttft_s > limit_s
        least, most = _MARGINS
        moved = self._margins[tier] + _STEP * (_LATE - late)
        self._margins[tier] = min(most, max(least, moved))
