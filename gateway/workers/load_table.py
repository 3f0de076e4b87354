"""The loads of all workers as arrays, so that a request is compared with a thousand workers in a few operations. Pure
state.

A row holds what is known of a worker and does not depend on a request. It is computed when that changes: with a
heartbeat, when work is given, and when work ends. What depends on a request or on the time is computed from whole
columns (`gateway.dispatch.estimates`).

Why columns, and not candidates in an order: a prompt's expected time depends on its length and tier, the present time
and each worker's speed, so no order of the workers holds for two requests. A walk through an ordered list needs bounds
to end early, and visits all workers anyway if all are equally loaded, or if all hold the beginning of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.contract.messages.session import Profile
from common.contract.tiers import Tier
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import WorkerView

Rows: TypeAlias = NDArray[np.intp]
"""Rows of the table, each at most once."""
Column: TypeAlias = NDArray[np.float64]
"""A value for each row of the table."""

_TRUSTED_S: Final = 0.5
"""Seconds after its last report for which a worker is assumed to go on; a silent one may have stopped."""
_UNKNOWN_TOKEN_S: Final = 1e-3
"""Seconds per prompt token at a worker that has not reported yet."""
_UNKNOWN_PLACES: Final = 64
"""Assumed places for sequences at a decode worker that has not reported yet: the default batch size."""
_UNKNOWN_SEQUENCE_S: Final = 1.0
"""Assumed seconds per sequence at a worker where none has ended yet, so that a full worker has a wait above 0."""
_NUM_TIERS: Final = len(Tier)


class LoadTable:
    """A row for each worker, in the given order. `N` is their number, `T` that of the tiers."""

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        self.workers = tuple(workers)
        self._rows = {worker.address: row for row, worker in enumerate(self.workers)}
        num = len(self.workers)
        self._cells = np.zeros((3 * _NUM_TIERS + 10, num))
        tiers, rest = self._cells[: 3 * _NUM_TIERS], iter(self._cells[3 * _NUM_TIERS :])
        self.backlog_s_TN = tiers[:_NUM_TIERS]
        """Seconds of prompts that precede a new one of a tier, at the time `backlog_at_TN`."""
        self.backlog_at_TN = tiers[_NUM_TIERS : 2 * _NUM_TIERS]
        """When the backlog was so long. It shrinks from then on, until `trusted_until`."""
        self.sequences_TN = tiers[2 * _NUM_TIERS :]
        """Sequences of a tier and those above it."""
        self.trusted_until = next(rest)
        """Until when the worker is assumed to go on."""
        self.token_s = next(rest)
        """Seconds per prompt token."""
        self.pulled_token_s = next(rest)
        """Seconds to pull the KV of a token; infinite if unknown."""
        self.places = next(rest)
        """Most sequences that a decode worker can hold at once."""
        self.sequence_s = next(rest)
        """Seconds that a sequence takes; 0 if the worker has no places, and so does not say when one is free."""
        self.occupancy = next(rest)
        """Share of a decode worker's blocks that are expected to be in use. Before its first heartbeat, a worker that
        was given work counts as full, and any other as empty."""
        self.in_flight = next(rest)
        """Requests that this gateway has given it."""
        self.max_sequence_tokens = next(rest)
        """Tokens of the longest sequence that it accepts."""
        self.latency = next(rest)
        """1 for a decode worker with the profile latency."""
        self.itl_s = next(rest)
        """Recent seconds between the tokens of a decode worker's sequences; 0 if it has none."""
        by_address = sorted(range(num), key=lambda row: self.workers[row].address)
        self.address_rank = np.empty(num)
        """Position of the worker's address among all addresses."""
        self.address_rank[by_address] = np.arange(num)
        self.broken: set[int] = set()
        """Rows of workers whose connection has broken, mostly none."""
        for worker in self.workers:
            self.update(worker)

    def update(self, worker: WorkerView) -> None:
        """Take what is known of a worker now; inert if the table has no row for it."""
        row = self._rows.get(worker.address)
        if row is not None:
            self._cells[:, row] = _cells(worker)
            (self.broken.discard if worker.broken_at is None else self.broken.add)(row)

    def views(self, rows: Rows) -> list[WorkerView]:
        """The workers of these rows."""
        return [self.workers[row] for row in rows.tolist()]

    def spread(self, values: Mapping[WorkerLife, int]) -> Column:
        """The values as a column, with 0 for workers that have none. Values of workers that are not here are left
        out."""
        column = np.zeros(len(self.workers))
        for life, value in values.items():
            row = self._rows.get(life.address)
            if row is not None and self.workers[row].incarnation == life.incarnation:
                column[row] = value
        return column

    def rows_of(self, lives: Iterable[WorkerLife]) -> Rows:
        """Rows of those of the worker lives that are here."""
        found = [(self._rows.get(life.address), life.incarnation) for life in lives]
        return np.array(
            [row for row, incarnation in found if row is not None and self.workers[row].incarnation == incarnation],
            dtype=np.intp,
        )


def _cells(worker: WorkerView) -> list[float]:
    load = worker.load
    token_s = _UNKNOWN_TOKEN_S if load is None else load.token_s
    places = _UNKNOWN_PLACES if load is None else load.places
    sequence_s = (0.0 if load is None else load.sequence_s) or _UNKNOWN_SEQUENCE_S
    return [
        *_backlogs(worker, token_s),
        *accumulate(worker.sequences),
        worker.load_at + _TRUSTED_S,
        token_s,
        np.inf if load is None else load.pulled_token_s,
        places,
        sequence_s if places else 0.0,
        len(worker.unseen) > 0 if load is None else worker.blocks_expected / max(1, load.blocks_total),
        worker.in_flight,
        -1 if worker.welcome is None else worker.welcome.max_sequence_tokens,
        worker.profile is Profile.LATENCY,
        0.0 if load is None else load.itl_s,
    ]


def _backlogs(worker: WorkerView, token_s: float) -> list[float]:
    """For each tier, the seconds of prompts that precede a new one; and for each tier, when that was so.

    The backlog at a time `now`, not before the last event here, is this one less the time since then, and at least 0.
    """
    queued = (0,) * _NUM_TIERS if worker.load is None else worker.load.queued_tokens
    backlogs_s = [token_s * num_tokens for num_tokens in accumulate(queued)]
    moments = [worker.load_at] * _NUM_TIERS
    trusted_until = worker.load_at + _TRUSTED_S
    for given in worker.unseen:
        if not given.num_tokens:
            continue
        at, work_s = min(given.at, trusted_until), token_s * given.num_tokens
        for rank in range(given.tier.rank, _NUM_TIERS):
            done_s = at - moments[rank]
            if done_s > 0.0:
                moments[rank] = at
                backlogs_s[rank] = work_s + (backlogs_s[rank] - done_s if backlogs_s[rank] > done_s else 0.0)
            else:
                backlogs_s[rank] += work_s
    return backlogs_s + moments
