"""Running sequences that are to leave draining decode workers, found a few at a time. Pure.

Life cycle of a round, which looks at every client once, oldest first:

    begun ──► the client's sequences at that worker are returned one at a time ──► over
      └─────► over early: the worker serves again or is gone, or no other worker has room
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway.serving.attempt import Attempt
from gateway.serving.choice import Choice
from gateway.serving.flow import Flow

MOST_LOOKED_AT = 64
"""Clients and attempts that are examined in one call before it returns None."""


class HasFlow(Protocol):
    """A client that waits for a request."""

    flow: Flow


Client = TypeVar("Client", bound=HasFlow)


@dataclass(frozen=True, slots=True)
class Leaver(Generic[Client]):
    """A running sequence that is to leave a worker."""

    client: Client
    attempt: Attempt
    choice: Choice


class Leaving(Generic[Client]):
    """The rounds in progress, at most one for each worker."""

    def __init__(self) -> None:
        self._rounds: dict[str, Iterator[Leaver[Client] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def begin(self, address: str, clients: Iterable[Client]) -> None:
        """Begin a round through `clients`, because the worker at `address` drains. Inert during a round: a draining
        worker reports itself again, and the next round finds sequences that this one has missed."""
        if address not in self._rounds:
            self._rounds[address] = _look_through(address, tuple(clients))

    def next(self, may_leave: Callable[[str], bool]) -> Leaver[Client] | None:
        """The next sequence to leave, from the oldest round; None if those examined in this call have none, or the
        round is over. A round ends as soon as its worker no longer `may_leave`."""
        address, leavers = next(iter(self._rounds.items()))
        if may_leave(address):
            for leaver in leavers:
                if leaver is None or leaver.client.flow.attempts.can_move(leaver.attempt, leaver.choice):
                    return leaver
        del self._rounds[address]
        return None


def _look_through(address: str, clients: Sequence[Client]) -> Iterator[Leaver[Client] | None]:
    """Sequences that run at a worker, and None after every few clients without any. All sequences of a client are found
    together, so some of them may have ended before they are returned."""
    num_looked_at = 0
    for client in clients:
        num_looked_at += 1 + len(client.flow.attempts)
        for attempt, choice in client.flow.attempts.movable(address):
            num_looked_at = 0
            yield Leaver(client, attempt, choice)
        if num_looked_at >= MOST_LOOKED_AT:
            num_looked_at = 0
            yield None
