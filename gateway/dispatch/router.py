"""Choice of the workers for a request. Pure: a choice depends on the registry's state, on the part of the prompt that
each worker probably has cached (`cached`), and on the handoffs that have failed.

condition, in this order           workers                                                   reason
no prefill workers exist           one decode worker, which computes the prompt too          colocated
no prefill worker is usable        the same, so that the request is served                   no_prefill_worker
usable ones do not take it, three
have just failed it, or no decode
worker can read from any           the same                                                  refused
few tokens are left to compute     the same, unless the handoff is sooner by a margin        short
otherwise                          a prefill and a decode worker                             handoff

Routes are compared by the time until the second token can follow. The reason is `short` in the second and third case,
too, if few tokens are left to compute.

The prefill worker is the one with the earliest expected first token (`gateway.dispatch.estimates`). The decode worker
is, among those of the profile that the tier asks for (`gateway.dispatch.profiles`), the one with room soonest, then the
fewest blocks in use; workers that can hold the sequence to its end are preferred. Workers that have just failed the
request are avoided, and so is a pair between which a handoff has just failed (`gateway.dispatch.broken_paths`). For an
offer that still stands only a decode worker is chosen (`Router.rebind`).

All workers are compared, as columns of a table (`gateway.workers.load_table`). A worker is named by its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.contract.messages.gateway import PrefixHint
from common.contract.messages.session import Role
from common.contract.tiers import NO_TARGETS, Target, Tier
from gateway.dispatch.ask import Ask, either, without
from gateway.dispatch.broken_paths import BrokenPaths
from gateway.dispatch.estimates import prompt_s, queue_s, room_s
from gateway.dispatch.profiles import of_profile
from gateway.workers.load_table import Column, LoadTable, Rows
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import WorkerView

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
    REFUSED = "refused"
    """Prefill workers are usable, but none takes the prompt: they have refused or failed it, or cannot hold it; or
    three have failed it, and the others are not asked; or handoffs from them have failed."""


class Expected(NamedTuple):
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


class Handoff(NamedTuple):
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


class Local(NamedTuple):
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


class Rebind(NamedTuple):
    """Another decode worker takes over an offer that still stands."""

    decode: WorkerView


Route: TypeAlias = Handoff | Local | Rebind
Cached: TypeAlias = Mapping[WorkerLife, int]
"""Worker → leading prompt tokens that its cache probably holds, always fewer than the prompt has."""


class Router:
    """Chooses workers for prompts."""

    def __init__(
        self,
        registry: Registry,
        *,
        local_prefill_tokens: int = 0,
        targets: Mapping[Tier, Target] = NO_TARGETS,
    ) -> None:
        """A prompt is short for a decode worker that would compute at most `local_prefill_tokens` of it."""
        self._targets = targets
        self.paths = BrokenPaths()
        """Pairs of workers between which handoffs have failed."""
        self._registry = registry
        self._local_prefill_tokens = local_prefill_tokens

    def takers(self, ask: Ask) -> Rows:
        """The usable decode workers that may take a request."""
        return ask.takers(self._registry.table, self._registry.usable_rows(Role.DECODE))

    def hope(self, ask: Ask) -> bool:
        """Whether a decode worker exists that may take a request, now or after draining."""
        table = self._registry.table
        there = [
            row
            for row, worker in enumerate(table.workers)
            if worker.role is Role.DECODE and worker.there and worker.refused is None
            if worker.fits(ask.fingerprint)
        ]
        # `Ask.takers` judges all by the first one, as usable workers have one fingerprint. These need not.
        return len(ask._replace(fingerprint=None).takers(table, np.array(there, dtype=np.intp))) > 0

    def all_too_small(self, ask: Ask) -> bool:
        """Whether decode workers are usable, and all have said that they can never hold the request."""
        usable = self.takers(ask._replace(avoid=frozenset(), too_small=frozenset()))
        return len(usable) > 0 and not len(self.takers(ask))

    def has_room(self, ask: Ask, takers: Rows) -> bool:
        """Whether one of these decode workers is expected to have room at once. Until its first heartbeat a worker is
        not, because nobody knows how many places it has."""
        table = self._registry.table
        soon = takers[room_s(table, ask.tier, ask.num_choices)[takers] <= 0.0]
        return any(worker.load is not None for worker in table.views(soon))

    def choose(self, ask: Ask, cached: Cached) -> Handoff | Local:
        """Workers for a prompt, for which there must be `takers`."""
        registry, table = self._registry, self._registry.table
        usable = registry.usable_rows(Role.PREFILL)
        prefill = ask.prefill_rows(table, usable)
        decode = ask.decode_rows(table, registry.usable_rows(Role.DECODE))
        here = table.spread(cached)
        times = _Times(queue_s(table, ask.tier, ask.now), room_s(table, ask.tier, ask.num_choices))
        of_any_profile = decode
        if not ask.least_wait:
            decode = of_profile(table, decode, ask.tier, self._targets[ask.tier], times.wait_s)
        free = _uncrowded(table, decode)
        near = free[ask.num_tokens - here[free] <= self._local_prefill_tokens]
        if registry.colocated:
            return _local(table, ask, free, here, times, LocalPrefill.COLOCATED)
        takers = decode
        if self.paths.sources():
            soonest = _fewest(decode, times.room_s)
            ways = ((soonest, decode), (decode, decode), (of_any_profile, of_any_profile))
            prefill, takers = self._readable(prefill, ways, ask.now)
        if not len(prefill):
            reason = LocalPrefill.REFUSED if len(usable) else LocalPrefill.NO_PREFILL_WORKER
            route = _local(table, ask, free, here, times, reason)
            is_short = ask.num_tokens - route.num_cached <= self._local_prefill_tokens
            return route._replace(reason=LocalPrefill.SHORT) if is_short else route
        handoff = self._handoff(ask, prefill, takers, here, times)
        if len(near):
            short = _local(table, ask, near, here, times, LocalPrefill.SHORT)
            if ask.least_wait:
                return short if short.expected.wait_s < handoff.expected.wait_s else handoff
            if short.expected.decode_s <= _CLOSE_FACTOR * handoff.expected.decode_s + _HANDOFF_S:
                return short
        return handoff

    def rebind(self, source: WorkerLife, ask: Ask, cached: Cached) -> Rebind:
        """A decode worker for an offer of `source` that still stands. There must be `takers`."""
        table = self._registry.table
        decode = ask.decode_rows(table, self._registry.usable_rows(Role.DECODE))
        decode = either(without(table, decode, self.paths.avoided(source, ask.now)), decode)
        return Rebind(self.taker(decode, ask, cached))

    def taker(self, rows: Rows, ask: Ask, cached: Cached) -> WorkerView:
        """The decode worker, of at least one, for a sequence that is computed elsewhere: of the profile that the tier
        asks for the one with the earliest room; then the lowest occupancy, roughly; then, among uncrowded workers, the
        most cached prompt tokens; then the fewest requests from this gateway."""
        table = self._registry.table
        until_room_s = room_s(table, ask.tier, ask.num_choices)
        rows = of_profile(table, rows, ask.tier, self._targets[ask.tier], until_room_s)
        return table.workers[_least_loaded(table, rows, table.spread(cached), until_room_s)]

    def _handoff(self, ask: Ask, prefill: Rows, decode: Rows, here: Column, times: _Times) -> Handoff:
        table = self._registry.table
        holders = np.concatenate([prefill, decode])
        most = int(np.maximum.reduce(here[holders]))
        own_s = prompt_s(table, ask.num_tokens, here, most)
        chosen = _least(table, _soonest(prefill, times.queue_s if ask.least_wait else times.queue_s + own_s), -here)
        num_cached = int(here[chosen])
        taker = _least_loaded(table, self._readers(chosen, decode, ask.now), here, times.room_s)
        prefix = None
        if most > num_cached:
            holder = table.workers[_least(table, holders, -here)]
            prefix = PrefixHint(source=holder.life.source, num_tokens=most)
        return Handoff(
            prefill=table.workers[chosen],
            decode=table.workers[taker],
            prefix=prefix,
            num_cached=num_cached,
            expected=Expected(
                queue_s=float(times.queue_s[chosen]), prompt_s=float(own_s[chosen]), room_s=float(times.room_s[taker])
            ),
        )

    def _readable(self, prefill: Rows, ways: Sequence[tuple[Rows, Rows]], now: float) -> tuple[Rows, Rows]:
        """(prefill workers, decode workers to choose from) for the first way on which any may read. A way is (decode
        workers of which one must be able to read from a prefill worker, decode workers to choose from)."""
        for readers, takers in ways:
            left = [row for row in prefill.tolist() if len(self._readers(row, readers, now))]
            if left:
                return np.array(left, dtype=np.intp), takers
        return prefill[:0], ways[-1][1]

    def _readers(self, source: int, decode: Rows, now: float) -> Rows:
        """Those of the decode workers that may read from the worker of row `source`."""
        table = self._registry.table
        return without(table, decode, self.paths.avoided(table.workers[source].life, now))


class _Times(NamedTuple):
    """Expected seconds at each worker, for a prompt of the tier."""

    queue_s: Column
    """Until the prompt's turn."""
    room_s: Column
    """Until the worker has room."""

    @property
    def wait_s(self) -> Column:
        """Until the worker has room, and the prompt its turn there."""
        return np.maximum(self.queue_s, self.room_s)


