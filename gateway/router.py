"""Which workers a request goes to. Pure functions of the registry's state and of what the prefix index knows.

no prefill workers exist          one decode worker, which computes the prompt too          colocated
little of it is left to compute   the same: a handoff would cost more than it saves         short
no prefill worker is usable       the same, since the request is served all the same        no_prefill_worker
otherwise                         a prefill and a decode worker, each the least loaded

Workers that have just failed the request are avoided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.contract.kv_layout import Fingerprint
from common.contract.messages import PrefixHint, Role
from gateway.attempt import Place
from gateway.registry import Registry, WorkerView

_CROWDED_FACTOR: Final = 2
_CROWDED_REQUESTS: Final = 4
"""A worker is passed over for what it has cached once it has twice as many requests as the least loaded one, and these
many more: a few requests may always follow their prefix, and a popular one does not gather everything at one worker."""


class LocalPrefill(StrEnum):
    """Why a decode worker computes a prompt."""

    SHORT = "short"
    """Few of its tokens are not in that worker's cache."""
    COLOCATED = "colocated"
    """The deployment has no prefill workers."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """It has some, and none is usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One worker computes the prompt, another goes on from it."""

    prefill: WorkerView
    decode: WorkerView
    prefix: PrefixHint | None
    """Where the prefill worker may pull the prompt's beginning from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A decode worker does everything."""

    decode: WorkerView
    reason: LocalPrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """Workers that are better left alone."""

    avoid: frozenset[Place] = frozenset()
    """Those that have just failed the request."""
    fits: Fingerprint | None = None
    """What the request has begun with: it goes on only with the same."""

    def decode(self, workers: list[WorkerView]) -> list[WorkerView]:
        """Decode workers to choose from: if all of them have failed, any."""
        workers = self._fitting(workers)
        return [worker for worker in workers if worker.place not in self.avoid] or workers

    def prefill(self, workers: list[WorkerView]) -> list[WorkerView]:
        """Prefill workers to choose from; decode workers can do without, so those that have failed are not asked."""
        return [worker for worker in self._fitting(workers) if worker.place not in self.avoid]

    def _fitting(self, workers: list[WorkerView]) -> list[WorkerView]:
        return [w for w in workers if self.fits is None or (w.welcome and w.welcome.fingerprint == self.fits)]


NO_CAUTION: Final = Caution()


def choose(
    registry: Registry,
    num_tokens: int,
    cached: Mapping[Place, int],
    local_prefill_tokens: int,
    caution: Caution = NO_CAUTION,
) -> Handoff | Local | None:
    """Workers for a prompt of `num_tokens`; None if there are none now.

    `cached` says how many of its leading tokens, always fewer than all, a worker's cache probably holds. A prompt of
    which a decode worker would compute at most `local_prefill_tokens` is short.
    """
    prefill, decode = caution.prefill(registry.usable(Role.PREFILL)), caution.decode(registry.usable(Role.DECODE))
    if not decode:
        return None
    fewest = min(worker.in_flight for worker in decode)
    free = [worker for worker in decode if worker.in_flight <= _CROWDED_FACTOR * fewest + _CROWDED_REQUESTS]
    near = [worker for worker in free if num_tokens - cached.get(worker.place, 0) <= local_prefill_tokens]
    if registry.colocated:
        reason = LocalPrefill.COLOCATED
    elif near:
        reason = LocalPrefill.SHORT
    elif not prefill:
        reason = LocalPrefill.NO_PREFILL_WORKER
    else:
        chosen = least_loaded_prefill(prefill)
        prefix = _hint(chosen, [*prefill, *decode], cached)
        return Handoff(prefill=chosen, decode=least_loaded_decode(decode), prefix=prefix)
    return Local(decode=least_loaded_decode(near or _holding_most(free, cached)), reason=reason)


def least_loaded_prefill(workers: list[WorkerView]) -> WorkerView:
    """The worker with the fewest prompt tokens in flight from here, then the fewest that it reported."""
    return min(
        workers,
        key=lambda w: (w.in_flight_tokens, w.load.waiting_tokens if w.load else 0, w.in_flight, w.address),
    )


def least_loaded_decode(workers: list[WorkerView]) -> WorkerView:
    """The worker with the fewest requests in flight from here, then the smallest share of its blocks spoken for."""
    return min(
        workers,
        key=lambda w: (w.in_flight, w.load.blocks_used / max(1, w.load.blocks_total) if w.load else 0.0, w.address),
    )


def _holding_most(workers: list[WorkerView], cached: Mapping[Place, int]) -> list[WorkerView]:
    most = max(cached.get(worker.place, 0) for worker in workers)
    return [worker for worker in workers if cached.get(worker.place, 0) == most]


def _hint(prefill: WorkerView, workers: list[WorkerView], cached: Mapping[Place, int]) -> PrefixHint | None:
    """The worker that holds the most of the prompt, if that is more than the prefill worker has itself."""
    holder = min(workers, key=lambda w: (-cached.get(w.place, 0), w.in_flight, w.address))
    num_tokens = cached.get(holder.place, 0)
    if num_tokens <= cached.get(prefill.place, 0):
        return None
    return PrefixHint(source=holder.place.source, num_tokens=num_tokens)
