"""Time as an argument: whoever decides anything by time is given a clock, so that tests can be the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds on a monotonic scale."""

monotonic: Clock = time.monotonic
"""The clock of the running system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How often heartbeats are sent, and how long silence may last before the other side counts as lost."""

    interval_s: float = 0.25
    timeout_s: float = 1.5
