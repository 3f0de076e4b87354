"""What choices ask of workers, and which workers come into question for them. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

import numpy as np

from common.contract.kv_layout import Fingerprint
from common.contract.tiers import Tier
from gateway.serving.flow import Flow
from gateway.serving.flow_actions import Want
from gateway.workers.load_table import LoadTable, Rows
from gateway.workers.worker_life import WorkerLife

_MOST_SOURCES: Final = 3
"""Usable prefill workers that may fail an admitted request in a row; then a decode worker computes the prompt. Perhaps
no decode worker reaches any of them, and each attempt takes the time in which a loss is noticed."""


class Ask(NamedTuple):
    """A prompt to place, the time, and restrictions on the choice of workers."""

    num_tokens: int
    """Tokens of the sequence whose KV is wanted."""
    tier: Tier = Tier.STANDARD
    num_choices: int = 1
    most_tokens: int = 0
    """Most tokens that one sequence can have in the end."""
    now: float = 0.0
    least_wait: bool = False
    """Whether to minimise the wait, however long the prompt then takes, and whatever profile the tier asks for."""
    fingerprint: Fingerprint | None = None
    """The fingerprint that the request has begun with; workers with another one are excluded. None before it has
    begun."""
    avoid: frozenset[WorkerLife] = frozenset()
    """Workers that have just failed the request."""
    too_small: frozenset[WorkerLife] = frozenset()
    """Workers that have said that they can never hold the request."""
    beside: frozenset[WorkerLife] = frozenset()
    """Workers to prefer, if they are among the candidates."""
    admitted: bool = False
    """Whether the request is admitted. It may then retry workers that failed it."""

    @classmethod
    def of(cls, want: Want, flow: Flow, now: float = 0.0, fingerprint: Fingerprint | None = None) -> Self:
        """What choices of a flow that want workers ask for."""
        return cls(
            num_tokens=want.num_tokens,
            tier=flow.generation.tier,
            num_choices=len(want.choices),
            most_tokens=flow.generation.most_tokens,
            now=now,
            fingerprint=fingerprint,
            avoid=want.avoid,
            too_small=want.too_small,
            beside=flow.beside(want),
            admitted=flow.admitted,
        )

    def takers(self, table: LoadTable, rows: Rows) -> Rows:
        """The decode workers, of `rows`, that may take the request. Those that report that they can hold it are
        returned; if there are none, all, and the worker decides whether it fits."""
        rows = without(table, self._fitting(table, rows), self.too_small)
        rows = either(rows[table.max_sequence_tokens[rows] >= self.most_tokens], rows)
        return rows if self.admitted else without(table, rows, self.avoid)

    def decode_rows(self, table: LoadTable, rows: Rows) -> Rows:
        """The decode workers to choose from. If all of them have failed the request, all are returned."""
        rows = self.takers(table, rows)
        rows = either(without(table, rows, self.avoid), rows)
        return self._beside(table, connected(table, rows))

    def prefill_rows(self, table: LoadTable, rows: Rows) -> Rows:
        """The prefill workers to choose from. Those that have failed the request are excluded, because decode workers
        can compute prompts too; if several have, all are."""
        rows = self._fitting(table, rows)
        left = without(table, rows, self.avoid)
        if self.admitted and len(rows) - len(left) >= _MOST_SOURCES:
            return rows[:0]
        left = without(table, left, self.too_small)
        left = left[table.max_sequence_tokens[left] >= self.num_tokens]
        return self._beside(table, connected(table, left))

    def _beside(self, table: LoadTable, rows: Rows) -> Rows:
        return either(rows[np.isin(rows, table.rows_of(self.beside))], rows) if self.beside else rows

    def _fitting(self, table: LoadTable, rows: Rows) -> Rows:
        """The workers with the fingerprint, all or none: all usable workers have one (`Registry`)."""
        return rows if not len(rows) or table.workers[rows[0]].fits(self.fingerprint) else rows[:0]


def without(table: LoadTable, rows: Rows, lives: frozenset[WorkerLife]) -> Rows:
    """The workers of `rows` but for these."""
    return rows[~np.isin(rows, table.rows_of(lives))] if lives else rows


def connected(table: LoadTable, rows: Rows) -> Rows:
    """The workers whose connection has not broken, or all if there are none: the others have perhaps crashed."""
    return either(rows[~np.isin(rows, list(table.broken))], rows) if table.broken else rows


def either(rows: Rows, others: Rows) -> Rows:
    """The first ones, or the others if there are none."""
    return rows if len(rows) else others
