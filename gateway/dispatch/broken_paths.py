"""Paths from a prefill to a decode worker on which a handoff has just failed, although both workers are well: a network
that is cut between them, or a device for RDMA that reads nothing. Pure state.

Life cycle of a path here:

    failed ──► paused ──► over ──► tried by one request ──► works: forgotten
                 ▲                        │
                 └── for twice as long ◄──┘ fails

While one request tries it, the others keep away: a worker that cannot read stands idle, and would draw all of them. (A
circuit breaker for each path, as in M. Nygard, Release It! See decision 42.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from gateway.workers.worker_life import WorkerLife

_FIRST_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 320.0
_MEMORY_S: Final = 60.0
"""Seconds after a pause in which nobody has tried the path: then it is forgotten, as it is if a worker is gone."""


@dataclass(slots=True)
class _Pause:
    length_s: float
    until: float
    tried: bool = False
    """Whether a request tries the path; then the pause is the time in which the others wait for the outcome."""


class BrokenPaths:
    """Paths on which the last handoff failed. A restarted worker is another one."""

    def __init__(self) -> None:
        self._pauses: dict[WorkerLife, dict[WorkerLife, _Pause]] = {}
        """Source → reader → when the path may be used again."""

    def failed(self, source: WorkerLife, reader: WorkerLife, now: float) -> float:
        """A handoff from `source` to `reader` has failed. Returns the seconds for which the path is not used; 0 if it
        is paused already, and this was a request that had been on the way before."""
        self._forget(now)
        pauses = self._pauses.setdefault(source, {})
        before = pauses.get(reader)
        if before is not None and now < before.until and not before.tried:
            return 0.0
        length_s = _FIRST_PAUSE_S if before is None else min(2 * before.length_s, _LONGEST_PAUSE_S)
        pauses[reader] = _Pause(length_s, now + length_s)
        return length_s

    def tries(self, source: WorkerLife, reader: WorkerLife, now: float) -> None:
        """A handoff from `source` to `reader` begins."""
        pause = self._pauses.get(source, {}).get(reader)
        if pause is not None and now >= pause.until:
            pause.until, pause.tried = now + pause.length_s, True

    def works(self, source: WorkerLife, reader: WorkerLife) -> None:
        """A handoff from `source` to `reader` has succeeded."""
        if source in self._pauses and self._pauses[source].pop(reader, None) is not None and not self._pauses[source]:
            del self._pauses[source]

    def sources(self) -> Collection[WorkerLife]:
        """Sources of paths that may be paused."""
        return self._pauses

    def avoided(self, source: WorkerLife, now: float) -> frozenset[WorkerLife]:
        """The workers that are not to read from `source` now."""
        pauses = self._pauses.get(source, {})
        return frozenset(reader for reader, pause in pauses.items() if now < pause.until)

    def forget(self, address: str) -> None:
        """The worker at `address` is lost: what has failed is no path of it."""
        for source, pauses in list(self._pauses.items()):
            for reader in [reader for reader in pauses if address in (source.address, reader.address)]:
                self.works(source, reader)

    def num_broken(self, now: float) -> int:
        """Paths of which the last handoff failed."""
        self._forget(now)
        return sum(map(len, self._pauses.values()))

    def _forget(self, now: float) -> None:
        for source, pauses in list(self._pauses.items()):
            kept = {reader: pause for reader, pause in pauses.items() if now < pause.until + _MEMORY_S}
            if kept:
                self._pauses[source] = kept
            else:
                del self._pauses[source]
