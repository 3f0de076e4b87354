"""Decides when a process that has ended is started again, and when it is given up. Pure: no process, no clock."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_RESTARTS: Final = 5
"""Most restarts of one process within `WINDOW_S`; instead of one more restart the process is given up."""
WINDOW_S: Final = 60.0
"""Length of the window, in seconds for which the process was ready. The time that a process takes to start does not
count, so that a process that never becomes ready is given up, too, however long each start takes."""
FIRST_PAUSE_S: Final = 0.5
"""Seconds before the first restart in the window; the pause doubles with each further restart."""


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self.num = 0
        """Number of restarts so far."""
        self._served_s = 0.0
        """Seconds for which the process was ready, over all its runs except the present one."""
        self._ready_at: float | None = None
        self._recent: deque[float] = deque()
        """For each restart in the window, the value of `_served_s` at that restart."""

    def ready(self, now: float) -> None:
        """The process has become ready."""
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """The process has ended. Returns the seconds until it must be started again, or None to give it up."""
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
