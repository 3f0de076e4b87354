"""Running sequences that are to leave draining decode workers, found a few at a time. Pure.

Life cycle of a round, which looks at every request once, oldest first:

    begun ──► the request's sequences at that worker are returned one at a time ──► over
      └─────► over early: the worker serves again or is gone, or no other worker has room
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gateway.dispatch.open_request import OpenRequest
from gateway.serving.attempt import Attempt
from gateway.serving.choice import Choice

MOST_LOOKED_AT = 64
"""Requests and attempts that are examined in one call before it returns None."""


@dataclass(frozen=True, slots=True)
class Leaver:
    """A running sequence that is to leave a worker."""

    request: OpenRequest
    attempt: Attempt
    choice: Choice


class Leaving:
    """The rounds in progress, at most one for each worker."""

    def __init__(self) -> None:
        self._rounds: dict[str, Iterator[Leaver | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def begin(self, address: str, requests: Iterable[OpenRequest]) -> None:
        """Begin a round through `requests`, because the worker at `address` drains. Inert during a round: a draining
        worker reports itself again, and the next round finds sequences that this one has missed."""
        if address not in self._rounds:
            self._rounds[address] = _look_through(address, tuple(requests))

    def next(self, may_leave: Callable[[str], bool]) -> Leaver | None:
        """The next sequence to leave, from the oldest round; None if those examined in this call have none, or the
        round is over. A round ends as soon as its worker no longer `may_leave`."""
        address, leavers = next(iter(self._rounds.items()))
        if may_leave(address):
            for leaver in leavers:
                if leaver is None or leaver.request.flow.attempts.can_move(leaver.attempt, leaver.choice):
                    return leaver
        del self._rounds[address]
        return None


def _look_through(address: str, requests: Sequence[OpenRequest]) -> Iterator[Leaver | None]:
    """Sequences that run at a worker, and None after every few requests without any. All sequences of a request are
    found together, so some of them may have ended before they are returned."""
    num_looked_at = 0
    for request in requests:
        num_looked_at += 1 + len(request.flow.attempts)
        for attempt, choice in request.flow.attempts.movable(address):
            num_looked_at = 0
            yield Leaver(request, attempt, choice)
        if num_looked_at >= MOST_LOOKED_AT:
            num_looked_at = 0
            yield None
