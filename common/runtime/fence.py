"""The newest attempt at each request that a worker has seen: what comes late, or twice, is inert."""

from __future__ import annotations

from collections import OrderedDict

from common.contract.ids import RequestId, RequestKey

MAX_REMEMBERED = 65_536
"""Requests remembered, the most recent ones."""


class AttemptFence:
    """Lets each attempt in once, and none that is older than the newest."""

    def __init__(self) -> None:
        self._newest: OrderedDict[RequestId, int] = OrderedDict()

    def admits(self, key: RequestKey) -> bool:
        """Whether this attempt is newer than every one before it; if so, it is remembered."""
        if key.attempt <= self._newest.get(key.request, 0):
            return False
        self._newest[key.request] = key.attempt
        self._newest.move_to_end(key.request)
        if len(self._newest) > MAX_REMEMBERED:
            self._newest.popitem(last=False)
        return True
