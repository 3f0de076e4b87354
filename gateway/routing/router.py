"""Choice of the workers for a request. Pure functions of the registry's state and the prefix index.

condition                          workers                                                   reason
no prefill workers exist           one decode worker, which computes the prompt too          colocated
few tokens are left to compute     the same: a handoff would cost more than it saves         short
no prefill worker is usable        the same, so that the request is served                   no_prefill_worker
otherwise                          a prefill and a decode worker                             handoff

The prefill worker is the one with the earliest expected first token (`gateway.routing.estimates`). The decode worker is
the one with room soonest, then the fewest blocks in use; workers that can hold the sequence to its end are preferred.
Workers that have just failed the request are avoided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from common.contract.kv_layout import Fingerprint
from common.contract.messages import PrefixHint, Role
from common.contract.tiers import Tier
from gateway.routing.estimates import occupancy, prompt_s, queue_s, room_s
from gateway.serving.attempt import Place
from gateway.workers.registry import Registry, WorkerView

_CROWDED_FACTOR: Final = 2
_CROWDED_REQUESTS: Final = 4
"""A worker's cached prefix is ignored if it has more than twice the requests of the least loaded worker, plus these. So
a few requests may always follow their prefix, but a popular prefix does not gather all load at one worker."""
_OCCUPANCY_STEP: Final = 1 / 16
"""Decode workers in the same step of occupancy count as equally occupied."""
_CLOSE_FACTOR: Final = 1.1
_CLOSE_S: Final = 0.005
"""Expected times within this factor and this many seconds are equal, because they are derived from measurements."""
_HANDOFF_S: Final = 0.02
"""Seconds that a handoff must be expected to save on a short prompt, which costs a decode worker's batch little."""


