"""Choices that wait for workers, grouped by the workers that may take them, so that choices that cannot go on cost
nothing. Pure.

Life cycle of a choice here:

    new ──► discarded: it goes on
     │▲
     ▼│ usability changes (`look_again`)
    parked ──► discarded, once one of the worker lives that it is parked for takes work
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.dispatch.open_request import OpenRequest
from gateway.serving.flow_actions import Want
from gateway.workers.worker_life import WorkerLife

_Group = tuple[int, frozenset[WorkerLife]]
"""(rank of the tier, worker lives that may take the choices as soon as they take work)."""


class Waiting:
    """Wants of open requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[Want, OpenRequest] = {}
        self._new: dict[Want, None] = {}
        """Wants to look at."""
        self._parked: dict[_Group, dict[Want, None]] = {}
        self._groups: dict[Want, _Group] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, want: Want, request: OpenRequest) -> None:
        """Add a want, to be looked at."""
        self._requests[want] = request
        self._new[want] = None

    def park(self, want: Want, rank: int, lives: frozenset[WorkerLife]) -> None:
        """Park a want that was looked at and that none of `lives` takes now. `rank` is its tier's rank."""
        self._new.pop(want, None)
        group = self._groups[want] = rank, lives
        self._parked.setdefault(group, {})[want] = None

    def discard(self, want: Want) -> None:
        """Remove a want; inert if it does not wait."""
        if self._requests.pop(want, None) is None:
            return
        self._new.pop(want, None)
        group = self._groups.pop(want, None)
        if group is not None:
            parked = self._parked[group]
            del parked[want]
            if not parked:
                del self._parked[group]

    def look_again(self) -> None:
        """Make all wants new, because other workers may take them now."""
        self._new = dict.fromkeys(self._requests)
        self._parked.clear()
        self._groups.clear()

    def next(self, takes: Callable[[WorkerLife], bool]) -> tuple[Want, OpenRequest] | None:
        """The next want to look at: first the new ones, then those of the highest tier that are parked for a life that
        takes work. None if there are none."""
        if self._new:
            want = next(iter(self._new))
            return want, self._requests[want]
        groups = [group for group in self._parked if any(map(takes, group[1]))]
        if not groups:
            return None
        want = next(iter(self._parked[min(groups, key=lambda group: group[0])]))
        return want, self._requests[want]

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        parked = [want for wants in self._parked.values() for want in wants]
        assert all(self._parked.values())
        assert sorted(map(id, [*self._new, *parked])) == sorted(map(id, self._requests)), "one is lost, or named twice"
        assert set(parked) == set(self._groups)
