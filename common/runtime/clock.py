"""Time as an argument: whoever decides anything by time is given a clock, so that tests can be the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a monotonic scale."""

monotonic: Clock = time.monotonic
"""The clock of the running system."""
