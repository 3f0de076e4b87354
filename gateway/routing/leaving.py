"""Running sequences that are to leave draining decode workers, found a few at a time. Pure.

Life cycle of a round, in which every client is looked at once, the oldest first:

    begun ──► its sequences at that worker are named, one at a time ──► over
      └─────► over, as soon as the worker serves again or is gone, or nobody has room
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway.serving.attempt import Attempt, Choice
from gateway.serving.flow import Flow

MOST_LOOKED_AT = 64
"""Clients, and attempts of theirs, that are looked through at a time where none has to leave."""


class HasFlow(Protocol):
    """Whoever waits for a request."""

    flow: Flow


Client = TypeVar("Client", bound=HasFlow)


@dataclass(frozen=True, slots=True)
class Leaver(Generic[Client]):
    """A running sequence that is to leave a worker."""

    client: Client
    attempt: Attempt
    choice: Choice


class Leaving(Generic[Client]):
    """The rounds under way, at most one for each worker."""

    def __init__(self) -> None:
        self._rounds: dict[str, Iterator[Leaver[Client] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def begin(self, address: str, clients: Iterable[Client]) -> None:
        """The worker at `address` drains: begin a round through these clients. Inert while one is under way: as long as
        the worker drains it says so again, and the next round finds whom this one has missed."""
        if address not in self._rounds:
            self._rounds[address] = _look_through(address, tuple(clients))

    def next(self, may_leave: Callable[[str], bool]) -> Leaver[Client] | None:
        """One that is to leave now, of the oldest round; None if nobody of the few that were looked at is, or the round
        is over. Sequences are to leave a worker while it `may_leave`."""
        address, leavers = next(iter(self._rounds.items()))
        if may_leave(address):
            for leaver in leavers:
                if leaver is None or leaver.client.flow.can_move(leaver.attempt, leaver.choice):
                    return leaver
        del self._rounds[address]
        return None


def _look_through(address: str, clients: Sequence[Client]) -> Iterator[Leaver[Client] | None]:
    """What runs at a worker, and None after every few clients without any. A client's sequences are found together, so
    that some of them may have ended when they are named."""
    num_looked_at = 0
    for client in clients:
        num_looked_at += 1 + len(client.flow.attempts)
        for attempt, choice in client.flow.movable(address):
            num_looked_at = 0
            yield Leaver(client, attempt, choice)
        if num_looked_at >= MOST_LOOKED_AT:
            num_looked_at = 0
            yield None