def _least_loaded(table: LoadTable, rows: Rows, here: Column, until_room_s: Column) -> int:
    if len(rows) == 1:
        return rows.item()
    sought = np.zeros_like(here)
    uncrowded = _uncrowded(table, rows)
    sought[uncrowded] = here[uncrowded]
    rows = _fewest(rows, until_room_s)
    rows = _fewest(rows, np.floor(table.occupancy / _OCCUPANCY_STEP))
    return _least(table, rows, -sought)


def _local(table: LoadTable, ask: Ask, decode: Rows, here: Column, times: _Times, reason: LocalPrefill) -> Local:
    own_s = prompt_s(table, ask.num_tokens, here)
    soonest = _soonest(decode, times.wait_s if ask.least_wait else times.wait_s + own_s)
    chosen = _least_loaded(table, soonest, here, times.room_s)
    expected = Expected(
        queue_s=float(times.queue_s[chosen]), prompt_s=float(own_s[chosen]), room_s=float(times.room_s[chosen])
    )
    return Local(decode=table.workers[chosen], num_cached=int(here[chosen]), expected=expected, reason=reason)


def _uncrowded(table: LoadTable, decode: Rows) -> Rows:
    """The workers that have not many more requests than others of their profile: batches of the other one are larger,
    or smaller."""
    latency = table.latency[decode] == 1
    if latency.all() or not latency.any():
        return _near_least(decode, table.in_flight, _CROWDED_FACTOR, _CROWDED_REQUESTS)
    each = [_uncrowded(table, decode[latency]), _uncrowded(table, decode[~latency])]
    return np.sort(np.concatenate(each))


def _soonest(rows: Rows, seconds: Column) -> Rows:
    """Workers whose expected time is within tolerance of the least."""
    return _near_least(rows, seconds, _CLOSE_FACTOR, _CLOSE_S)


def _fewest(rows: Rows, values: Column) -> Rows:
    """The workers whose value is the least."""
    return _near_least(rows, values, 1.0, 0.0)


def _near_least(rows: Rows, values: Column, factor: float, more: float) -> Rows:
    """The workers whose value is at most `factor` times the least one and `more`."""
    if len(rows) == 1:
        return rows
    theirs = values[rows]
    is_among: NDArray[np.bool_] = theirs <= factor * float(np.minimum.reduce(theirs)) + more
    return rows[is_among]


def _least(table: LoadTable, rows: Rows, key: Column) -> int:
    """The worker with the least `key`; then the one with the fewest requests from this gateway."""
    rows = _fewest(_fewest(rows, key), table.in_flight)
    return rows.item() if len(rows) == 1 else int(rows[table.address_rank[rows].argmin()])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
