"""Choices that wait for workers. Those that nobody takes are parked, and cost nothing until others may take them. Pure.

Life cycle of a choice here:

    new ──► discarded: it goes on, or its request has ended
     │▲       ▲
     ▼│       │     usability changes, or nobody else comes back (`look_again`): new again
    parked ───┘
"""

from __future__ import annotations

from gateway.dispatch.open_request import OpenRequest
from gateway.serving.flow_actions import Want


class Waiting:
    """Wants of open requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[Want, OpenRequest] = {}
        self._new: dict[Want, None] = {}
        """Wants to look at. The others are parked."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, want: Want, request: OpenRequest) -> None:
        """Add a want, to be looked at."""
        self._requests[want] = request
        self._new[want] = None

    def park(self, want: Want) -> None:
        """Park a want that was looked at and that nobody takes now."""
        self._new.pop(want, None)

    def discard(self, want: Want) -> None:
        """Remove a want; inert if it does not wait."""
        self._requests.pop(want, None)
        self._new.pop(want, None)

    def look_again(self) -> None:
        """Make all wants new, because other workers may take them now."""
        self._new = dict.fromkeys(self._requests)

    def next(self) -> tuple[Want, OpenRequest] | None:
        """The next want to look at, in order of arrival; None if all are parked."""
        want = next(iter(self._new), None)
        return None if want is None else (want, self._requests[want])

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._new.keys() <= self._requests.keys()
