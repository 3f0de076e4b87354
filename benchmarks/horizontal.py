"""A model of Kubernetes' HorizontalPodAutoscaler, with the `behavior` of a manifest. Pure: the time is an argument.

("Horizontal Pod Autoscaling", the Kubernetes documentation: algorithm details, tolerance, configurable scaling
behavior. Only a single External metric with an average value, and policies of pods and percent, are modelled.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

_TOLERANCE: Final = 0.1
"""A ratio of the metric to its target that differs from 1 by at most this changes nothing."""


@dataclass(slots=True)
class Autoscaler:
    """One HorizontalPodAutoscaler; `spec` is that of its manifest."""

    spec: dict[str, Any]
    _advice: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of replicas that the metric asked for)."""
    _changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, change of the number of replicas)."""

    def replicas(self, now: float, current: int, value: float | None) -> int:
        """The new number of replicas. `value` is None if the metric is missing; nothing changes then."""
        if value is None:
            return current
        target = float(self.spec["metrics"][0]["external"]["target"]["averageValue"])
        ratio = value / (target * current)
        wanted = current if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(value / target)
        wanted = min(int(self.spec["maxReplicas"]), max(int(self.spec["minReplicas"]), wanted))
        up, down = self.spec["behavior"]["scaleUp"], self.spec["behavior"]["scaleDown"]
        if not self._advice:  # before the first decision, the present number counts as what was asked for
            self._advice.append((now - 1.0, current))
        self._advice.append((now, wanted))
        # Grow at most to the smallest recent recommendation, and shrink at most to the largest one.
        grow = min(self._asked_since(now - up["stabilizationWindowSeconds"]))
        shrink = max(self._asked_since(now - down["stabilizationWindowSeconds"]))
        chosen = current
        if grow > current:
            chosen = min(grow, max(self._bound(policy, now, current, 1) for policy in up["policies"]))
        elif shrink < current:
            chosen = max(shrink, min(self._bound(policy, now, current, -1) for policy in down["policies"]))
        if chosen != current:
            self._changes.append((now, chosen - current))
        return chosen

    def _asked_since(self, begin: float) -> list[int]:
        return [replicas for when, replicas in self._advice if when >= begin]

    def _bound(self, policy: dict[str, Any], now: float, current: int, sign: int) -> int:
        """The number of replicas that a policy allows in this direction, from the number when its period began."""
        before = current - sum(by for when, by in self._changes if when > now - policy["periodSeconds"])
        if policy["type"] == "Pods":
            return before + sign * int(policy["value"])
        factor = 1 + sign * policy["value"] / 100
        return int(math.ceil(before * factor) if sign > 0 else math.floor(before * factor))
