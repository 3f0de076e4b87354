"""Attaches that have come before the offer that they are for. Pure state."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from kv_transfer.events import Send
from kv_transfer.lease import withdrawn

MAX_PARKED = 65_536
"""Most attaches that wait for their Prefill."""


@dataclass(slots=True)
class Parked:
    """One attach that waits."""

    key: RequestKey
    """The request, and the attempt of the sink."""
    offered: int
    """Attempt of the Prefill for which it waits."""
    sink: Incarnation
    until: float

    def refusal(self, cause: Cause, message: str) -> Send:
        """The message that there is nothing to read."""
        return Send(self.sink, withdrawn(self.key, cause, message))


class ParkedAttaches:
    """The attaches that wait, at most one for each request. Their number is bounded, and so is the time of each."""

    def __init__(self, ttl_s: float) -> None:
        """An attach waits for `ttl_s`, or as long as its request waits here for blocks."""
        self._ttl_s = ttl_s
        self._parked: OrderedDict[RequestId, Parked] = OrderedDict()
        self._expected: dict[RequestId, tuple[int, float]] = {}
        """Request that waits for its blocks → its attempt, and until when it waits."""

    def __len__(self) -> int:
        return len(self._parked)

    def awaits(self, key: RequestKey) -> bool:
        """Whether a sink that has attached waits for this offer."""
        parked = self._parked.get(key.request)
        return parked is not None and parked.offered == key.attempt

    def expect(self, key: RequestKey, deadline: float) -> None:
        """A request waits here for its blocks. Until `deadline`, an attach to it waits too."""
        self._expected[key.request] = key.attempt, deadline
        if key.request in self._parked:
            self._parked[key.request].until = max(self._parked[key.request].until, deadline)

    def expected(self, request: RequestId) -> int:
        """The attempt of a request that waits here for its blocks; 0 if there is none."""
        return self._expected.get(request, (0, 0.0))[0]

    def park(self, key: RequestKey, offered: int, sink: Incarnation, now: float) -> list[Send]:
        """Keep an attach until the offer of attempt `offered` opens."""
        older = self._parked.get(key.request)
        if older is not None and older.key.attempt > key.attempt:
            return [Send(sink, withdrawn(key, Cause.SUPERSEDED, "a newer attempt has attached"))]
        refused: list[Send] = []
        if older is not None and (older.key, older.sink) != (key, sink):
            refused.append(older.refusal(Cause.SUPERSEDED, "another sink attached"))
        _, expected_until = self._expected.get(key.request, (0, -math.inf))
        self._parked[key.request] = Parked(key, offered, sink, max(now + self._ttl_s, expected_until))
        self._parked.move_to_end(key.request)
        if len(self._parked) > MAX_PARKED:
            _, oldest = self._parked.popitem(last=False)
            refused.append(oldest.refusal(Cause.CAPACITY, "too many parked attaches"))
        return refused

    def take(self, request: RequestId, attempt: float = math.inf) -> Parked | None:
        """The request does not wait for its blocks any more. Remove and return the attach that waits for an offer of
        this attempt or an older one."""
        self._expected.pop(request, None)
        parked = self._parked.get(request)
        return self._parked.pop(request) if parked is not None and parked.offered <= attempt else None

    def unpark(self, key: RequestKey, sink: Incarnation) -> None:
        """The sink does not wait any more. Does nothing if it did not."""
        parked = self._parked.get(key.request)
        if parked is not None and (parked.key, parked.sink) == (key, sink):
            del self._parked[key.request]

    def keep(self, sink: Incarnation, pulls: Collection[RequestKey]) -> None:
        """The sink has given up all that `pulls` does not name."""
        for parked in [each for each in self._parked.values() if each.sink == sink and each.key not in pulls]:
            del self._parked[parked.key.request]

    def expire(self, now: float) -> list[Send]:
        """Refuse the attaches whose time is over."""
        late = [parked for parked in self._parked.values() if parked.until <= now]
        for parked in late:
            del self._parked[parked.key.request]
        return [parked.refusal(Cause.LEASE_LOST, "no such prefill arrived") for parked in late]

    def check_invariants(self, opened: dict[RequestId, int]) -> None:
        """Assert what must hold between any two events. `opened` has the attempt of each request that has a lease."""
        assert len(self._parked) <= MAX_PARKED
        assert opened.keys().isdisjoint(self._expected), "a request with a lease is expected"
        for request, parked in self._parked.items():
            assert parked.key.request == request, parked
            assert parked.offered > opened.get(request, 0), "an attach waits for an offer that is open"
