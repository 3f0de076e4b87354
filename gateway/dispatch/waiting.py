"""Choices that wait for workers, grouped by the workers that may take them, so that choices that cannot go on cost
nothing. Pure.

Life cycle of a choice here:

    new ──► discarded: it goes on
     │▲
     ▼│ usability changes (`look_again`)
    parked ──► discarded, once one of the worker lives that it is parked for takes work
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from gateway.serving.flow_actions import PlacementRequest
from gateway.workers.worker_life import WorkerLife

Client = TypeVar("Client", bound=Hashable)
_Group = tuple[int, frozenset[WorkerLife]]
"""(rank of the tier, worker lives that may take the choices as soon as they take work)."""


class Waiting(Generic[Client]):
    """Wants of clients, in order of arrival."""

    def __init__(self) -> None:
        self._clients: dict[PlacementRequest, Client] = {}
        self._wants: dict[Client, dict[PlacementRequest, None]] = {}
        self._new: dict[PlacementRequest, None] = {}
        """Wants to look at."""
        self._parked: dict[_Group, dict[PlacementRequest, None]] = {}
        self._groups: dict[PlacementRequest, _Group] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, want: PlacementRequest) -> bool:
        return want in self._clients

    def add(self, want: PlacementRequest, client: Client) -> None:
        """Add a want, to be looked at."""
        self._clients[want] = client
        self._wants.setdefault(client, {})[want] = None
        self._new[want] = None

    def park(self, want: PlacementRequest, rank: int, lives: frozenset[WorkerLife]) -> None:
        """Park a want that was looked at and that none of `lives` takes now. `rank` is its tier's rank."""
        self._new.pop(want, None)
        group = self._groups[want] = rank, lives
        self._parked.setdefault(group, {})[want] = None

    def discard(self, want: PlacementRequest) -> None:
        """Remove a want; inert if it does not wait."""
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

    def client(self, want: PlacementRequest) -> Client:
        """The client of a want."""
        return self._clients[want]

    def of(self, client: Client) -> list[PlacementRequest]:
        """The waiting wants of a client."""
        return list(self._wants.get(client, ()))

    def look_again(self) -> None:
        """Make all wants new, because other workers may take them now."""
        self._new = dict.fromkeys(self._clients)
        self._parked.clear()
        self._groups.clear()

    def next(self, takes: Callable[[WorkerLife], bool]) -> tuple[PlacementRequest, Client] | None:
        """The next want to look at: first the new ones, then those of the highest tier that are parked for a life that
        takes work. None if there are none."""
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
