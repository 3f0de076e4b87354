"""The newest attempt at each request that a worker has seen of late: what comes late, or twice, is inert."""

from __future__ import annotations

from common.contract.ids import RequestId, RequestKey
from common.runtime.clock import Clock

REMEMBERED_S = 60.0
"""An attempt is remembered for as long at least. A session has one order, and ends after seconds of silence: what comes
late comes within those."""
MAX_REMEMBERED = 65_536
"""Requests remembered at most; at least half as many of the last, however quickly they come."""


class AttemptFence:
    """Lets each attempt in once, and none that is older than the newest.

    Attempts are in one of two generations. The younger takes them in, and when it is old or full the elder is forgotten
    as a whole: so the memory follows the rate of requests, and does not grow for as long as a worker lives.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._younger: dict[RequestId, int] = {}
        self._elder: dict[RequestId, int] = {}
        self._since = clock()

    def __len__(self) -> int:
        """Requests remembered, those twice that are in both generations."""
        return len(self._younger) + len(self._elder)

    def admits(self, key: RequestKey) -> bool:
        """Whether this attempt is newer than every one before it; if so, it is remembered."""
        self._turn()
        newest = self._younger.get(key.request) or self._elder.get(key.request, 0)
        if key.attempt <= newest:
            return False
        self._younger[key.request] = key.attempt
        return True

    def _turn(self) -> None:
        now = self._clock()
        if now - self._since >= REMEMBERED_S or len(self._younger) >= MAX_REMEMBERED // 2:
            idle = now - self._since >= 2 * REMEMBERED_S
            self._elder, self._younger = {} if idle else self._younger, {}
            self._since = now
