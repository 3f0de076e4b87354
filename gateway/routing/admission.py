"""Whether a request is let in: not if its first token would come later than its tier allows. Pure.

Refusing early is kinder than being late: the client can go elsewhere, or come back when it is told to, and what was
let in is served in time. A prompt that takes long by itself is not refused for that: only waiting counts against it.
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
_MARGIN: Final = 0.8
"""Of the time allowed: what is expected is not exact."""


class Admission:
    """The limits of each tier."""

    def __init__(self, limits_s: Mapping[Tier, float]) -> None:
        """`limits_s` is the time within which a tier's first tokens must be expected; 0 for any time."""
        self._limits_s = limits_s

    def refusal(self, tier: Tier, expected: Expected) -> Refusal | None:
        """Why a request of this tier is not let in, if it is not."""
        limit_s = self._limits_s[tier]
        wait_s = expected.wait_s
        allowed_s = _MARGIN * max(limit_s - expected.prompt_s, _LEAST_SHARE * limit_s)
        if not limit_s or wait_s <= allowed_s:
            return None
        what = "a prompt's turn" if expected.waits_for_turn else "room in a batch"
        return Refusal(
            message=f"the workers are busy: {wait_s:.1f} s to wait for {what}, {allowed_s:.1f} s allowed for service "
            f"tier {tier}",
            retry_after_s=math.ceil(wait_s - allowed_s),
        )