class LocalPrefill(StrEnum):
    """Why a decode worker computes a prompt."""

    SHORT = "short"
    """Few of its tokens are missing from that worker's cache."""
    COLOCATED = "colocated"
    """The deployment has no prefill workers."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """The deployment has prefill workers, but none is usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt to place, and the time."""

    num_tokens: int
    """Tokens of the sequence whose KV is wanted."""
    tier: Tier = Tier.STANDARD
    num_choices: int = 1
    most_tokens: int = 0
    """Most tokens that one sequence can have in the end."""
    now: float = 0.0
    least_wait: bool = False
    """Whether to minimise the wait, however long the prompt then takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected times of a route, in seconds."""

    queue_s: float
    """Until the prompt's turn."""
    prompt_s: float
    """From the prompt's turn to its first token."""
    room_s: float
    """From now until the decode worker has room."""

    @property
    def wait_s(self) -> float:
        """Until the prompt has its turn and the decode worker has room."""
        return max(self.queue_s, self.room_s)

    @property
    def waits_for_turn(self) -> bool:
        """Whether the prompt's turn is what the request waits for, rather than room."""
        return self.queue_s >= self.room_s

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.prompt_s

    @property
    def decode_s(self) -> float:
        """Until the second token can follow."""
        return self.wait_s + self.prompt_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One worker computes the prompt, another one decodes."""

    prefill: WorkerView
    decode: WorkerView
    prefix: PrefixHint | None
    """The worker from which the prefill worker may pull the prompt's beginning."""
    num_cached: int
    """Leading prompt tokens that the prefill worker probably has cached."""
    expected: Expected

    def explain(self) -> dict[str, str]:
        """The decision as text, by name of its `x-baton-*` header."""
        told = {"route": "handoff", "prefill": self.prefill.address, "decode": self.decode.address}
        told |= {"cached-tokens": str(self.num_cached), "expected-ttft-ms": _milliseconds(self.expected.ttft_s)}
        if self.prefix is not None:
            told |= {"prefix-from": self.prefix.source.address, "prefix-tokens": str(self.prefix.num_tokens)}
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A decode worker computes the prompt and decodes."""

    decode: WorkerView
    num_cached: int
    expected: Expected
    reason: LocalPrefill

    def explain(self) -> dict[str, str]:
        """The decision as text, by name of its `x-baton-*` header."""
        told = {"route": self.reason.value, "decode": self.decode.address}
        return told | {
            "cached-tokens": str(self.num_cached),
            "expected-ttft-ms": _milliseconds(self.expected.ttft_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """Restrictions on the choice of workers."""

    avoid: frozenset[Place] = frozenset()
    """Workers that have just failed the request."""
    fits: Fingerprint | None = None
    """The fingerprint that the request has begun with; workers with another one are excluded. None before it has
    begun."""
    beside: frozenset[Place] = frozenset()
    """Workers to prefer, if they are among the candidates."""
    too_small: frozenset[Place] = frozenset()
    """Workers that have said that they can never hold the request."""
    admitted: bool = False
    """Whether the request is admitted. It may then retry workers that failed it, and wait for full ones."""

    def able(self, workers: list[WorkerView], ask: Ask) -> list[WorkerView]:
        """Decode workers that may take the request, now or once they are not full. Those that report that they can hold
        it are returned; if there are none, all, and the worker decides whether it fits."""
        workers = [worker for worker in self._fitting(workers) if worker.place not in self.too_small]
        workers = [worker for worker in workers if worker.holds(ask.most_tokens)] or workers
        return workers if self.admitted else [worker for worker in workers if worker.place not in self.avoid]

    def decode(self, workers: list[WorkerView], ask: Ask) -> list[WorkerView]:
        """Decode workers to choose from. If all of them have failed the request, all are returned."""
        workers = [worker for worker in self.able(workers, ask) if not (self.admitted and worker.full)]
        return self._beside([worker for worker in workers if worker.place not in self.avoid] or workers)

    def prefill(self, workers: list[WorkerView], ask: Ask) -> list[WorkerView]:
        """Prefill workers to choose from. Those that have failed the request are excluded, because decode workers can
        compute prompts too."""
        shunned = self.avoid | self.too_small
        workers = [worker for worker in self._fitting(workers) if worker.place not in shunned]
        return self._beside([w for w in workers if w.holds(ask.num_tokens) and not (self.admitted and w.full)])

    def _beside(self, workers: list[WorkerView]) -> list[WorkerView]:
        return [worker for worker in workers if worker.place in self.beside] or workers

    def _fitting(self, workers: list[WorkerView]) -> list[WorkerView]:
        return [w for w in workers if self.fits is None or (w.welcome and w.welcome.fingerprint == self.fits)]


NO_CAUTION: Final = Caution()
Cached: TypeAlias = Mapping[Place, int]
"""Worker → leading prompt tokens that its cache probably holds, always fewer than the prompt has."""
Routing = Literal["expected", "round_robin"]
"""`expected` compares expected times; `round_robin` ignores load and caches, and serves as a baseline."""


class Router:
    """Chooses workers for prompts."""

    def __init__(self, registry: Registry, *, local_prefill_tokens: int = 0, routing: Routing = "expected") -> None:
        """A prompt is short for a decode worker that would compute at most `local_prefill_tokens` of it."""
        self._registry = registry
        self._local_prefill_tokens = local_prefill_tokens
        self._in_turn = routing == "round_robin"
        self._turn = 0

    def choose(self, ask: Ask, cached: Cached, caution: Caution = NO_CAUTION) -> Handoff | Local | None:
        """Workers for a prompt; None if there are none now."""
        registry = self._registry
        prefill = caution.prefill(registry.usable(Role.PREFILL), ask)
        decode = caution.decode(registry.usable(Role.DECODE), ask)
        if not decode:
            return None
        if self._in_turn:
            self._turn += 1
            prefill, decode, cached = self._next(prefill), self._next(decode), {}
        free = _uncrowded(decode)
        near = [w for w in free if ask.num_tokens - cached.get(w.place, 0) <= self._local_prefill_tokens]
        if registry.colocated:
            return _local(ask, free, cached, LocalPrefill.COLOCATED)
        if not prefill:
            route = _local(ask, free, cached, LocalPrefill.NO_PREFILL_WORKER)
            return replace(route, reason=LocalPrefill.SHORT) if route.decode in near else route
        handoff = _handoff(ask, prefill, decode, cached)
        if near:
            short = _local(ask, near, cached, LocalPrefill.SHORT)
            if ask.least_wait:
                return short if short.expected.wait_s < handoff.expected.wait_s else handoff
            if short.expected.decode_s <= _CLOSE_FACTOR * handoff.expected.decode_s + _HANDOFF_S:
                return short
        return handoff

    def _next(self, workers: list[WorkerView]) -> list[WorkerView]:
        return workers and [workers[self._turn % len(workers)]]


def least_loaded_decode(workers: list[WorkerView], ask: Ask, cached: Cached) -> WorkerView:
    """The worker with the earliest room; then the lowest occupancy, roughly; then, among uncrowded workers, the most
    cached prompt tokens; then the fewest requests from this gateway."""
    uncrowded = _uncrowded(workers)

    def key(worker: WorkerView) -> tuple[object, ...]:
        return (
            room_s(worker, ask.tier, ask.num_choices),
            int(occupancy(worker) / _OCCUPANCY_STEP),
            -cached.get(worker.place, 0) if worker in uncrowded else 0,
            worker.in_flight,
            worker.address,
        )

    return min(workers, key=key)


def _handoff(ask: Ask, prefill: list[WorkerView], decode: list[WorkerView], cached: Cached) -> Handoff:
    holder = _least([*prefill, *decode], lambda w: -cached.get(w.place, 0))
    most = cached.get(holder.place, 0)

    def own_s(worker: WorkerView) -> float:
        return prompt_s(worker, ask.num_tokens, cached.get(worker.place, 0), most)

    def ready_s(worker: WorkerView) -> float:
        return queue_s(worker, ask.tier, ask.now) + (0.0 if ask.least_wait else own_s(worker))

    chosen = _least(_soonest(prefill, ready_s), lambda w: -cached.get(w.place, 0))
    here = cached.get(chosen.place, 0)
    taker = least_loaded_decode(decode, ask, cached)
    return Handoff(
        prefill=chosen,
        decode=taker,
        prefix=PrefixHint(source=holder.place.source, num_tokens=most) if most > here else None,
        num_cached=here,
        expected=Expected(
            queue_s=queue_s(chosen, ask.tier, ask.now),
            prompt_s=own_s(chosen),
            room_s=room_s(taker, ask.tier, ask.num_choices),
        ),
    )


def _local(ask: Ask, decode: list[WorkerView], cached: Cached, reason: LocalPrefill) -> Local:
    def expected(worker: WorkerView) -> Expected:
        return Expected(
            queue_s=queue_s(worker, ask.tier, ask.now),
            prompt_s=prompt_s(worker, ask.num_tokens, cached.get(worker.place, 0)),
            room_s=room_s(worker, ask.tier, ask.num_choices),
        )

    def ready_s(worker: WorkerView) -> float:
        return expected(worker).wait_s if ask.least_wait else expected(worker).decode_s

    chosen = least_loaded_decode(_soonest(decode, ready_s), ask, cached)
    return Local(decode=chosen, num_cached=cached.get(chosen.place, 0), expected=expected(chosen), reason=reason)


def _uncrowded(decode: list[WorkerView]) -> list[WorkerView]:
    fewest = min(worker.in_flight for worker in decode)
    return [worker for worker in decode if worker.in_flight <= _CROWDED_FACTOR * fewest + _CROWDED_REQUESTS]


def _soonest(workers: list[WorkerView], seconds: Callable[[WorkerView], float]) -> list[WorkerView]:
    """Workers whose expected time is within tolerance of the least."""
    expected = [seconds(worker) for worker in workers]
    most = min(expected) * _CLOSE_FACTOR + _CLOSE_S
    return [worker for worker, each in zip(workers, expected, strict=True) if each <= most]


def _least(workers: list[WorkerView], key: Callable[[WorkerView], float]) -> WorkerView:
    """The worker with the least `key`; then the one with the fewest requests from this gateway."""
    return min(workers, key=lambda worker: (key(worker), worker.in_flight, worker.address))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
