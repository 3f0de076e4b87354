"""When a process that has ended is started again, and when that is given up. Pure: no process, no clock."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_RESTARTS: Final = 5
"""Of one process, within `WINDOW_S`: it is given up where one more would be due."""
WINDOW_S: Final = 60.0
"""Seconds of service. What a process takes to start does not count, so that one which never gets far is given up, too,
however long each start takes."""
FIRST_PAUSE_S: Final = 0.5
"""Before a restart with none before it in the window; each further one waits twice as long."""


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self.num = 0
        """Since the beginning."""
        self._served_s = 0.0
        """How long it has been ready, in all its lives but the present one."""
        self._ready_at: float | None = None
        self._recent: deque[float] = deque()
        """For each restart in the window, how long the process had been ready by then."""

    def ready(self, now: float) -> None:
        """Its present life has begun to serve."""
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """Its life is over: seconds until the next one begins, or None if there shall be none."""
        if self._ready_at is not None:
            self._served_s += now - self._ready_at
            self._ready_at = None
        while self._recent and self._served_s - self._recent[0] >= WINDOW_S:
            self._recent.popleft()
        if len(self._recent) == MAX_RESTARTS:
            return None
        pause_s: float = FIRST_PAUSE_S * 2 ** len(self._recent)
        self._recent.append(self._served_s)
        self.num += 1
        return pause_s
