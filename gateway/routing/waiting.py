"""Choices that wait for workers, by the workers that may have them, so that whoever cannot go on costs nothing. Pure.

Life cycle of a choice here:

    new ──► taken: it goes on
     │▲
     ▼│ usability changes (`look_again`)
    parked ──► taken, once one of the places that it is parked for takes something
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from gateway.serving.attempt import Place
from gateway.serving.flow import Want

Client = TypeVar("Client", bound=Hashable)
_Group = tuple[int, frozenset[Place]]
"""(rank of the tier, places that may have the choices, as soon as they take something)."""


class Waiting(Generic[Client]):
    """Wants of clients, in the order of their arrival."""

    def __init__(self) -> None:
        self._clients: dict[Want, Client] = {}
        self._wants: dict[Client, dict[Want, None]] = {}
        self._new: dict[Want, None] = {}
        """Those that are to be looked at."""
        self._parked: dict[_Group, dict[Want, None]] = {}
        self._groups: dict[Want, _Group] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, want: Want) -> bool:
        return want in self._clients

    def add(self, want: Want, client: Client) -> None:
        """It wants workers, and is to be looked at."""
        self._clients[want] = client
        self._wants.setdefault(client, {})[want] = None
        self._new[want] = None

    def park(self, want: Want, rank: int, places: frozenset[Place]) -> None:
        """It has been looked at, and none of these places takes anything now."""
        self._new.pop(want, None)
        group = self._groups[want] = rank, places
        self._parked.setdefault(group, {})[want] = None

    def discard(self, want: Want) -> None:
        """It waits no more; inert when it does not."""
        client = self._clients.pop(want, None)
        if client is None:
            return
        self._new.pop(want, None)
        wants = self._wants[client]
        del wants[want]
        if not wants:
            del self._wants[client]
        group = self._groups.pop(want, None)
        if group is not None:
            parked = self._parked[group]
            del parked[want]
            if not parked:
                del self._parked[group]

    def client(self, want: Want) -> Client:
        """Whose it is."""
        return self._clients[want]

    def of(self, client: Client) -> list[Want]:
        """What a client waits with."""
        return list(self._wants.get(client, ()))

    def look_again(self) -> None:
        """Other places may have them now: all are to be looked at."""
        self._new = dict.fromkeys(self._clients)
        self._parked.clear()
        self._groups.clear()

    def next(self, takes: Callable[[Place], bool]) -> tuple[Want, Client] | None:
        """Who is to be looked at now: the new ones, and then those of the highest tier that are parked for a place
        that takes something."""
        if self._new:
            want = next(iter(self._new))
            return want, self._clients[want]
        groups = [group for group in self._parked if any(map(takes, group[1]))]
        if not groups:
            return None
        want = next(iter(self._parked[min(groups, key=lambda group: group[0])]))
        return want, self._clients[want]

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        parked = [want for wants in self._parked.values() for want in wants]
        assert all(self._parked.values())
        assert sorted(map(id, [*self._new, *parked])) == sorted(map(id, self._clients)), "one is lost, or named twice"
        assert set(parked) == set(self._groups)
        by_client = {want: client for client, wants in self._wants.items() for want in wants}
        assert by_client == self._clients
        assert all(self._wants.values())
