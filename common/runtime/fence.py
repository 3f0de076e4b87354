"""The newest recent attempt at each request, so that messages of older or repeated attempts have no effect."""

from __future__ import annotations

from common.contract.ids import RequestId, RequestKey
from common.runtime.clock import Clock

REMEMBERED_S = 60.0
"""Least seconds for which an attempt is remembered, unless `MAX_REMEMBERED` is reached. A session delivers in order and
ends after seconds of silence, so a late message comes within those seconds."""
MAX_REMEMBERED = 65_536
"""Most requests that are remembered; at a high rate of requests, at least the latest half of this number."""


class AttemptFence:
    """Admits each attempt once, and no attempt that is older than the newest one of its request.

    Attempts are kept in two generations. New ones enter the younger generation. When the younger is old or full, the
    elder is forgotten as a whole and the younger takes its place. So memory follows the rate of requests and does not
    grow over the worker's life.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._younger: dict[RequestId, int] = {}
        self._elder: dict[RequestId, int] = {}
        self._since = clock()

    def __len__(self) -> int:
        """Number of remembered requests; a request in both generations counts twice."""
        return len(self._younger) + len(self._elder)

    def admits(self, key: RequestKey) -> bool:
        """Whether this attempt is newer than every earlier one of its request; if so, it is remembered."""
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
