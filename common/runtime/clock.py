"""Time as an argument: code that decides anything by time receives a clock, so that tests can set the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns seconds on a monotonic scale."""

monotonic: Clock = time.monotonic
"""The clock of the running system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How often heartbeats are sent, and how long silence may last before the other side counts as lost."""

    interval_s: float = 0.25
    timeout_s: float = 1.5
